"""Drift: whether the lengths that requests turn out to have are still those that the schedule was found for.

A two-sample Kolmogorov-Smirnov test on inputs and on outputs, over the requests that began last. Short outputs end
first, so that whoever has ended says little about all of them: only requests count before which every other one that
began has ended, too. For whole tokens the test's limit is on the safe side.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from exegpt.workload import LengthDistribution, RequestLengths, Workload

WINDOW = 256
"""Requests that are looked at: the latest."""
SIGNIFICANCE = 1e-4
"""How often a window seems to have drifted though it hasn't: a run has many windows."""
LEAST = 0.1
"""Distance of two distributions below which a new schedule isn't worth a search."""


@dataclass
class Drift:
    """Observed lengths beside the distributions of a workload."""

    workload: Workload
    window: int = field(default_factory=lambda: WINDOW)
    _began: deque[int] = field(default_factory=deque)
    """Requests in the order in which they began, from the first on that hasn't ended."""
    _ended: dict[int, RequestLengths] = field(default_factory=dict)
    """Those of them that have ended."""
    _seen: deque[RequestLengths] = field(default_factory=deque)
    _fresh: int = 0
    """How many were seen since the last look."""

    def begin(self, index: int) -> None:
        """A request's encoding begins."""
        self._began.append(index)

    def end(self, index: int, input_tokens: int, output_tokens: int | None) -> None:
        """It has ended, with so many tokens made; None for one that was cancelled, which tells nothing."""
        if output_tokens:
            self._ended[index] = RequestLengths(input_tokens, output_tokens)
        else:
            self._began.remove(index)
        while self._began and self._began[0] in self._ended:
            self._seen.append(self._ended.pop(self._began.popleft()))
            self._fresh += 1
        while len(self._seen) > self.window:
            self._seen.popleft()

    def observed(self) -> Workload | None:
        """The workload of the latest window, where it isn't the one that was reckoned with; else None. It looks once
        for every half of a window.
        """
        if len(self._seen) < self.window or self._fresh < self.window // 2:
            return None
        self._fresh = 0
        seen = Workload.from_requests("observed", list(self._seen))
        pairs = ((self.workload.input, seen.input), (self.workload.output, seen.output))
        if any(distance(*pair) > limit(self.window) for pair in pairs):
            return seen
        return None

    def restart(self, workload: Workload) -> None:
        """Look from now on whether lengths leave this workload's distributions."""
        self.workload = workload
        self._seen.clear()
        self._fresh = 0


def distance(one: LengthDistribution, other: LengthDistribution) -> float:
    """The greatest difference of two distributions' cumulative probabilities."""
    lengths = np.union1d(one.s, other.s)
    below = [
        np.concatenate([[0.0], np.cumsum(distribution.p)])[np.searchsorted(distribution.s, lengths, "right")]
        for distribution in (one, other)
    ]
    return float(np.abs(below[0] - below[1]).max())


def limit(samples: int, significance: float = SIGNIFICANCE) -> float:
    """The distance that so many samples of a distribution exceed with this probability at most (Massart's inequality),
    and never less than what is worth a search.
    """
    return max(LEAST, math.sqrt(math.log(2.0 / significance) / (2.0 * samples)))
