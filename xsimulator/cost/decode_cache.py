"""DecodeStepCache: seconds of decode steps, which are linear in the context between the points of a profile."""

from collections.abc import Callable, Sequence

import numpy as np

from xcore.arrays import Array
from xcore.interpolation import linear
from xsimulator.cost.stage import StageCost


class DecodeStepCache:
    """A cache of `StageCost.step` for decode-only steps, by the number of sequences."""

    def __init__(self, contexts: Sequence[float], seconds_of: Callable[[int, float], float]):
        """Cache `seconds_of(sequences, mean context)` at `contexts`.

        The function must be linear between `contexts`. Beyond them, the line through the nearest two continues.
        """
        self._contexts, self._seconds_of = np.array(contexts), seconds_of
        self._values: dict[int, Array] = {}

    @staticmethod
    def of(cost: StageCost) -> "DecodeStepCache":
        """Return the cache of one stage."""
        return DecodeStepCache(decode_contexts(cost), lambda sequences, context: cost.step(None, sequences, context))

    def __call__(self, sequences: int, contexts: Array | float) -> Array:
        """Return the seconds of steps of `sequences` sequences at these mean contexts; same shape as `contexts`."""
        values = self._values.get(sequences)
        if values is None:
            values = np.array([self._seconds_of(sequences, context) for context in self._contexts])
            self._values[sequences] = values
        at = np.asarray(contexts, dtype=np.float64, order="C")
        seconds = np.empty(at.shape)
        linear(self._contexts, values, at, seconds)
        return seconds


def decode_contexts(cost: StageCost) -> tuple[float, ...]:
    """Return the contexts between which the seconds of a decode step are linear."""
    return cost.tables.decoder.decode_attention.points[1]
