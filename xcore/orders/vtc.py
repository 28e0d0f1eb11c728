"""Virtual token counters (VTC): the least served client comes first."""

from collections import Counter
from collections.abc import Hashable

from xcore.batching import FollowingOrder, Sequence, Status, Step


class VTC(FollowingOrder):
    """Orders requests by their client's counter of service; requests of one client by arrival.

    The counter adds a tenth for each prompt token and one for each output token (Hermes' weights). A client that
    returns after a pause starts from the least counter of the waiting clients, so pauses don't accumulate credit.
    """

    grouped = True
    INPUT_WEIGHT = 0.1

    def __init__(self) -> None:
        self._served: dict[Hashable, float] = {}
        self._waiting: Counter[Hashable] = Counter()
        self._counted: set[int] = set()
        """Indices of the waiting sequences."""

    def fresh(self) -> "VTC":
        """Return the same order without any history."""
        return VTC()

    def wait(self, sequence: Sequence, now: float) -> None:
        """Count a waiting request; raises the counter of a client that had nothing waiting."""
        client = sequence.hints.client
        if not self._waiting[client] and sequence.status is not Status.PREEMPTED:
            least = min((self._served.get(other, 0.0) for other in self._waiting), default=0.0)
            self._served[client] = max(self._served.get(client, 0.0), least)
        self._waiting[client] += 1
        self._counted.add(sequence.index)

    def start(self, sequence: Sequence, now: float) -> None:
        """Subtract one of the client's waiting requests."""
        if sequence.index in self._counted:
            self._counted.remove(sequence.index)
            self._waiting[sequence.hints.client] -= 1
            if not self._waiting[sequence.hints.client]:
                del self._waiting[sequence.hints.client]

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self.start(sequence, 0.0)

    def book(self, step: Step, iterations: int) -> None:
        """Count computed tokens: prompts, first tokens, and decoding."""
        for sequence, count in step.encode:
            first = count == sequence.to_prefill
            self._serve(sequence, count * self.INPUT_WEIGHT + first)
        for sequence in step.decode:
            if not sequence.finished:
                self._serve(sequence, iterations)

    def _serve(self, sequence: Sequence, service: float) -> None:
        client = sequence.hints.client
        self._served[client] = self._served.get(client, 0.0) + service

    def group(self, sequence: Sequence) -> Hashable:
        """Return the sequence's client."""
        return sequence.hints.client

    def group_key(self, group: Hashable) -> float:
        """Return the client's counter of service."""
        return self._served.get(group, 0.0)

    def key(self, sequence: Sequence, now: float) -> tuple[float, int]:
        """Return the sorting key within a client, a constant."""
        return sequence.arrival_s, sequence.index
