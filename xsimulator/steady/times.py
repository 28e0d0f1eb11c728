"""Times that vary from request to request, as mixtures of normal distributions."""

from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xsimulator.cost.recurrences import mixture_quantile


@dataclass(frozen=True)
class Times:
    """A mixture of normal distributions, as arrays over kinds of requests [kinds]."""

    seconds: Array
    """Mean of each kind."""
    deviation: Array
    p: Array
    """Share of the requests; sums to 1."""

    @staticmethod
    def normal(seconds: float, deviation: float = 0.0) -> "Times":
        """Return a mixture of one kind."""
        return Times(np.array([seconds]), np.array([deviation]), np.ones(1))

    @staticmethod
    def even(seconds: float, deviation: float, count: int, own: float) -> "Times":
        """Build `count` equally likely, evenly spaced kinds with this mean and deviation of the means.

        `own` is the deviation within a kind.
        """
        if count == 1 or deviation == 0.0:
            return Times.normal(seconds, own)
        between = deviation / ((count**2 - 1) / 12) ** 0.5
        kinds = seconds + between * (np.arange(float(count)) - (count - 1) / 2)
        return Times(kinds, np.full(count, own), np.full(count, 1.0 / count))

    @staticmethod
    def seen(seconds: Array) -> "Times":
        """Build the mixture of measured times, each with the same weight."""
        different, counts = np.unique(seconds, return_counts=True)
        return Times(different, np.zeros(len(different)), counts / counts.sum())

    @property
    def mean(self) -> float:
        """Return the mean over all requests."""
        return float(self.seconds @ self.p)

    @property
    def between(self) -> float:
        """Return the standard deviation of the kinds' means."""
        return float(np.sqrt((self.seconds - self.mean) ** 2 @ self.p))

    @property
    def within(self) -> float:
        """Return the standard deviation among requests of a kind."""
        return float(np.sqrt(self.deviation**2 @ self.p))

    def later(self, seconds: float) -> "Times":
        """Return the mixture with all times later by `seconds`."""
        return Times(self.seconds + seconds, self.deviation, self.p)

    def quantile(self, q: float) -> float:
        """Return the time that the share `q` of the requests doesn't exceed."""
        return mixture_quantile(self.seconds, self.deviation, self.p, q)

    def joined(self, others: "Times") -> "Times":
        """Return the kinds of both mixtures; their shares sum to 1 together."""
        return Times(
            np.concatenate([self.seconds, others.seconds]),
            np.concatenate([self.deviation, others.deviation]),
            np.concatenate([self.p, others.p]),
        )

    def scaled(self, ratio: float) -> "Times":
        """Return the mixture with all times multiplied by `ratio`."""
        return Times(self.seconds * ratio, self.deviation * ratio, self.p)

    def merged(self, most: int) -> "Times":
        """Merge neighbouring kinds, so that at most `most` remain; their differences add to the deviation."""
        if len(self.p) <= most:
            return self
        possible = np.flatnonzero(self.p)  # a share may be too small for a number
        order = possible[np.argsort(self.seconds[possible])]
        seconds, variance, p = self.seconds[order], self.deviation[order] ** 2, self.p[order]
        starts = np.unique(np.searchsorted(np.cumsum(p), np.arange(most) / most))
        weight = np.add.reduceat(p, starts)
        mean, square = (np.add.reduceat(p * x, starts) / weight for x in (seconds, seconds**2 + variance))
        return Times(mean, np.sqrt(np.maximum(square - mean**2, 0.0)), weight)

    def beside(self, seconds: Array, deviation: Array, p: Array) -> "Times":
        """Add independent times with kinds [n]: each is later by the amount that these times exceed their mean."""
        kinds = (len(seconds), len(self.p))
        return Times(
            (seconds[:, None] + (self.seconds - self.mean)).ravel(),
            np.broadcast_to(deviation[:, None], kinds).ravel(),
            (p[:, None] * self.p).ravel(),
        )
