"""Lengths: predicted output lengths, given the tokens generated so far."""

import math
import sys
from bisect import bisect_left, bisect_right

import numpy as np

from xcore.specs.workload import LengthDistribution

QUANTILE = 0.99
"""The quantile of output lengths for which the server promises the bound."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class Lengths:
    """Output lengths of the schedule's workload."""

    def __init__(self, outputs: LengthDistribution):
        self._s = [int(s) for s in outputs.s]
        self._below: list[float] = [-1.0, *(np.cumsum(outputs.p) - 1.0).tolist()]
        """Minus the shares of outputs longer than each length; lists, as `bisect` is called for each sequence."""
        self.mean = outputs.mean
        self._longest: dict[int, int] = {}
        """Results of `longest` without a cap: it is called for every sequence at every arrival."""

    def supposed(self, number: int, generated: int, most: int) -> int:
        """Return a sequence's predicted output tokens.

        This is a fixed quantile per sequence of the lengths beyond its generated tokens. The quantiles are spread
        evenly over sequences.
        """
        return self._beyond(generated, most, (number * _GOLDEN) % 1.0)

    def longest(self, generated: int, most: int) -> int:
        """Return the output length that 99 of 100 sequences with as many generated tokens stay below."""
        if generated not in self._longest:
            self._longest[generated] = self._beyond(generated, sys.maxsize, QUANTILE)
        return min(most, self._longest[generated])

    def _beyond(self, generated: int, most: int, u: float) -> int:
        first = bisect_right(self._s, generated)
        left = -self._below[first] if first < len(self._s) else 0.0
        if left <= 1e-9:  # longer than any length of the workload: assume another half of the mean
            return min(most, generated + max(1, round(self.mean / 2)))
        place = bisect_left(self._below, -left * (1.0 - u), 1) - 1
        return min(most, max(generated + 1, self._s[min(place, len(self._s) - 1)]))
