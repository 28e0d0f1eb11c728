"""StartTable: the predicted start of a sequence at each place of the queue."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array


@dataclass(frozen=True)
class StartTable:
    """The predicted start of a sequence at each place of the queue."""

    made_s: float
    starts_s: tuple[float, ...]
    """Seconds from `made_s`, by place."""
    round: int
    """Number of sequences that run at once. The table ends with so many places, which later ones repeat."""
    round_s: float | None
    """Seconds between a start and the one a round later; None if later places are beyond the horizon."""
    first: int
    """Index of the next sequence, counting accepted ones: it is `accepted - first` places into the table."""

    def start_s(self, place: int) -> float | None:
        """Return the seconds from `made_s` until a place starts; None if that is beyond the horizon.

        Places beyond the table repeat its last round: sequences that started together may also end together.
        """
        beyond = place - len(self.starts_s) + 1
        if beyond <= 0:
            return self.starts_s[place]
        if self.round_s is None:
            return None
        rounds = -(-beyond // self.round)
        return self.starts_s[place - rounds * self.round] + rounds * self.round_s


def in_order(starts_s: Sequence[float | None], places: int) -> tuple[Array, float | None]:
    """Return the starts in order, and the seconds of the last round of `places`.

    None: beyond the horizon, where starts are not listed.
    """
    known = [start_s for start_s in starts_s if start_s is not None]
    ordered = np.maximum.accumulate(known) if known else np.zeros(0)
    return ordered, float(ordered[-1] - ordered[-1 - places]) if len(known) == len(starts_s) else None
