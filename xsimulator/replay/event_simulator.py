"""The event simulator: a finite list of requests through a policy's own decisions, ramp-up and drain included.

It follows the same policies and the same ledger as the runner; where the runner computes a step, it asks the profile
how long the step takes. On a pipeline every step is split into micro-batches (as many as stages, unless the schedule
says otherwise), a sequence always in the same one. The next step is decided when the first stage is free, as though it
knew already what ends in the step before. From one event to the next, decoding iterations that are alike but for their
growing contexts are followed at once.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from exegpt.batching import UNKNOWN, Hints, Order, Sequence, deal
from exegpt.estimate import Estimate
from exegpt.orders import fcfs
from exegpt.profile import Profile
from exegpt.schedule import Schedule
from exegpt.served import Served, summarise
from exegpt.timeline import Timeline
from exegpt.workload import RequestLengths
from xsimulator.cost.replica import ReplicaCost
from xsimulator.replay.cells import Pipeline
from xsimulator.replay.event_queue import run
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of


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
    micro_batching = micro_batching_of(schedule)
    record = Record(len(requests), micro_batching.index, replica_cost.encoder_decoder, profile.front_end_s)
    pipelines: list[Pipeline] = []
    busy: list[float] = []
    preemptions = reused = 0
    for r, own in enumerate(deal([(r.input, m) for r, m in zip(requests, most, strict=True)], schedule.replicas)):
        replica = Replica(schedule, replica_cost, record, micro_batching, r, order, adjustment, timeline, step_by_step)
        for i in own:
            sequence = _sequence(i, requests[i], most[i], hints[i] if hints else UNKNOWN)
            replica.submit(sequence, prompts[i] if prompts else ())
        run([replica])
        pipelines += replica.sides.values()
        busy += _by_rank(schedule, replica.sides.values())
        preemptions += replica.ledger.preemptions
        reused += replica.ledger.reused
    seconds = max(pipeline.seconds for pipeline in pipelines)
    served = tuple(sorted(record.served, key=lambda s: (s.finish_s, s.index)))
    spans = sorted((span for p in pipelines for span in p.spans or ()), key=lambda span: span.start_s)
    share = tuple(b / seconds if seconds else 0.0 for b in busy)
    estimate = summarise(served, seconds, schedule.meaning, utilisation=share)
    return Replay(served, Timeline("predicted", tuple(spans)), seconds, estimate, preemptions, reused)


def _sequence(index: int, request: RequestLengths, cap: int, hints: Hints) -> Sequence:
    return Sequence(index, request.input, cap, request.arrival_s, request.output, hints=hints)


def _by_rank(schedule: Schedule, pipelines: Iterable[Pipeline]) -> list[float]:
    """Busy seconds of one replica's devices, stage by stage in the schedule's order."""
    busy = {s.devices: b for pipeline in pipelines for s, b in zip(pipeline.stages, pipeline.busy, strict=True)}
    return [float(busy[stage.devices]) for stage in schedule.stages for _ in stage.devices]
