"""The time that sequences have been resident."""

from exegpt.batching import Sequence


class Attained:
    """Seconds of residence by sequence, over all times that each was admitted."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._since: dict[int, float] = {}

    def start(self, sequence: Sequence, now: float) -> None:
        """It is resident from now on."""
        self._since[sequence.index] = now

    def stop(self, sequence: Sequence, now: float) -> None:
        """It was resident until now."""
        ran = now - self._since.pop(sequence.index, now)
        self._seconds[sequence.index] = self.seconds(sequence) + ran

    def end(self, sequence: Sequence) -> None:
        """Forget it."""
        self._seconds.pop(sequence.index, None)
        self._since.pop(sequence.index, None)

    def seconds(self, sequence: Sequence) -> float:
        """Of a waiting sequence."""
        return self._seconds.get(sequence.index, 0.0)
