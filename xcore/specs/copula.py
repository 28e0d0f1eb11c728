"""Copula: how the input and the output length of a request depend on each other."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.spec import Spec

if TYPE_CHECKING:
    from xcore.specs.workload import LengthDistribution


MOST_CLASSES = 32
"""Most classes of inputs and of outputs."""
REQUESTS_PER_CLASS = 32
"""Requests of a list for each class. With fewer, chance would look like dependence."""
COARSE, BY_CHANCE = 4, 1e-3
"""Classes of the test for independence (χ²), and the probability of its value by chance above which it holds."""


@dataclass(frozen=True)
class Copula(Spec):
    """Dependence of inputs and outputs by classes of their ranks.

    Inputs and outputs are divided into as many equally likely classes, the shortest lengths first. Within a pair of
    classes they are independent. Ranks stay the same when lengths are scaled.
    """

    shares: tuple[tuple[float, ...], ...]
    """[input class][output class]: share of the requests; each row and column sums to 1 / classes."""

    def __post_init__(self) -> None:
        classes = len(self.shares)
        if not classes or any(len(row) != classes for row in self.shares):
            raise InputError("A copula needs as many output classes as input classes, and at least one.")
        sums = np.concatenate([self.cells.sum(axis=0), self.cells.sum(axis=1)])
        if not (self.cells >= 0).all() or not np.allclose(sums * classes, 1.0, atol=1e-3):
            raise InputError(
                f"A copula of {classes} classes needs shares that sum to 1/{classes} in each row and column."
            )

    @functools.cached_property
    def cells(self) -> Array:
        """Return `shares` as an array."""
        return np.asarray(self.shares, dtype=np.float64)

    @staticmethod
    def of(
        inputs: ArrayLike, outputs: ArrayLike, input: "LengthDistribution", output: "LengthDistribution"
    ) -> "Copula | None":
        """Return the dependence in pairs with these distributions; None if they may be independent.

        The ranks of equal lengths are spread evenly over the ranks that they take together.
        """
        from scipy.special import chdtrc

        pairs = len(np.asarray(inputs))
        if pairs < COARSE * REQUESTS_PER_CLASS:
            return None
        off = Copula._of(inputs, outputs, input, output, COARSE).cells * COARSE**2 - 1.0
        if chdtrc((COARSE - 1) ** 2, pairs * (off**2).mean()) > BY_CHANCE:
            return None
        return Copula._of(inputs, outputs, input, output, min(MOST_CLASSES, pairs // REQUESTS_PER_CLASS))

    @staticmethod
    def _of(
        inputs: ArrayLike, outputs: ArrayLike, input: "LengthDistribution", output: "LengthDistribution", classes: int
    ) -> "Copula":
        of_input, of_output = (_classes_of(lengths.p, classes) for lengths in (input, output))
        rows, columns = np.searchsorted(input.s[:-1], inputs), np.searchsorted(output.s[:-1], outputs)
        by_input = [np.bincount(rows, of_class[columns], len(input.s)) for of_class in of_output.T]
        counts = of_input.T @ np.stack(by_input, axis=1)
        return Copula(tuple(tuple(row) for row in np.round(counts / len(rows), 6).tolist()))

    def input_moments(self, input: "LengthDistribution", output: "LengthDistribution") -> Array:
        """Return [3, outputs]: the mean of S_E, S_E² and S_E³ of requests with each output length."""
        classes = len(self.shares)
        powers = np.stack([input.s, input.s**2, input.s**3])
        of_class = powers @ class_weights(input.p, classes) @ self.cells * classes**2
        moments: Array = of_class @ _classes_of(output.p, classes).T
        return moments

    def output_ranks(self, input_ranks: Array, rng: np.random.Generator) -> Array:
        """Draw the output's rank, in [0, 1), for each input's rank."""
        classes = len(self.shares)
        rows = np.minimum((input_ranks * classes).astype(np.intp), classes - 1)
        rising = np.cumsum(self.cells, axis=1)
        chosen = rng.random(len(rows)) * rising[rows, -1]
        columns = (rising[rows] <= chosen[:, None]).sum(axis=1)
        ranks: Array = (np.minimum(columns, classes - 1) + rng.random(len(rows))) / classes
        return ranks


def class_weights(p: Array, classes: int) -> Array:
    """Return [lengths, classes]: the share of all requests that have a length and belong to a class."""
    above = np.minimum(np.cumsum(p), 1.0)[:, None]
    below = np.concatenate([[[0.0]], above[:-1]])
    edges = np.arange(classes + 1) / classes
    weights: Array = np.maximum(np.minimum(above, edges[1:]) - np.maximum(below, edges[:-1]), 0.0)
    return weights


def _classes_of(p: Array, classes: int) -> Array:
    """Return [lengths, classes]: the share of each length's requests in a class; even for a length without requests."""
    even = np.full((len(p), classes), 1.0 / classes)
    shares: Array = np.divide(class_weights(p, classes), p[:, None], out=even, where=p[:, None] > 0)
    return shares


def at_ranks(lengths: "LengthDistribution", ranks: Array) -> Array:
    """Return the length at each rank, as `LengthDistribution.quantile` does; float64."""
    index = np.searchsorted(np.cumsum(lengths.p), ranks)
    found: Array = lengths.s[np.minimum(index, len(lengths.s) - 1)]
    return found
