"""A server's promises around any order: a request may be passed in the queue only for as long as its slack lasts.

A server with a latency bound predicts the end of a request in order of arrival. Its slack is the time from that end to
the end that was promised. Once the slack is over, only the requests that came before it still come first. They need no
longer than predicted for all that came before it, so it begins in time.
"""

import heapq
from collections.abc import Iterable

from xcore.batching import Order, Sequence
from xcore.orders.promoting import Promoting


class Promised(Promoting):
    """Promotes a sequence that has waited for its slack; promoted sequences come by arrival, and stay promoted.

    A preempted sequence is promoted at once, and so is one without a slack.
    """

    def __init__(self, order: Order):
        super().__init__(order)
        self._places: dict[int, int] = {}
        """Places by arrival of all sequences, by index."""
        self._came = 0
        self._ends: list[tuple[float, int, Sequence]] = []
        """A heap of the times at which slacks end; entries of sequences that left meanwhile are skipped."""

    def fresh(self) -> "Promised":
        """Return the same order without any history."""
        return Promised(self._fresh_inner())

    def wait(self, sequence: Sequence, now: float) -> None:
        """Let the sequence's slack begin, or promote a preempted one."""
        slack_s = sequence.hints.slack_s or 0.0
        known, index = sequence.index in self._places, sequence.index
        if not known:
            self._came += 1
            self._places[index] = self._came
        if known or slack_s <= 0:
            self._promoted[index] = self._places[index]
        else:
            heapq.heappush(self._ends, (now + slack_s, self._places[index], sequence))
        super().wait(sequence, now)

    def due(self, now: float) -> Iterable[Sequence]:
        """Return the newly promoted sequences, and those that the inner order reports."""
        due = list(super().due(now))
        while self._ends and self._ends[0][0] <= now:
            _, place, sequence = heapq.heappop(self._ends)
            if self._places.get(sequence.index) == place:
                self._promoted[sequence.index] = place
                due.append(sequence)
        return due

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._places.pop(sequence.index, None)
        super().end(sequence)
