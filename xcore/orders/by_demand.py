"""Orders by the remaining demand of the application that a request belongs to (Hermes).

A run's demand is estimated at its first request, and refined at each later call by its previous one.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean

from xcore.applications.demand import Seen
from xcore.batching import FollowingOrder, Sequence, Status, Step
from xcore.orders.ranked_demands import Ranked, RankedDemands

MOST_IDLE = 10_000
"""Runs that are remembered without unfinished requests, because another call may come."""
_LOOK = 16
"""Oldest runs among which idle ones are looked for when there are too many."""


@dataclass(eq=False)
class TrackedRun:
    """One run of an application: its present call, its expected demand, and its service so far."""

    application: str
    arrival_s: float
    deadline_s: float | None
    unit: str | None = None
    seen: Seen | None = None
    """Its last call that has ended."""
    demand: Ranked | None = None
    """The demand that was expected when its present call began; None: its application has no demand graph."""
    attained_s: float = 0.0
    """Service since then, in seconds alone."""
    waiting: dict[int, Sequence] = field(default_factory=dict)
    running: dict[int, Sequence] = field(default_factory=dict)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """Input and output tokens of the ended requests of its present call."""

    @property
    def idle(self) -> bool:
        """Whether it has no unfinished request."""
        return not self.waiting and not self.running

    @property
    def parallel(self) -> int:
        """Requests of its present call."""
        return max(1, len(self.waiting) + len(self.running) + len(self.sizes))

    @property
    def rank(self) -> float:
        """The Gittins rank of its remaining demand."""
        assert self.demand, "a run of an application with a demand graph"
        return self.demand[0].rank(self.attained_s)

    @property
    def longest_s(self) -> float:
        """The longest remaining time that is possible; 0 if it has outlasted all samples."""
        assert self.demand, "a run of an application with a demand graph"
        longest = self.demand[1]
        return max(0.0, longest.most - self.attained_s / self.parallel)

    def enter(self, sequence: Sequence, demands: RankedDemands) -> None:
        """Add a request, which waits; the first one of a call refines the demand."""
        unit = sequence.hints.unit
        if self.idle or unit != self.unit:
            self._begin(unit, demands)
        self.waiting[sequence.index] = sequence

    def _begin(self, unit: str | None, demands: RankedDemands) -> None:
        if self.unit is not None and self.sizes:
            inputs, outputs = (round(fmean(tokens)) for tokens in zip(*self.sizes, strict=True))
            self.seen = Seen(self.unit, inputs, outputs, len(self.sizes))
        self.unit, self.sizes = unit, []
        if self.application not in demands.models:
            return
        if demands.refine and unit is not None and demands.has(self.application, unit):
            self.demand, self.attained_s = demands.refined(self.application, unit, self.seen), 0.0
        elif self.demand is None:
            self.demand = demands.prior(self.application)

    def leave(self, sequence: Sequence) -> None:
        """Remove a request that has ended."""
        self.waiting.pop(sequence.index, None)
        if self.running.pop(sequence.index, None) and sequence.hints.unit == self.unit:
            self.sizes.append((sequence.input_tokens, sequence.generated))


class ByDemand(FollowingOrder):
    """Follows the runs of applications; its subclasses rank them.

    Requests of applications without a demand graph come last, by arrival.
    """

    def __init__(self, demands: RankedDemands | None = None):
        self.demands = demands or RankedDemands({})
        self._runs: OrderedDict[Hashable, TrackedRun] = OrderedDict()
        """Runs by client, application and name; the one without a new call for longest is at the front."""
        self._of: dict[int, TrackedRun] = {}
        """The run of each unfinished sequence, by index."""
        self._changed: dict[int, Sequence] = {}
        """Waiting sequences whose keys have changed, by index."""

    def fresh(self) -> "ByDemand":
        """Return the same order without any history."""
        return type(self)(self.demands)

    def wait(self, sequence: Sequence, now: float) -> None:
        """Add a request to its run; a preempted one waits again."""
        run = self._of.get(sequence.index)
        if sequence.status is Status.PREEMPTED and run:
            run.running.pop(sequence.index, None)
            run.waiting[sequence.index] = sequence
            return
        run = self._of[sequence.index] = self._run_of(sequence)
        before = run.demand
        run.enter(sequence, self.demands)
        if run.demand is not before:
            self._changed |= run.waiting

    def _run_of(self, sequence: Sequence) -> TrackedRun:
        hints = sequence.hints
        new = TrackedRun(hints.application or "", hints.application_arrival_s, hints.deadline_s)
        if hints.run is None:
            return new
        run = self._runs.setdefault((hints.client, hints.application, hints.run), new)
        self._runs.move_to_end((hints.client, hints.application, hints.run))
        for name in [*islice(self._runs, _LOOK)] if len(self._runs) > MOST_IDLE else ():
            if len(self._runs) > MOST_IDLE and self._runs[name].idle and self._runs[name] is not run:
                del self._runs[name]
        return run

    def start(self, sequence: Sequence, now: float) -> None:
        """Move a request to the running ones; cached tokens of its prompt count as served."""
        run = self._of[sequence.index]
        run.waiting.pop(sequence.index, None)
        run.running[sequence.index] = sequence
        self._serve(sequence, sequence.cached * self.demands.rates.prefill_s)

    def book(self, step: Step, iterations: int) -> None:
        """Count computed tokens: prompts, first tokens, and decoding."""
        rates = self.demands.rates
        for sequence, count in step.encode:
            first = count == sequence.to_prefill
            self._serve(sequence, count * rates.prefill_s + first * rates.decode_s)
        for sequence in step.decode:
            if not sequence.finished:
                self._serve(sequence, iterations * rates.decode_s)

    def _serve(self, sequence: Sequence, seconds: float) -> None:
        run = self._of.get(sequence.index)
        if run is None:  # it has begun on another engine
            return
        run.attained_s += seconds
        self._changed |= run.waiting

    def end(self, sequence: Sequence) -> None:
        """Remove a request from its run, which is kept for its next call."""
        if run := self._of.pop(sequence.index, None):
            run.leave(sequence)

    def due(self, now: float) -> Iterable[Sequence]:
        """Return the waiting requests of runs that were served or refined since the last call."""
        changed, self._changed = self._changed, {}
        return changed.values()

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, float, int]:
        """Return the sorting key, which changes when its run is served or refined."""
        run = self._of[sequence.index]
        if run.demand is None:
            return 2, 0.0, sequence.arrival_s, sequence.index
        group, rank = self._rank(run)
        return group, rank, run.arrival_s, sequence.index

    def _rank(self, run: TrackedRun) -> tuple[int, float]:
        raise NotImplementedError


class DemandGittins(ByDemand):
    """By the Gittins rank of the run's remaining demand; equal ranks by the run's arrival."""

    def _rank(self, run: TrackedRun) -> tuple[int, float]:
        return 0, run.rank


class DemandSlack(ByDemand):
    """By slack: the run's deadline - now - its longest possible remaining time.

    All slacks fall at the same speed, so the key is the latest start time. Runs without a deadline come behind, by
    their Gittins ranks.
    """

    def _rank(self, run: TrackedRun) -> tuple[int, float]:
        return (1, run.rank) if run.deadline_s is None else (0, run.deadline_s - run.longest_s)
