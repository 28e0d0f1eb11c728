"""The event simulator: a finite list of requests through a policy's own decisions, ramp-up and drain included.

It follows the same policies and the same ledger as the runner; where the runner computes a step, it asks the profile
how long the step takes.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from exegpt.estimate import Estimate
from exegpt.policies import Sequence, Step, make_ledger, make_policy
from exegpt.profile import Profile
from exegpt.schedule import Schedule
from exegpt.served import Served, summarise
from exegpt.timeline import Span, Timeline
from exegpt.workload import RequestLengths
from xsimulator.stage import Chunks, StageCost, stage_costs


@dataclass(frozen=True)
class Replay:
    """What the simulated requests experienced."""

    served: tuple[Served, ...]
    """In order of completion."""
    timeline: Timeline
    seconds: float
    """Until the last request finished."""
    estimate: Estimate


def step_seconds(costs: Items[StageCost], step: Step) -> list[float]:
    """Seconds of one iteration on each stage."""
    chunks = None
    if step.encode:
        tokens = np.array([count for _, count in step.encode], dtype=np.float64)
        past = np.array([s.cached for s, _ in step.encode], dtype=np.float64)
        completed = sum(s.cached + count >= s.input_tokens for s, count in step.encode)
        chunks = Chunks(tokens, past, completed)
    decoding = len(step.decode)
    # A finished row of a static batch is computed again at its last position.
    context = sum(s.cached + (not s.finished) for s in step.decode) / decoding if decoding else 0.0
    return [cost.step(chunks, decoding, context) for cost in costs]


def replay(schedule: Schedule, profile: Profile, requests: Items[RequestLengths]) -> Replay:
    """Run `requests` through a schedule in simulated time.

    On a pipeline an iteration passes the stages one after the other; nothing overlaps, so this is a lower bound of
    throughput there. Raises InputError for a request that the KV cache could not hold.
    """
    costs = stage_costs(schedule, profile)
    policy = make_policy(schedule)
    ledger = make_ledger(schedule, policy)
    ledger.submit(Sequence(i, r.input, r.output, r.arrival_s) for i, r in enumerate(requests))
    started, first = np.full(len(requests), np.nan), np.full(len(requests), np.nan)
    served: list[Served] = []
    spans: list[Span] = []
    now, busy = 0.0, np.zeros(len(costs))
    while not ledger.idle:
        step = policy.next_step(ledger, now)
        if step is None:
            arrival = ledger.next_arrival(now)
            if arrival is None:
                raise RuntimeError("a waiting request can never be admitted")  # submit() refuses those
            now = arrival
            continue
        begin = now
        for stage, seconds in enumerate(step_seconds(costs, step)):
            device = schedule.stages[stage].devices[0]
            span = Span(
                device, stage, step.phase, 0, now, now + seconds, len(step.encode) + len(step.decode), step.tokens
            )
            spans.append(span)
            busy[stage] += seconds
            now += seconds
        for sequence, _ in step.encode:
            if sequence.cached == 0:
                started[sequence.index] = begin
        finished = ledger.advance(step)
        for sequence, _ in step.encode:
            if sequence.encoded:
                first[sequence.index] = now
        for s in finished:
            i = s.index
            row = Served(i, s.input_tokens, s.generated, s.arrival_s, float(started[i]), float(first[i]), now)
            served.append(row)
    share = tuple(float(busy[i] / now) for i, stage in enumerate(schedule.stages) for _ in stage.devices) if now else ()
    estimate = summarise(served, now, schedule.bound, utilisation=share)
    return Replay(tuple(served), Timeline("predicted", tuple(spans)), now, estimate)
