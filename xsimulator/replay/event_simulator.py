"""The event simulator: a finite list of requests through a policy's own decisions, ramp-up and drain included.

It follows the same policies and the same ledger as the runner; where the runner computes a step, it asks the profile
how long the step takes. On a pipeline every step is split into micro-batches (as many as stages, unless the schedule
says otherwise), a sequence always in the same one. The next step is decided when the first stage is free, as though it
knew already what ends in the step before. From one event to the next, decoding iterations that are alike but for their
growing contexts are followed at once.
"""

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from heapq import heappushpop
from math import inf

from exegpt.batching import UNKNOWN, Hints, MicroBatching, Order, Sequence, deal
from exegpt.batching.prefix_pool import extend_keys
from exegpt.estimate import Estimate
from exegpt.orders import fcfs
from exegpt.policies import make_ledger, make_policy
from exegpt.profile import Profile
from exegpt.schedule import Schedule, StagePhase
from exegpt.served import Served, summarise
from exegpt.timeline import Timeline
from exegpt.workload import RequestLengths
from xsimulator.cost.replica import ReplicaCost
from xsimulator.replay.cells import Pipeline
from xsimulator.replay.lanes import KVTransfer, Lane
from xsimulator.replay.record import Record


@dataclass(frozen=True)
class Replay:
    """What the simulated requests experienced."""

    served: tuple[Served, ...]
    """In order of completion."""
    timeline: Timeline
    """Without spans where they were not asked for."""
    seconds: float
    """Until the last piece of work was done."""
    estimate: Estimate
    preemptions: int
    reused: int
    """Tokens of prompts that were found in the cache."""


def replay(
    schedule: Schedule,
    profile: Profile,
    requests: Items[RequestLengths],
    timeline: bool = True,
    step_by_step: bool = False,
    adjustment: float | None = None,
    caps: Items[int] | None = None,
    prompts: Items[Items[int]] | None = None,
    order: Order = fcfs,
    hints: Items[Hints] | None = None,
) -> Replay:
    """Run `requests` through a schedule in simulated time.

    `timeline` keeps a span for every piece of work, which many requests make many of. `step_by_step` follows every
    iteration alone: the same result, slower. `adjustment` as in `make_policy`. `caps` are the output tokens that
    requests allow, where they end sooner, unannounced. `prompts` are their tokens, where the schedule caches prefixes;
    without, no two begin alike, and only a preempted request finds blocks, its own. `order`: who waits in front, by the
    requests' `hints` where it asks for more than lengths. Raises InputError for a request that the KV cache could not
    hold.
    """
    most = caps or [request.output for request in requests]
    replica_cost = ReplicaCost.of(schedule, profile)
    micro_batches = schedule.micro_batches or len(replica_cost.decode.stages)
    micro_batching = MicroBatching(micro_batches, schedule.encode_micro_batches, schedule.replicas)
    record = Record(len(requests), micro_batching.index, replica_cost.encoder_decoder)
    pipelines: list[Pipeline] = []
    busy: list[float] = []
    preemptions = reused = 0
    for r, own in enumerate(deal([(r.input, m) for r, m in zip(requests, most, strict=True)], schedule.replicas)):
        policy, ledger = make_policy(schedule, adjustment), make_ledger(schedule, order)
        sequences = [_sequence(i, requests[i], most[i], hints[i] if hints else UNKNOWN) for i in own]
        if schedule.prefix_caching:
            for sequence in sequences:
                sequence.keys = keys_of(sequence, schedule.block_size, prompts[sequence.index] if prompts else ())
        ledger.submit(sequences)
        sides = sides_of(replica_cost, micro_batching, timeline, r)
        transfer = KVTransfer(replica_cost)
        follow([Lane(policy, ledger, record, side, phase, transfer, step_by_step) for phase, side in sides.items()])
        pipelines += sides.values()
        busy += _by_rank(schedule, sides.values())
        preemptions += ledger.preemptions
        reused += ledger.reused
    seconds = max(pipeline.seconds for pipeline in pipelines)
    served = tuple(sorted(record.served, key=lambda s: (s.finish_s, s.index)))
    spans = sorted((span for p in pipelines for span in p.spans or ()), key=lambda span: span.start_s)
    share = tuple(b / seconds if seconds else 0.0 for b in busy)
    estimate = summarise(served, seconds, schedule.bound, utilisation=share)
    return Replay(served, Timeline("predicted", tuple(spans)), seconds, estimate, preemptions, reused)


def _sequence(index: int, request: RequestLengths, cap: int, hints: Hints) -> Sequence:
    return Sequence(index, request.input, cap, request.arrival_s, request.output, hints=hints)


def keys_of(sequence: Sequence, block_size: int, prompt: Items[int]) -> Items[Hashable]:
    """A key for each full block that a sequence may come to: those of its prompt's tokens, then keys of its own."""
    keys: list[bytes] = []
    extend_keys(keys, prompt, block_size)
    first, blocks = sequence.index << 32, (sequence.input_tokens + sequence.ends) // block_size
    unique = range(first + len(keys), first + blocks)
    return [*keys, *unique] if keys else unique


def sides_of(
    replica_cost: ReplicaCost, micro_batching: MicroBatching, keep_spans: bool, replica: int
) -> dict[StagePhase, Pipeline]:
    """A replica's pipelines by their phases."""
    decode = Pipeline(replica_cost, replica_cost.decode, micro_batching, keep_spans, replica)
    if not replica_cost.disaggregated:
        return {"both": decode}
    encode = Pipeline(replica_cost, replica_cost.encode, MicroBatching(1), keep_spans, replica)
    return {"encode": encode, "decode": decode}


def follow(lanes: Items[Lane], until: float = inf) -> None:
    """Run lanes of one ledger until no request waits and none is resident, or until some time in seconds."""
    ledger = lanes[0].ledger
    event, *events = [lane.event for lane in lanes]
    while not ledger.idle:
        now, _, lane = event
        if now > until:
            break
        if now == inf:
            raise RuntimeError("a waiting request can never be admitted")  # submit() refuses those
        if lane.act(now, events[0][0] if events else inf) and events:
            events = sorted([other.wake(now) for _, _, other in events])
        event = heappushpop(events, lane.event)


def _by_rank(schedule: Schedule, pipelines: Iterable[Pipeline]) -> list[float]:
    """Busy seconds of one replica's devices, stage by stage in the schedule's order."""
    busy = {s.devices: b for pipeline in pipelines for s, b in zip(pipeline.stages, pipeline.busy, strict=True)}
    return [float(busy[stage.devices]) for stage in schedule.stages for _ in stage.devices]
