"""The event simulator: a finite list of requests through a policy's own decisions, ramp-up and drain included.

It follows the same policies and the same ledger as the runner; where the runner computes a step, it asks the profile
how long the step takes. On a pipeline every step is cut into as many micro-batches as there are stages, a sequence
always in the same one: a piece starts when its stage is free, its input has arrived and its sequences' last tokens are
out. The next step is decided when the first stage is free, as though it knew already what ends in the step before.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from exegpt.estimate import Estimate
from exegpt.orders import fcfs
from exegpt.policies import Sequence, Step, make_ledger, make_policy
from exegpt.profile import Profile
from exegpt.schedule import Schedule
from exegpt.served import Served, summarise
from exegpt.timeline import Span, Timeline
from exegpt.workload import RequestLengths
from xsimulator.scenario import Scenario
from xsimulator.stage import Chunks, StageCost

Array = NDArray[np.float64]


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


@dataclass
class _Pipeline:
    """The stages while requests run through them."""

    scenario: Scenario
    free: Array
    """[stages]: when each one is free."""
    token_out: Array
    """[requests]: when each one's last token left the last stage."""
    spans: list[Span] = field(default_factory=list)

    def run(self, step: Step, now: float) -> None:
        """One step, decided at `now`."""
        parts = len(self.free)
        for m in range(parts):
            encode = tuple(pair for pair in step.encode if pair[0].index % parts == m)
            decode = tuple(s for s in step.decode if s.index % parts == m)
            if encode or decode:
                self._run_part(Step(encode, decode), m, now)

    def _run_part(self, part: Step, micro_batch: int, now: float) -> None:
        sequences = [s.index for s, _ in part.encode] + [s.index for s in part.decode]
        ready = max(now, float(self.token_out[sequences].max()))
        hop = self.scenario.send(part.tokens)
        for stage, seconds in enumerate(step_seconds(self.scenario.costs, part)):
            begin = max(ready + hop * (stage > 0), float(self.free[stage]))
            ready = self.free[stage] = begin + seconds
            device = self.scenario.stages[stage].devices[0]
            span = Span(device, stage, part.phase, micro_batch, begin, ready, len(sequences), part.tokens)
            self.spans.append(span)
        self.token_out[sequences] = ready


def replay(schedule: Schedule, profile: Profile, requests: Items[RequestLengths]) -> Replay:
    """Run `requests` through a schedule in simulated time.

    Raises InputError for a request that the KV cache could not hold.
    """
    scenario = Scenario.of(schedule, profile, None, "exact", True)
    policy = make_policy(schedule)
    ledger = make_ledger(schedule, policy, fcfs)
    ledger.submit(Sequence(i, r.input, r.output, r.arrival_s) for i, r in enumerate(requests))
    pipeline = _Pipeline(scenario, np.zeros(len(scenario.stages)), np.zeros(len(requests)))
    started, first = np.full(len(requests), np.nan), np.full(len(requests), np.nan)
    served: list[Served] = []
    now = 0.0
    while not ledger.idle:
        step = policy.next_step(ledger, now)
        if step is None:
            arrival = ledger.next_arrival(now)
            if arrival is None:
                raise RuntimeError("a waiting request can never be admitted")  # submit() refuses those
            now = arrival
            continue
        for sequence, _ in step.encode:
            if sequence.cached == 0:
                started[sequence.index] = now
        pipeline.run(step, now)
        finished = ledger.advance(step)
        out = pipeline.token_out
        for sequence, _ in step.encode:
            if sequence.encoded:
                first[sequence.index] = out[sequence.index]
        for s in finished:
            times = (float(started[s.index]), float(first[s.index]), float(out[s.index]))
            served.append(Served(s.index, s.input_tokens, s.generated, s.arrival_s, *times))
        now = max(now, float(pipeline.free[0]))
    served.sort(key=lambda s: s.finish_s)
    timeline = Timeline("predicted", tuple(sorted(pipeline.spans, key=lambda span: span.start_s)))
    share = tuple(_busy(timeline, len(scenario.stages))[i] for i, s in enumerate(scenario.stages) for _ in s.devices)
    estimate = summarise(served, timeline.seconds, schedule.bound, utilisation=share)
    return Replay(tuple(served), timeline, timeline.seconds, estimate)


def _busy(timeline: Timeline, stages: int) -> list[float]:
    """Busy fraction of each stage."""
    seconds = [0.0] * stages
    for span in timeline.spans:
        seconds[span.stage] += span.end_s - span.start_s
    return [s / timeline.seconds if timeline.seconds else 0.0 for s in seconds]
