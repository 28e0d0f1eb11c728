"""Drift: tests whether observed lengths still have the distributions for which the schedule was tuned.

It is a two-sample Kolmogorov-Smirnov test on inputs and on outputs, over the requests that began last.
Short outputs end first, so finished requests are a biased sample: a request counts only once all requests that began
before it have ended. For whole tokens the test's limit is conservative.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from xcore.specs.workload import LengthDistribution, RequestLengths, Workload

WINDOW = 256
"""Number of latest requests in the test."""
SIGNIFICANCE = 1e-4
"""Probability of a false alarm per window: a run has many windows."""
LEAST = 0.1
"""Distance of two distributions below which a new schedule isn't worth a search."""


@dataclass
class LengthDrift:
    """Compares observed lengths with the distributions of a workload."""

    workload: Workload
    window: int = field(default_factory=lambda: WINDOW)
    _began: deque[int] = field(default_factory=deque)
    """Requests in the order in which they began, starting at the first unfinished one."""
    _ended: dict[int, RequestLengths] = field(default_factory=dict)
    """Finished requests among them."""
    _observed: deque[RequestLengths] = field(default_factory=deque)
    _fresh: int = 0
    """Number of observed requests since the last test."""
    statistic: float = 0.0
    """The distance that the last test found, of inputs or of outputs."""

    def begin(self, index: int) -> None:
        """Record that a request's prefill begins."""
        self._began.append(index)

    def end(self, index: int, input_tokens: int, output_tokens: int | None) -> None:
        """Record that a request has ended with `output_tokens` tokens; None: it was cancelled and doesn't count."""
        if output_tokens:
            self._ended[index] = RequestLengths(input_tokens, output_tokens)
        else:
            self._began.remove(index)
        while self._began and self._began[0] in self._ended:
            self._observed.append(self._ended.pop(self._began.popleft()))
            self._fresh += 1
        while len(self._observed) > self.window:
            self._observed.popleft()

    def observed(self) -> Workload | None:
        """Return the workload of the latest window if it has drifted, else None. Tests once per half window."""
        if len(self._observed) < self.window or self._fresh < self.window // 2:
            return None
        self._fresh = 0
        observed = Workload.from_requests("observed", list(self._observed))
        pairs = ((self.workload.input, observed.input), (self.workload.output, observed.output))
        self.statistic = max(distance(*pair) for pair in pairs)
        return observed if self.statistic > limit(self.window) else None

    def restart(self, workload: Workload) -> None:
        """Compare with this workload from now on, and drop earlier requests."""
        self.workload = workload
        self._observed.clear()
        self._fresh = 0


def distance(distribution: LengthDistribution, other: LengthDistribution) -> float:
    """Return the greatest difference of two distributions' cumulative probabilities."""
    lengths = np.union1d(distribution.s, other.s)
    below = [
        np.concatenate([[0.0], np.cumsum(d.p)])[np.searchsorted(d.s, lengths, "right")] for d in (distribution, other)
    ]
    return float(np.abs(below[0] - below[1]).max())


def limit(samples: int, significance: float = SIGNIFICANCE) -> float:
    """Return the distance that `samples` samples of a distribution exceed with at most this probability.

    It follows from Massart's inequality, and is at least `LEAST`.
    """
    return max(LEAST, math.sqrt(math.log(2.0 / significance) / (2.0 * samples)))
