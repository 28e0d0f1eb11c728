"""Spaces of workload-aware allocation: the batch, at several numbers of micro-batches, on splits of the devices."""

import functools
from dataclasses import replace
from math import inf

from xcore.policies.waa import WAA_C, WAA_M
from xcore.specs.schedule import BLOCK_SIZE
from xscheduler import ceilings
from xscheduler.allocation import Layout
from xscheduler.candidates import CandidateFamily, Candidates, candidates
from xscheduler.ceilings import SpaceLimits
from xscheduler.search_problem import SearchProblem
from xscheduler.spaces.grids import ascending, enumerated
from xscheduler.spaces.policy_space import PolicySpace, Spaces

FEW_DEVICES = 8
"""Up to this many devices, WAA's spaces enumerate all splits: rounding then matters more than the proportion."""


def _spaces(policy: str, problem: SearchProblem) -> Spaces:
    """Yield all pairs of layouts of the two sides, for a variant's device splits."""
    variant = (policy == WAA_M.name and _twin(problem)) or policy
    for devices in problem.replica_sizes():
        for encoding in own_splits(variant, problem, devices):
            encoders = problem.encoders(encoding)
            for decode in problem.layouts(devices - encoding, uniform=False) if encoders else ():
                if problem.decoder(decode):
                    yield _waa_family(policy, problem, encoders, decode)


def own_splits(policy: str, problem: SearchProblem, devices: int) -> list[int]:
    """Return the numbers of encoding devices that a variant searches.

    Each split belongs to one variant: WAA-C divides the devices by computing time, WAA-M by memory in use, and each
    takes the splits that are nearer to its own rule's. A number that the user fixed belongs to both.
    """
    by_time, by_memory = time_split(problem, devices), memory_split(problem, devices)
    if problem.fixed.get("encode_devices"):
        return gpu_splits(problem, devices, by_time, by_memory)
    nearer = {n: abs(n - by_memory) < abs(n - by_time) for n in gpu_splits(problem, devices, by_time, by_memory)}
    return [n for n, to_memory in nearer.items() if to_memory == (policy == WAA_M.name)]


