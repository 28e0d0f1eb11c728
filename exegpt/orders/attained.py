"""The time that sequences have been resident, or executed."""

from exegpt.batching import Sequence


class Attained:
    """Seconds by sequence: of residence, over all times that each was admitted; or, where `executed`, of the steps that
    it was in. On devices that several models share, residents may wait for long.
    """

    def __init__(self, executed: bool = False) -> None:
        self.executed = executed
        self._seconds: dict[int, float] = {}
        self._since: dict[int, float] = {}

    def start(self, sequence: Sequence, now: float) -> None:
        """It is resident from now on."""
        if not self.executed:
            self._since[sequence.index] = now

    def stop(self, sequence: Sequence, now: float) -> None:
        """It was resident until now."""
        if not self.executed:
            self.add(sequence, now - self._since.pop(sequence.index, now))

    def add(self, sequence: Sequence, seconds: float) -> None:
        """It has attained so much more."""
        self._seconds[sequence.index] = self.seconds(sequence) + seconds

    def end(self, sequence: Sequence) -> None:
        """Forget it."""
        self._seconds.pop(sequence.index, None)
        self._since.pop(sequence.index, None)

    def seconds(self, sequence: Sequence) -> float:
        """Of a waiting sequence; of a resident one too, where steps count."""
        return self._seconds.get(sequence.index, 0.0)
