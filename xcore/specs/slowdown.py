"""Slowdown of the machine since a profile was measured."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Slowdown:
    """The machine's times divided by those of its profile."""

    compute: float = 1.0
    read: float = 1.0
    """Slowdown of reading weights, one of a layer's matrices after the other."""
    stream: float = 1.0
    """Slowdown of the head, a large read."""
    attention: float = 1.0
    """Slowdown of decoding attention, which reads keys and values; on a GPU, that of the head."""

    @property
    def factors(self) -> tuple[float, ...]:
        """The slowdowns of all kinds of work."""
        return astuple(self)

    @property
    def change(self) -> float:
        """The largest distance of a slowdown from 1."""
        return max(abs(1 - factor) for factor in self.factors)