def gpu_splits(problem: SearchProblem, devices: int, by_time: float, by_memory: float) -> list[int]:
    """Return the numbers of encoding devices that both variants search together.

    On few devices, these are all numbers. On many, they are those around each rule's split. Neighbouring splits hardly
    differ there, so some are left out.
    """
    if asked := problem.fixed.get("encode_devices"):
        return [asked] if asked < devices else []
    if devices <= FEW_DEVICES:
        return list(range(1, devices))
    near, splits = max(1, devices // 8), set[int]()
    for share in (by_time, by_memory):
        middle = round(share)
        splits.update(range(max(1, middle - near), min(devices - 1, middle + near) + 1, max(1, near // 8)))
    return sorted(splits)


def time_split(problem: SearchProblem, devices: int) -> float:
    """Return the number of encoding devices in proportion to computing time."""
    speed = problem.speeds[min(problem.speeds)]
    return _within(devices * speed.encode / (speed.encode + speed.decode), devices)


def _within(split: float, devices: int) -> float:
    return min(max(split, 1.0), devices - 1.0)


def memory_split(problem: SearchProblem, devices: int) -> float:
    """Return the number of encoding devices at which the memory in use on the devices of both sides differs least.

    On many devices, keys and values are assumed to fill the decoding devices, so that the encoders' weights must fill
    theirs. On few devices, where each number is tried, the decoding side holds the sequences that the encoders' rate
    leads to, as far as memory holds them.
    """
    if devices > FEW_DEVICES:
        usable = problem.cost_model.engine_memory.usable_bytes(problem.cost_model.cluster)
        return _within(_weights(problem)[0] / usable, devices)
    differences = {n: _memory_difference(problem, devices, n) for n in range(1, devices)}
    return min(differences, key=lambda n: (differences[n], n), default=1)


def _weights(problem: SearchProblem) -> tuple[float, float]:
    """Return the bytes of the encoding side's layers, and of the decoding side's."""
    model, dtype = problem.cost_model.model, problem.cost_model.profile.dtype
    encoder = model.encoder_layers > 0
    layers = model.encoder_layers or model.layers
    return layers * model.layer_bytes(1, dtype, encoder=encoder), model.layers * model.layer_bytes(1, dtype)


def _memory_difference(problem: SearchProblem, devices: int, encoding: int) -> float:
    """Return by how many bytes in use the devices of both sides differ; infinite if the weights don't fit."""
    encoders = problem.encoders(encoding)
    layouts = problem.layouts(devices - encoding, uniform=False) if encoders else ()
    decoders = [decoder for layout in layouts if (decoder := problem.decoder(layout))]
    if not decoders:
        return inf
    rate = max(encoder.rate for encoder in encoders.values())
    residents = max(ceilings.residents_at(decoder, problem.load.mean_iterations, rate) for decoder in decoders)
    model, kept = problem.cost_model.model, problem.load.resident_blocks("reserve").mean * BLOCK_SIZE
    cache = residents * kept * model.layers * model.kv_bytes(1, problem.cost_model.kv_dtype)
    encode_weights, decode_weights = _weights(problem)
    return abs(encode_weights / encoding - (decode_weights + cache) / (devices - encoding))


def _waa_family(
    policy: str, problem: SearchProblem, encoders: dict[Layout, ceilings.EncodeReach], decode: Layout
) -> CandidateFamily:
    """Return the spaces of a decoding side with every layout of the encoding side and every B_m."""
    decoder, together = problem.decoder(decode), problem.decoder(decode, 1)
    devices = next(iter(encoders)).devices + decode.devices
    assert decoder and together
    parts = enumerated(problem, "micro_batches", micro_batch_counts(len(decode.degrees)))
    batches = ascending(problem, "encode_batch", int(decoder.batch[-1]) + 1)
    mean, longest = problem.needs
    bound = problem.limits.latency_s

    def bounds(encoder: ceilings.EncodeReach, decoder: ceilings.Reach) -> SpaceLimits:
        """Return the bounds of sides of these speeds."""
        quickest = (encoder.latency + longest * float(decoder.iteration[0])) / ceilings.MARGIN
        if (bound is not None and quickest > bound) or encoder.latency / ceilings.MARGIN > problem.slowest_first_s:
            return SpaceLimits(0.0, quickest)
        budget = None if bound is None else bound - encoder.latency / ceilings.MARGIN
        decoded = ceilings.decode_rate(decoder, mean, longest, budget, problem.slowest_iteration_s)
        return SpaceLimits(problem.tokens_s(min(encoder.rate, decoded), devices), quickest)

    def make() -> list[Candidates]:
        reaches = [(count, problem.decoder(decode, count)) for count in parts]
        return [
            candidates(
                policy,
                problem,
                functools.partial(problem.split, encode, decode),
                (batches,),
                bounds(encoder, reach),
                micro_batches=count,
            )
            for encode, encoder in encoders.items()
            for count, reach in reaches
            if reach
        ]

    reach = encoders.values()
    fastest = ceilings.EncodeReach(max(e.rate for e in reach), min(e.latency for e in reach))
    # Of all B_m, as many as stages have the smallest parts and so the quickest pass through all stages. A single one
    # has the largest part and so the least time per sequence.
    best = bounds(fastest, replace(decoder, busiest=together.busiest))
    return CandidateFamily(
        policy,
        best.ceiling,
        len(encoders) * len(parts) * len(batches.values),
        make,
        quickest_s=best.quickest_s,
    )


def micro_batch_counts(stages: int) -> tuple[int, ...]:
    """Return the values of B_m, up to the number of stages.

    More micro-batches neither shorten an iteration nor fill the pipeline further.
    """
    return tuple(sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if n < stages} | {stages}))


def _twin(problem: SearchProblem) -> str | None:
    """Return WAA-C if no split would belong to WAA-M, or the user fixed it: WAA-M then has WAA-C's splits."""
    if problem.fixed.get("encode_devices"):
        return WAA_C.name
    own = any(own_splits(WAA_M.name, problem, n) for n in problem.replica_sizes())
    return None if own else WAA_C.name


SPACES = (PolicySpace(WAA_C.name, _spaces), PolicySpace(WAA_M.name, _spaces, twin=_twin))
