"""Spaces of workload-aware allocation: the batch, at several numbers of micro-batches, on splits of the devices."""

import functools

from xcore.policies.waa import WAA_C, WAA_M
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
    """Yield all pairs of layouts of the two sides, for device splits around the proportional one."""
    for devices in problem.replica_sizes():
        for encoding in gpu_splits(policy == WAA_M.name, problem, devices):
            encoders = problem.encoders(encoding)
            for decode in problem.layouts(devices - encoding, uniform=False) if encoders else ():
                if problem.decoder(decode):
                    yield _waa_family(policy, problem, encoders, decode)


def gpu_splits(by_memory: bool, problem: SearchProblem, devices: int) -> range:
    """Return the numbers of encoding devices to search.

    On few devices, these are all numbers. On many, WAA-C searches around the share of computing time, and WAA-M around
    equal memory use. Keys and values are assumed to fill the decoding devices, so memory use is equal if the encoders'
    weights fill the encoding devices. On many devices neighbouring splits hardly differ, so some are left out.
    """
    cost_model, near = problem.cost_model, max(1, devices // 8)
    if asked := problem.fixed.get("encode_devices"):
        return range(asked, asked + 1) if asked < devices else range(0)
    if devices <= FEW_DEVICES:
        return range(1, devices)
    if by_memory:
        model, cluster = cost_model.model, cost_model.cluster
        usable = cost_model.engine_memory.usable_bytes(cluster)
        layers = model.encoder_layers or model.layers
        weights = layers * model.layer_bytes(1, cost_model.profile.dtype, encoder=model.encoder_layers > 0)
        share = weights / usable
    else:
        speed = problem.speeds[min(problem.speeds)]
        share = devices * speed.encode / (speed.encode + speed.decode)
    middle = min(max(round(share), 1), devices - 1)
    return range(max(1, middle - near), min(devices - 1, middle + near) + 1, max(1, near // 8))


def _waa_family(
    policy: str, problem: SearchProblem, encoders: dict[Layout, ceilings.EncodeReach], decode: Layout
) -> CandidateFamily:
    """Return the spaces of a decoding side with every layout of the encoding side and every B_m."""
    decoder, devices = problem.decoder(decode), next(iter(encoders)).devices + decode.devices
    assert decoder is not None
    parts = enumerated(problem, "micro_batches", micro_batch_counts(len(decode.degrees)))
    batches = ascending(problem, "encode_batch", int(decoder.batch[-1]) + 1)
    mean, longest = problem.needs
    bound = problem.limits.latency_s

    def bounds(encoder: ceilings.EncodeReach) -> SpaceLimits:
        """Return the bounds with an encoding side of this speed."""
        quickest = (encoder.latency + longest * float(decoder.iteration[0])) / ceilings.MARGIN
        if bound is not None and quickest > bound:
            return SpaceLimits(0.0, quickest)
        budget = None if bound is None else bound - encoder.latency / ceilings.MARGIN
        ceiling = min(encoder.rate, ceilings.decode_rate(decoder, mean, longest, budget))
        return SpaceLimits(problem.tokens_s(ceiling, devices), quickest)

    def make() -> list[Candidates]:
        return [
            candidates(
                policy,
                problem,
                functools.partial(problem.split, encode, decode),
                (batches,),
                bounds(encoder),
                micro_batches=count,
            )
            for encode, encoder in encoders.items()
            for count in parts
        ]

    reach = encoders.values()
    best = bounds(ceilings.EncodeReach(max(e.rate for e in reach), min(e.latency for e in reach)))
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
    """Return WAA-C if WAA-M has the same splits of the devices: the policies are otherwise equal."""
    same = (gpu_splits(False, problem, n) == gpu_splits(True, problem, n) for n in problem.replica_sizes())
    return WAA_C.name if all(same) else None


SPACES = (PolicySpace(WAA_C.name, _spaces), PolicySpace(WAA_M.name, _spaces, twin=_twin))
