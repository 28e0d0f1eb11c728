"""The event simulator: a finite list of requests through a policy's own decisions, ramp-up and drain included.

It follows the same policies and the same ledger as the runner; where the runner computes a step, it asks the profile
how long the step takes. On a pipeline every step is split into micro-batches (as many as stages, unless the schedule
says otherwise), a sequence always in the same one. The next step is decided when the first stage is free and few enough
steps are under way, as though it knew already what ends in the step before. From one event to the next, decoding
iterations that are alike but for their growing contexts are followed at once.
"""

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from xcore.batching import UNKNOWN, Hints, Order, Sequence, deal
from xcore.orders import fcfs
from xcore.orders.fcfs import FCFS
from xcore.specs.estimate import Estimate
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.served import Served, summarise
from xcore.specs.timeline import Span, Timeline
from xcore.specs.workload import RequestLengths
from xcore.traces.prefixes import Prefixes
from xsimulator.cost.replica import ReplicaCost
from xsimulator.replay.cells import Pipeline
from xsimulator.replay.compiled import Replicas, Requests, is_compiled
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
    lanes: bool = False,
) -> Replay:
    """Run `requests` through a schedule in simulated time.

    `timeline` keeps a span for every piece of work, which many requests make many of. `step_by_step` follows every
    iteration alone: the same result, slower. `adjustment` as in `make_policy`. `caps` are the output tokens that
    requests allow, where they end sooner, unannounced. Where the schedule caches prefixes, prompts begin alike as their
    identities say, or as `prompts` do, their tokens, behind which those of their outputs may follow; without either, no
    two begin alike, and only a preempted request finds blocks, its own. `order`: who waits in front, by the requests'
    `hints` where it asks for more than lengths. What the compiled event loop has runs there, unless `lanes` are asked
    for. Raises InputError for a request that the KV cache could not hold.
    """
    prefixes = _prefixes(schedule, requests, prompts)
    special = timeline or step_by_step or lanes or adjustment is not None or caps or type(order) is not FCFS
    if not special and is_compiled(schedule) and _in_turn(schedule, requests):
        return _replay_compiled(schedule, profile, requests, prefixes)
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
            tokens = sequence.input_tokens + sequence.ends
            replica.submit(sequence, prefixes.keys(i, tokens, schedule.block_size) if prefixes else None)
        run([replica])
        pipelines += replica.sides.values()
        busy += _by_rank(schedule, replica.sides.values())
        preemptions += replica.ledger.preemptions
        reused += replica.ledger.reused
    seconds = max(pipeline.seconds for pipeline in pipelines)
    spans = sorted((span for p in pipelines for span in p.spans or ()), key=lambda span: span.start_s)
    return _replay_of(schedule, record.served, seconds, busy, tuple(spans), preemptions, reused)


def _in_turn(schedule: Schedule, requests: Items[RequestLengths]) -> bool:
    """Whether micro-batches are the same when requests are numbered as they arrive, which the compiled loop does."""
    if micro_batching_of(schedule).count == 1:
        return True
    return all(before.arrival_s <= after.arrival_s for before, after in itertools.pairwise(requests))


def _prefixes(
    schedule: Schedule, requests: Items[RequestLengths], prompts: Items[Items[int]] | None
) -> Prefixes | None:
    """What the prompts have in common; None where that is nothing, or prefixes aren't cached."""
    if not schedule.prefix_caching:
        return None
    if prompts is None:
        return Prefixes.of(requests, schedule.block_size)
    return Prefixes.of_texts(prompts, schedule.block_size)


def _replay_compiled(
    schedule: Schedule, profile: Profile, requests: Items[RequestLengths], prefixes: Prefixes | None
) -> Replay:
    """The same by the compiled event loop."""
    replicas, served, busy = Replicas(profile), [], []
    seconds = preemptions = reused = 0.0
    for own in deal([(r.input, r.output) for r in requests], schedule.replicas):
        if not own:
            busy += [0.0 for stage in schedule.stages for _ in stage.devices]
            continue
        places = sorted(own, key=lambda i: requests[i].arrival_s)
        rows = [(requests[i].arrival_s, requests[i].input, requests[i].output) for i in places]
        arrivals, inputs, outputs = np.ascontiguousarray(np.array(rows, dtype=np.float64).T)
        alike = prefixes.take(places) if prefixes else None
        times = replicas.serve(schedule, Requests(arrivals, inputs, outputs, np.zeros(len(rows)), alike))
        assert times is not None, "nothing is watched"
        figures = (times.started, times.first, times.finished)
        counts = (times.hits.astype(int), times.preemptions.astype(int))
        for i, *own_figures in zip(places, *(column.tolist() for column in (*figures, *counts)), strict=True):
            served.append(Served(i, requests[i].input, requests[i].output, requests[i].arrival_s, *own_figures))
        busy += [float(b) for b, stage in zip(times.busy, schedule.stages, strict=True) for _ in stage.devices]
        seconds = max(seconds, times.seconds)
        preemptions += times.preemptions.sum()
        reused += times.reused.sum()
    return _replay_of(schedule, served, seconds, busy, (), int(preemptions), int(reused))


def _replay_of(
    schedule: Schedule,
    served: Iterable[Served],
    seconds: float,
    busy: Iterable[float],
    spans: tuple[Span, ...],
    preemptions: int,
    reused: int,
) -> Replay:
    """Summarise served requests and the `busy` seconds of each replica's devices."""
    served = tuple(sorted(served, key=lambda s: (s.finish_s, s.index)))
    share = tuple(b / seconds if seconds else 0.0 for b in busy) + (0.0,) * schedule.idle
    estimate = summarise(served, seconds, schedule.meaning, utilisation=share)
    return Replay(served, Timeline("predicted", spans), seconds, estimate, preemptions, reused)


def _sequence(index: int, request: RequestLengths, cap: int, hints: Hints) -> Sequence:
    return Sequence(index, request.input, cap, request.arrival_s, request.output, hints=hints)


def _by_rank(schedule: Schedule, pipelines: Iterable[Pipeline]) -> list[float]:
    """Busy seconds of one replica's devices, stage by stage in the schedule's order."""
    busy = {s.devices: b for pipeline in pipelines for s, b in zip(pipeline.stages, pipeline.busy, strict=True)}
    return [float(busy[stage.devices]) for stage in schedule.stages for _ in stage.devices]
