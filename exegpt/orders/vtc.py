"""Virtual token counters (VTC): the client that was served least comes first."""

from collections import Counter
from collections.abc import Hashable

from exegpt.batching import FollowingOrder, Sequence, Status, Step


class VTC(FollowingOrder):
    """By the client's counter of service, a tenth for each token of a prompt and one for each of an output (Hermes'
    weights); a client's own requests by arrival.

    A client that comes back after a pause starts from the least counter of those that wait: it has saved nothing up.
    """

    grouped = True
    INPUT_WEIGHT = 0.1

    def __init__(self) -> None:
        self._served: dict[Hashable, float] = {}
        self._waiting: Counter[Hashable] = Counter()
        self._counted: set[int] = set()
        """Indices of the waiting sequences."""

    def fresh(self) -> "VTC":
        """Nobody was served."""
        return VTC()

    def wait(self, sequence: Sequence, now: float) -> None:
        """Lift the counter of a client that had nothing waiting."""
        client = sequence.hints.client
        if not self._waiting[client] and sequence.status is not Status.PREEMPTED:
            least = min((self._served.get(other, 0.0) for other in self._waiting), default=0.0)
            self._served[client] = max(self._served.get(client, 0.0), least)
        self._waiting[client] += 1
        self._counted.add(sequence.index)

    def start(self, sequence: Sequence, now: float) -> None:
        """One less waits."""
        if sequence.index in self._counted:
            self._counted.remove(sequence.index)
            self._waiting[sequence.hints.client] -= 1
            if not self._waiting[sequence.hints.client]:
                del self._waiting[sequence.hints.client]

    def end(self, sequence: Sequence) -> None:
        """It waits no more."""
        self.start(sequence, 0.0)

    def book(self, step: Step, iterations: int) -> None:
        """Count what is computed: prompts, first tokens, and decoding."""
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
        """Its client."""
        return sequence.hints.client

    def group_key(self, group: Hashable) -> float:
        """What the client was served."""
        return self._served.get(group, 0.0)

    def key(self, sequence: Sequence, now: float) -> tuple[float, int]:
        """A constant."""
        return sequence.arrival_s, sequence.index
