"""Tenant: one model on devices that it shares, with its requests, its memory and the cost of its iterations."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from xcore.arrays import Array
from xcore.batching import ENDLESS, FollowingOrder, Ledger, Sequence, Step
from xcore.policies.one_phase import OnePhasePolicy
from xmulti.sharing.iteration_cost import IterationCost
from xsimulator.replay.cells import Ran

MOST_AT_ONCE = 1024
"""Most decoding iterations that are simulated at once."""
_COUNT = np.arange(float(MOST_AT_ONCE))


@dataclass(eq=False, slots=True)
class SimulatedJob:
    """A model's step, or a row of equal decoding iterations, on a share of the devices. Times are in seconds."""

    tenant: "SimulatedTenant"
    step: Step
    phase: Literal["encode", "decode"]
    share: float
    start_s: float
    ends: Array
    """[iterations]: when each one ends."""

    @property
    def end_s(self) -> float:
        """When the job is done."""
        return float(self.ends[-1])

    def cut(self, now: float) -> None:
        """End the row with the iteration that runs at `now`."""
        self.ends = self.ends[: 1 + int(np.searchsorted(self.ends, now))]


class StepRecorder(Protocol):
    """Records a model's steps; mostly a `Record`."""

    def start(self, step: Step, now: float) -> None:
        """Record that a step begins."""

    def book(self, step: Step, ran: Ran, finished: Iterable[Sequence]) -> None:
        """Record that a step has ended, and which requests finished in it."""


@dataclass(eq=False)
class SimulatedTenant:
    """One model's requests on shared devices.

    It prefills or decodes, one at a time. Prompts are complete, and preempted sequences are prefilled again.
    """

    name: str
    ledger: Ledger
    cost: IterationCost
    limits: OnePhasePolicy
    record: StepRecorder
    least: int | None = None
    """Blocks that its quota keeps while quotas follow their use; None: its quota is fixed."""
    switch_s: float = 0.0
    """Extra seconds of its iteration after another model's."""
    job: SimulatedJob | None = None
    """Its current job."""
    resumes_s: float = 0.0
    """It can't run before this time: its weights are loaded or moved."""
    idle_since_s: float = 0.0
    """When its last job ended."""
    busy_s: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "decode": 0.0})
    """Seconds of its jobs so far."""

    def first(self, now: float) -> Sequence | None:
        """Return the waiting prompt that is admitted next, if its blocks are free."""
        return self.limits.first(self.ledger, now) if now >= self.resumes_s else None

    def can_prefill(self, now: float) -> bool:
        """Return whether a prompt would be admitted now."""
        return now >= self.resumes_s and self.limits.can_prefill(self.ledger, now, lambda: self._taken(now))

    def _taken(self, now: float) -> int:
        """Return the blocks of the running row, up to its current iteration, that are booked when it ends."""
        if self.job is None or not self.job.step.decode:
            return 0
        return self._missing(self.job.step, 1 + int(np.searchsorted(self.job.ends, now, side="right")))

    @property
    def ahead(self) -> int:
        """Blocks that the running row will need when it ends, and that the pool hasn't allocated yet."""
        if self.job is None or not self.job.step.decode:
            return 0
        return self._missing(self.job.step, len(self.job.ends))

    def _missing(self, step: Step, iterations: int) -> int:
        """Return the blocks that a step's sequences lack for `iterations` iterations in a row."""
        size = self.ledger.pool.block_size
        return sum([n for s in step.decode if (n := -(-(s.cached + iterations) // size) - len(s.blocks)) > 0])

    def can_decode(self, now: float) -> bool:
        """Return whether the model has sequences to decode."""
        return bool(self.ledger.decoding) and now >= self.resumes_s

    def prefill(self, now: float, slowdown: float, switched: bool) -> SimulatedJob | None:
        """Start waiting prompts, as many as fit; return None if none does. `switched`: after another model's job."""
        step = self.limits.next_step(self.ledger, now, "encode")
        if step is None:
            return None
        self.record.start(step, now)
        seconds = self.cost.prefill_seconds([count for _, count in step.encode], self.limits.prefill_share)
        ends = np.array([now + slowdown * (seconds + switched * self.switch_s)])
        self.job = SimulatedJob(self, step, "encode", self.limits.prefill_share, now, ends)
        return self.job

    def decode(self, now: float, slowdown: float, switched: bool, most: int = ENDLESS) -> SimulatedJob | None:
        """Start decoding iterations of all residents, up to `most` in a row; return None if all have been preempted.

        `switched`: after another model's job.
        """
        step = self.limits.next_step(self.ledger, now, "decode")
        if step is None:
            return None
        decode, preempted = step.decode, self.ledger.giving_way.take_preempted()
        most = 1 if preempted else most  # the freed blocks may let another sequence in
        most = min([most, MOST_AT_ONCE, *[s.ends - s.generated for s in decode]])
        step = Step(decode=decode, repeats=most)
        row = self.ledger.repeats(step, preempted)
        # Rounded as in single iterations, so that equal end times are equal in a row too.
        contexts = (sum([s.cached + 1 for s in decode]) + len(decode) * _COUNT[:row]) / len(decode)
        seconds = self.cost.decode_seconds(len(decode), contexts, self.limits.decode_share)
        seconds[0] += switched * self.switch_s
        ends = np.cumsum(np.concatenate(([now], slowdown * seconds)))[1:]
        self.job = SimulatedJob(self, step, "decode", self.limits.decode_share, now, ends)
        return self.job

    def finish(self) -> None:
        """Book the job that has ended."""
        job, self.job = self.job, None
        assert job is not None, "a job has run"
        self.idle_since_s = job.end_s
        iterations, end_s = len(job.ends), job.end_s
        order = self.ledger.waiting.order
        if isinstance(order, FollowingOrder):
            order.ran(job.step, end_s - job.start_s, end_s)
        if iterations > 1:
            self.ledger.extend(job.step, iterations)
        finished = self.ledger.advance(job.step, iterations)
        out = np.array([end_s])
        encoded = {sequence.index: end_s for sequence, _ in job.step.encode}
        self.record.book(job.step, Ran(iterations, end_s, encoded, out, out), finished)
        self.busy_s[job.phase] += end_s - job.start_s
