"""Attained service of sequences: the time that they have been resident, or executed."""

from xcore.batching import Sequence


class Attained:
    """Attained seconds of each sequence.

    The time of residence counts, summed over all admissions. If `executed`, only the steps that contained the sequence
    count, because residents may wait for long on devices that several models share.
    """

    def __init__(self, executed: bool = False) -> None:
        self.executed = executed
        self._seconds: dict[int, float] = {}
        self._since: dict[int, float] = {}

    def start(self, sequence: Sequence, now: float) -> None:
        """Record that the sequence is resident from now on."""
        if not self.executed:
            self._since[sequence.index] = now

    def stop(self, sequence: Sequence, now: float) -> None:
        """Record that the sequence was resident until now."""
        if not self.executed:
            self.add(sequence, now - self._since.pop(sequence.index, now))

    def add(self, sequence: Sequence, seconds: float) -> None:
        """Add executed seconds."""
        self._seconds[sequence.index] = self.seconds(sequence) + seconds

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._seconds.pop(sequence.index, None)
        self._since.pop(sequence.index, None)

    def seconds(self, sequence: Sequence) -> float:
        """Return the attained seconds of a waiting sequence; if steps count, also of a resident one."""
        return self._seconds.get(sequence.index, 0.0)
