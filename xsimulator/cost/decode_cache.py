"""DecodeStepCache: seconds of decoding steps, which are linear in the context between the points of a profile."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from xcore.interpolation import linear
from xsimulator.cost.stage import StageCost

Array = NDArray[np.float64]


class DecodeStepCache:
    """A cache of `StageCost.step` for decoding alone, by the number of sequences."""

    def __init__(self, contexts: Sequence[float], seconds_of: Callable[[int, float], float]):
        """`seconds_of` a number of sequences and their mean context is linear between `contexts`, and beyond them as at
        the nearest two.
        """
        self._contexts, self._seconds_of = np.array(contexts), seconds_of
        self._values: dict[int, Array] = {}

    @staticmethod
    def of(cost: StageCost) -> "DecodeStepCache":
        """Of one stage."""
        return DecodeStepCache(decode_contexts(cost), lambda sequences, context: cost.step(None, sequences, context))

    def __call__(self, sequences: int, contexts: Array | float) -> Array:
        """Seconds of steps of so many sequences at these mean contexts; the contexts' shape."""
        values = self._values.get(sequences)
        if values is None:
            values = np.array([self._seconds_of(sequences, context) for context in self._contexts])
            self._values[sequences] = values
        at = np.asarray(contexts, dtype=np.float64, order="C")
        seconds = np.empty(at.shape)
        linear(self._contexts, values, at, seconds)
        return seconds


def decode_contexts(cost: StageCost) -> tuple[float, ...]:
    """Return the contexts between which a decoding step's seconds are linear."""
    return cost.tables.decoder.decode_attention.points[1]
