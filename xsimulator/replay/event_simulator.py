"""The event simulator: runs a finite list of requests through a policy's own decisions, with ramp-up and drain.

It uses the same policies and the same ledger as the runner. Where the runner computes a step, the simulator looks up
the step's seconds in the profile. On a pipeline every step is split into micro-batches: as many as stages, unless the
schedule says otherwise. A sequence stays in its micro-batch. The next step is decided when the first stage is free and
few enough steps are in flight; the sequences that end in the previous step count as known. Between two events, decode
steps that differ only in their growing contexts are simulated at once.
"""

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xcore.batching import UNKNOWN, Hints, Order, Preemption, Sequence, deal
from xcore.orders import fcfs
from xcore.orders.fcfs import FCFS
from xcore.specs.estimate import Estimate
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes, summarise
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Span, Timeline
from xcore.specs.workload import RequestLengths
from xcore.traces.prefixes import Prefixes
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.cells import Pipeline
from xsimulator.replay.compiled import Replicas, RequestArrays, dealt, is_compiled, steps_of
from xsimulator.replay.event_queue import run
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica, micro_batching_of


@dataclass(frozen=True)
class Replay:
    """The times of the simulated requests."""

    served: tuple[RequestTimes, ...]
    """Served requests in order of completion."""
    timeline: Timeline
    """The run's timeline; its spans are kept only on request."""
    seconds: float
    """Seconds until all work was done."""
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
    caps: Items[int] | None = None,
    prompts: Items[Items[int]] | None = None,
    order: Order = fcfs,
    hints: Items[Hints] | None = None,
    lanes: bool = False,
    preemption: Preemption | None = None,
) -> Replay:
    """Run `requests` through a schedule in simulated time.

    The compiled event loop is used if it covers the arguments, unless `lanes` asks for the Python one.

    Args:
        schedule: Schedule to run.
        profile: Source of the steps' seconds.
        requests: Requests with their arrival times and true lengths.
        timeline: Keep a span for every cell, which takes memory for many requests.
        step_by_step: Simulate every iteration alone: the same result, slower.
        caps: Output tokens that requests allow, if they end sooner without notice.
        prompts: Tokens of the prompts, if the schedule caches prefixes; the output's tokens may follow. Without them,
            the requests' identities say which prompts begin alike. Without either, only a preempted request finds
            blocks: its own.
        order: Order of the waiting requests.
        hints: The requests' hints, if `order` needs more than lengths.
        lanes: Run the lanes in Python even if the compiled event loop covers everything.
        preemption: How running requests give way to waiting ones; None: they don't.

    Raises:
        InputError: The KV cache cannot hold one of the requests.
    """
    prefixes = _prefixes(schedule, requests, prompts)
    special = timeline or step_by_step or lanes or caps or preemption or type(order) is not FCFS
    steps = drawn_steps(schedule, requests)
    if not special and is_compiled(schedule) and in_turn(schedule, requests):
        return replay_parts(schedule, profile, requests, dealt(requests, schedule.replicas, prefixes, steps))
    most = caps or [request.output for request in requests]
    replica_cost = ReplicaCost.of(schedule, profile)
    micro_batching = micro_batching_of(schedule)
    record = Record(len(requests), micro_batching.index, replica_cost.encoder_decoder, profile.front_end_s)
    pipelines: list[Pipeline] = []
    busy: list[float] = []
    preemptions = reused = 0
    for r, own in enumerate(deal([(r.input, m) for r, m in zip(requests, most, strict=True)], schedule.replicas)):
        how = (order, timeline, step_by_step, None, preemption)
        replica = Replica(schedule, replica_cost, record, micro_batching, r, *how)
        for i in own:
            sequence = _sequence(i, requests[i], most[i], hints[i] if hints else UNKNOWN)
            tokens = sequence.input_tokens + sequence.ends
            if steps is not None:
                sequence.speculate(int(steps[i]))
            replica.submit(sequence, prefixes.keys(i, tokens, schedule.block_size) if prefixes else None)
        run([replica])
        pipelines += replica.sides.values()
        busy += busy_by_rank(schedule, replica.sides.values())
        preemptions += replica.ledger.preemptions
        reused += replica.ledger.reused
    seconds = max(pipeline.seconds for pipeline in pipelines)
    spans = sorted((span for p in pipelines for span in p.spans or ()), key=lambda span: span.start_s)
    return replay_of(schedule, record.served, seconds, busy, tuple(spans), preemptions, reused)


def in_turn(schedule: Schedule, requests: Items[RequestLengths]) -> bool:
    """Return whether numbering requests by arrival, as the compiled loop does, leaves the micro-batches unchanged."""
    if micro_batching_of(schedule).count == 1:
        return True
    return all(before.arrival_s <= after.arrival_s for before, after in itertools.pairwise(requests))


def drawn_steps(schedule: Schedule, requests: Items[RequestLengths]) -> Array | None:
    """Return the iterations that give each request's output; None without speculation."""
    if schedule.speculation is None:
        return None
    return steps_of(np.array([float(request.output) for request in requests]), schedule.speculation)


def _prefixes(
    schedule: Schedule, requests: Items[RequestLengths], prompts: Items[Items[int]] | None
) -> Prefixes | None:
    """Return the prefixes that prompts share; None if there are none, or prefixes aren't cached."""
    if not schedule.prefix_caching:
        return None
    if prompts is None:
        return Prefixes.of(requests, schedule.block_size)
    return Prefixes.of_texts(prompts, schedule.block_size)


def replay_parts(
    schedule: Schedule,
    profile: Profile,
    requests: Items[RequestLengths],
    parts: Iterable[tuple[Items[int], RequestArrays]],
) -> Replay:
    """Replay each replica's part of the requests with the compiled event loop; a part has its indices in the list."""
    replicas, served, busy = Replicas(profile), [], list[float]()
    seconds = preemptions = reused = 0.0
    for places, own in parts:
        times = replicas.serve(schedule, own)
        assert times is not None, "nothing is watched"
        figures = (times.arrived, times.started, times.first, times.finished)
        counts = (times.hits.astype(int), times.preemptions.astype(int))
        for i, *own_figures in zip(places, *(column.tolist() for column in (*figures, *counts)), strict=True):
            served.append(RequestTimes(i, requests[i].input, requests[i].output, *own_figures))
        busy += [float(b) for b, stage in zip(times.busy, schedule.stages, strict=True) for _ in stage.devices]
        seconds = max(seconds, times.seconds)
        preemptions += times.preemptions.sum()
        reused += times.reused.sum()
    ranks = schedule.replicas * sum(len(stage.devices) for stage in schedule.stages)
    busy += [0.0] * (ranks - len(busy))  # of replicas without requests, which are the last ones
    return replay_of(schedule, served, seconds, busy, (), int(preemptions), int(reused))


def replay_of(
    schedule: Schedule,
    served: Iterable[RequestTimes],
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


def busy_by_rank(schedule: Schedule, pipelines: Iterable[Pipeline]) -> list[float]:
    """Return the busy seconds of one replica's devices, stage by stage in the schedule's order."""
    busy = {s.devices: b for pipeline in pipelines for s, b in zip(pipeline.stages, pipeline.busy, strict=True)}
    return [float(busy[stage.devices]) for stage in schedule.stages for _ in stage.devices]
