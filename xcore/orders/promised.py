"""A server's promises around any order: other requests may pass a request in the queue only until its slack ends.

A server with a latency bound predicts when a request ends if requests start in order of arrival. The slack is the time
from that end to the promised end. After the slack, only requests that arrived before it come before it. They take no
longer than the prediction for all earlier requests, so the request starts in time.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import count

from xcore.batching import Order, Sequence
from xcore.orders.promoting import Promoting


class Promised(Promoting):
    """Promotes a sequence when its slack has ended; promoted sequences are ordered by arrival, and stay promoted.

    A preempted sequence is promoted at once, and so is one without a slack.
    """

    def __init__(self, order: Order, arrivals: Iterator[int] | None = None):
        """Wrap an order. `arrivals` numbers all sequences; models that share devices have the same, so that they agree.

        None: this order numbers its own.
        """
        super().__init__(order)
        self._together = arrivals is not None
        self._arrivals = count() if arrivals is None else arrivals
        self._places: dict[int, int] = {}
        """Places by arrival of all sequences, by index."""
        self._ends: list[tuple[float, int, Sequence]] = []
        """A heap of the times at which slacks end; entries of sequences that left meanwhile are skipped."""

    def fresh(self) -> "Promised":
        """Return the same order without any history."""
        return Promised(self._fresh_inner(), self._arrivals if self._together else None)

    def wait(self, sequence: Sequence, now: float) -> None:
        """Let the sequence's slack begin, or promote a preempted one."""
        slack_s = sequence.hints.slack_s or 0.0
        known, index = sequence.index in self._places, sequence.index
        if not known:
            self._places[index] = next(self._arrivals)
        if known or slack_s <= 0:
            self._promoted[index] = self._places[index]
        else:
            heapq.heappush(self._ends, (now + slack_s, self._places[index], sequence))
        super().wait(sequence, now)

    def due(self, now: float) -> Iterable[Sequence]:
        """Return the newly promoted sequences, and the sequences whose keys have changed in the inner order."""
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
