"""Times that vary from request to request, as mixtures of normal distributions."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xsimulator.cost.recurrences import mixture_quantile

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Times:
    """A mixture of normal distributions, arrays [kinds] of requests."""

    seconds: Array
    """Mean of each kind."""
    deviation: Array
    p: Array
    """Share of the requests; sums to 1."""

    @staticmethod
    def normal(seconds: float, deviation: float = 0.0) -> "Times":
        """One kind."""
        return Times(np.array([seconds]), np.array([deviation]), np.ones(1))

    @staticmethod
    def even(seconds: float, deviation: float, count: int, own: float) -> "Times":
        """Build `count` equally likely, evenly spaced kinds with this mean and deviation of the means; `own`: the
        deviation within a kind.
        """
        if count == 1 or deviation == 0.0:
            return Times.normal(seconds, own)
        between = deviation / ((count**2 - 1) / 12) ** 0.5
        kinds = seconds + between * (np.arange(float(count)) - (count - 1) / 2)
        return Times(kinds, np.full(count, own), np.full(count, 1.0 / count))

    @staticmethod
    def seen(seconds: Array) -> "Times":
        """Those that were seen, each as often."""
        different, counts = np.unique(seconds, return_counts=True)
        return Times(different, np.zeros(len(different)), counts / counts.sum())

    @property
    def mean(self) -> float:
        """Over all requests."""
        return float(self.seconds @ self.p)

    @property
    def between(self) -> float:
        """Standard deviation of the kinds' means."""
        return float(np.sqrt((self.seconds - self.mean) ** 2 @ self.p))

    @property
    def within(self) -> float:
        """Standard deviation among requests of a kind."""
        return float(np.sqrt(self.deviation**2 @ self.p))

    def later(self, seconds: float) -> "Times":
        """The same, all later by so much."""
        return Times(self.seconds + seconds, self.deviation, self.p)

    def quantile(self, q: float) -> float:
        """The time that the share `q` of the requests don't exceed."""
        return mixture_quantile(self.seconds, self.deviation, self.p, q)

    def joined(self, others: "Times") -> "Times":
        """Return the kinds of both mixtures; their shares sum to 1 together."""
        return Times(
            np.concatenate([self.seconds, others.seconds]),
            np.concatenate([self.deviation, others.deviation]),
            np.concatenate([self.p, others.p]),
        )

    def scaled(self, ratio: float) -> "Times":
        """All times the ratio."""
        return Times(self.seconds * ratio, self.deviation * ratio, self.p)

    def merged(self, most: int) -> "Times":
        """With `most` kinds at most: neighbours as one, with what they differ by."""
        if len(self.p) <= most:
            return self
        order = np.argsort(self.seconds)
        seconds, variance, p = self.seconds[order], self.deviation[order] ** 2, self.p[order]
        starts = np.unique(np.searchsorted(np.cumsum(p), np.arange(most) / most))
        weight = np.add.reduceat(p, starts)
        mean, square = (np.add.reduceat(p * x, starts) / weight for x in (seconds, seconds**2 + variance))
        return Times(mean, np.sqrt(np.maximum(square - mean**2, 0.0)), weight)

    def beside(self, seconds: Array, deviation: Array, p: Array) -> "Times":
        """Other times whose kinds [n] are independent of these: each later by as much as these exceed their mean."""
        kinds = (len(seconds), len(self.p))
        return Times(
            (seconds[:, None] + (self.seconds - self.mean)).ravel(),
            np.broadcast_to(deviation[:, None], kinds).ravel(),
            (p[:, None] * self.p).ravel(),
        )
