"""SeaLLM's doubling budget: T'·L̂ where no length is known."""

from heapq import heappop, heappush

from exegpt.batching import FollowingOrder, Sequence
from exegpt.orders.attained import Attained


class DoublingBudget(FollowingOrder):
    """By remaining budget times the service's mean time alone, L̂.

    The first budget is Q_0 = L̂ + its standard deviation; residence uses it up, and the k-th one after it is 2^k Q_0.
    Whoever has waited for `starvation` times L̂ comes before all that haven't, in the order in which they came to it.
    """

    def __init__(self, starvation: float = 10.0):
        self.starvation = starvation
        self._attained = Attained()
        self._starved: list[tuple[float, int, Sequence]] = []
        """A heap of when waiting sequences will have starved; those that left meanwhile are passed over."""
        self._starves_s: dict[int, float] = {}
        """When each waiting sequence will have starved, by index."""

    def fresh(self) -> "DoublingBudget":
        """Nobody has run."""
        return DoublingBudget(self.starvation)

    def wait(self, sequence: Sequence, now: float) -> None:
        """It starves from now on; one that has just arrived, from its arrival."""
        since = now if self._attained.seconds(sequence) else sequence.arrival_s
        at = since + self.starvation * (sequence.hints.service_time_s or 0.0)
        self._starves_s[sequence.index] = at
        heappush(self._starved, (at, sequence.index, sequence))

    def due(self, now: float) -> list[Sequence]:
        """Sequences that have starved since the last call."""
        due = []
        while self._starved and self._starved[0][0] <= now:
            at, index, sequence = heappop(self._starved)
            if self._starves_s.get(index) == at:
                due.append(sequence)
        return due

    def start(self, sequence: Sequence, now: float) -> None:
        """It uses its budget."""
        self._attained.start(sequence, now)
        self._starves_s.pop(sequence.index, None)

    def stop(self, sequence: Sequence, now: float) -> None:
        """It uses it no more."""
        self._attained.stop(sequence, now)

    def end(self, sequence: Sequence) -> None:
        """Forget it."""
        self._attained.end(sequence)
        self._starves_s.pop(sequence.index, None)

    def budget(self, sequence: Sequence) -> float:
        """What a waiting sequence has left of its present budget, in seconds."""
        hints = sequence.hints
        budget = first = (hints.service_time_s or 0.0) + hints.service_sd_s
        used, exhausted = self._attained.seconds(sequence), 0
        while used >= budget > 0:
            used, exhausted = used - budget, exhausted + 1
            budget = 2.0**exhausted * first
        return budget - used

    def key(self, sequence: Sequence, now: float) -> tuple[bool, float, float, int]:
        """Changes once while a sequence waits: when it has starved."""
        starves_s = self._starves_s.get(sequence.index)
        if starves_s is not None and starves_s <= now:
            return False, starves_s, sequence.arrival_s, sequence.index
        order = self.budget(sequence) * (sequence.hints.service_time_s or 0.0)
        return True, order, sequence.arrival_s, sequence.index
