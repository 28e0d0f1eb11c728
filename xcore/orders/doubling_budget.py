"""SeaLLM's doubling budget: approximates T'·L̂ without known lengths."""

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

from xcore.batching import FollowingOrder, Sequence, Step
from xcore.orders.attained import Attained


class DoublingBudget(FollowingOrder):
    """Orders sequences by remaining budget times the service's mean time alone, L̂.

    The first budget is Q_0 = L̂ + its standard deviation; the k-th one after it is 2^k Q_0. The time of residence is
    subtracted from the budget; if `executed`, only the steps that contained the sequence. Sequences that have waited
    for `starvation` times L̂ (*starved* ones) come before all others, in the order in which they starved. If
    `executed`, the waiting time is all time outside of its steps.
    """

    def __init__(self, starvation: float = 10.0, executed: bool = False):
        self.starvation = starvation
        self._attained = Attained(executed)
        self._starved: list[tuple[float, int, Sequence]] = []
        """A heap of the times at which waiting sequences starve; entries of sequences that left meanwhile are skipped.
        """
        self._starves_s: dict[int, float] = {}
        """When each waiting sequence starves, by index; if steps count, also running ones."""

    def fresh(self) -> "DoublingBudget":
        """Return the same order without any history."""
        return DoublingBudget(self.starvation, self._attained.executed)

    def wait(self, sequence: Sequence, now: float) -> None:
        """Start the sequence's waiting time now or, if it has just arrived, at its arrival."""
        at = self._starvation(sequence, now)
        self._starves_s[sequence.index] = at
        heappush(self._starved, (at, sequence.index, sequence))

    def _starvation(self, sequence: Sequence, now: float) -> float:
        ran = self._attained.seconds(sequence)
        since = sequence.arrival_s + ran if self._attained.executed or not ran else now
        return since + self.starvation * (sequence.hints.service_time_s or 0.0)

    def due(self, now: float) -> list[Sequence]:
        """Return the sequences that have starved since the last call."""
        due = []
        while self._starved and self._starved[0][0] <= now:
            at, index, sequence = heappop(self._starved)
            if self._starves_s.get(index) == at:
                due.append(sequence)
        return due

    def start(self, sequence: Sequence, now: float) -> None:
        """Record that the sequence starts to use its budget."""
        self._attained.start(sequence, now)
        if not self._attained.executed:
            self._starves_s.pop(sequence.index, None)

    def stop(self, sequence: Sequence, now: float) -> None:
        """Record that the sequence stops using its budget."""
        self._attained.stop(sequence, now)

    def ran(self, step: Step, seconds: float, now: float) -> None:
        """Subtract a step's seconds from the budgets of its sequences."""
        if self._attained.executed:
            for sequence in (*(s for s, _ in step.encode), *step.decode):
                self._attained.add(sequence, seconds)
                if self._starves_s.get(sequence.index, inf) > now - seconds:  # a starved sequence stays first
                    self._starves_s[sequence.index] = self._starvation(sequence, now)

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._attained.end(sequence)
        self._starves_s.pop(sequence.index, None)

    def budget(self, sequence: Sequence) -> float:
        """Return what remains of a waiting sequence's budget, in seconds; if steps count, also of a running one."""
        hints = sequence.hints
        budget = first = (hints.service_time_s or 0.0) + hints.service_sd_s
        used, exhausted = self._attained.seconds(sequence), 0
        while used >= budget > 0:
            used, exhausted = used - budget, exhausted + 1
            budget = 2.0**exhausted * first
        return budget - used

    def steady_s(self, sequence: Sequence, now: float) -> float:
        """Return how long the key of a running sequence won't rise: until its budget is used up."""
        return self.budget(sequence) if self._starves_s.get(sequence.index, inf) > now else inf

    def next_change_s(self, sequences: Iterable[Sequence], now: float) -> float:
        """Return when the next sequence starves, of the waiting ones and these, and so becomes first."""
        changes = [self._starves_s.get(sequence.index, inf) for sequence in sequences]
        first = min([at for at in changes if at > now], default=inf)
        while self._starved and self._starves_s.get(self._starved[0][1]) != self._starved[0][0]:
            heappop(self._starved)
        return min(first, self._starved[0][0]) if self._starved else first

    def key(self, sequence: Sequence, now: float) -> tuple[bool, float, float, int]:
        """Return the sorting key, which changes once while a sequence waits: when it starves."""
        starves_s = self._starves_s.get(sequence.index)
        if starves_s is not None and starves_s <= now:
            return False, starves_s, sequence.arrival_s, sequence.index
        order = self.budget(sequence) * (sequence.hints.service_time_s or 0.0)
        return True, order, sequence.arrival_s, sequence.index
