"""RRA's steady state (docs/theory.md): how many sequences decode at each iteration of a phase, and their contexts.

Let D(S) be the decode iterations that a query of output length S needs. It stays c(S) = ceil(D / N_D) phases. A query
that entered j phases ago is resident at iteration u of a phase if D ≥ (j - 1)·N_D + u. By Little's law, over the
distribution of arriving queries,

    active(u) = B_E · Σ_j P(D ≥ (j - 1)·N_D + u),   u = 1..N_D,     B_D = active(1) = B_E · E[c(S)].

The paper weighs 1/c(S) with the same distribution: a query ends in iteration U = 1 + (S - 1) mod N_D of a phase with
P_D(U) = Σ_S P_D(S) / c(S), which gives B_D = B_E / Σ_U P_D(U) and active(u) = B_D · (1 - Σ_{U<u} P_D(U)).
`form="paper"` keeps these formulas, to reproduce the paper's tables. Contexts stay exact: the paper has no formula.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from xcore.arrays import Array
from xcore.specs.workload import LengthDistribution, Workload

Form = Literal["exact", "paper"]

Z95, Z999 = 1.6449, 3.0902
"""The standard normal's 95th and 99.9th percentiles."""


def decode_iterations_of(
    output: LengthDistribution, encoder_decoder: bool, form: Form = "exact"
) -> tuple[Array, Array]:
    """Return D(S) for every output length, and the lengths' probabilities, each [n].

    An encoder-decoder decodes S times, and so does every model under the paper's own counting. A decoder-only model's
    prefill gives the first token, so that it decodes S - 1 times.
    """
    counts = output.s if encoder_decoder or form == "paper" else output.s - 1
    return counts, output.p


@dataclass(frozen=True)
class SteadyState:
    """One decoding phase per unit of B_E; arrays are over its iterations u = 1..N_D."""

    batch_ratio: float
    """B_D / B_E."""
    active: Array
    """[N_D]: active(u) / B_E."""
    context: Array
    """[N_D]: mean context of the resident sequences, including the token being decoded."""
    present: Array
    """[ages, N_D]: probability that a query of each age, in phases since it entered, is resident at u."""

    def any_active(self, encode_batch: float) -> Array:
        """Return [N_D]: probability that any sequence is resident at u, if `encode_batch` enter every phase."""
        some: Array = -np.expm1(encode_batch * self._nobody)
        return some

    @functools.cached_property
    def variance(self) -> float:
        """Return the variance of the number of residents per unit of B_E, averaged over iterations."""
        return float((self.present * (1.0 - np.minimum(self.present, 1.0))).sum(axis=0).mean())

    @functools.cached_property
    def _nobody(self) -> Array:
        """Return [N_D]: log of the probability that no query is resident, given one query of each age."""
        with np.errstate(divide="ignore"):
            logarithm: Array = np.log1p(-np.minimum(self.present, 1.0)).sum(axis=0)
        return logarithm


def steady_state(
    workload: Workload, iterations: int, encoder_decoder: bool = False, form: Form = "exact", growth: float = 1.0
) -> SteadyState:
    """Return the steady state of RRA with N_D = `iterations`.

    An iteration gives a query `growth` tokens on average.
    """
    need, p = decode_iterations_of(workload.output, encoder_decoder, form)
    present = _survival(need, p, iterations)
    active = present.sum(axis=0)
    # The i-th iteration of a query with an input of x tokens has the context x + 1 + growth·(i - 1).
    place = 1.0 + growth * np.arange(present.size).reshape(present.shape)
    contexts = (_survival(need, p * workload.input_moments[0], iterations) + present * place).sum(axis=0)
    nobody = np.full(iterations, workload.input.mean)
    context = np.divide(contexts, active, out=nobody, where=active > 0)
    if form == "paper":
        active = _paper_active(need, p, iterations)
    return SteadyState(float(active[0]), active, context, present)


def _paper_active(need: Array, p: Array, iterations: int) -> Array:
    """Return the paper's active(u) / B_E [N_D]; every D is at least 1 by its counting."""
    last = ((need - 1) % iterations).astype(np.intp)
    ends = np.bincount(last, weights=p / np.ceil(need / iterations), minlength=iterations)  # P_D(U), U = 1..N_D
    active: Array = (1.0 - np.cumsum(ends) + ends) / ends.sum()
    return active


def _survival(need: Array, p: Array, iterations: int) -> Array:
    """Return P(D ≥ i) for i = 1, 2, ... up to the greatest D, with a row [N_D] for every phase: [ages, N_D]."""
    distribution = np.bincount(need.astype(np.intp), weights=p)
    at_least = np.cumsum(distribution[::-1])[::-1][1:]
    rows = max(1, -(-len(at_least) // iterations))
    padded = np.zeros(rows * iterations)
    padded[: len(at_least)] = at_least
    return padded.reshape(rows, iterations)


def cornish_fisher(mean: float, variance: float, third: float, z: float = Z999) -> float:
    """Return a percentile of a distribution by its mean, variance and third central moment.

    The percentile is that of `z` standard deviations of a normal, by default the 99.9th.
    """
    if variance <= 1e-12 * mean**2:  # a smaller variance is rounding
        return mean
    skewed = third / variance  # deviation · skewness
    return mean + math.sqrt(variance) * z + (z**2 - 1) / 6 * skewed


def resident_input(workload: Workload, encoder_decoder: bool = False) -> float:
    """Return a resident query's mean input, averaged over iterations: E[S_E·D]/E[D], for any N_D."""
    need, p = decode_iterations_of(workload.output, encoder_decoder)
    first = float(need @ p)
    return float(need * p @ workload.input_moments[0]) / first if first else workload.input.mean


def resident_age(workload: Workload, encoder_decoder: bool = False) -> float:
    """Return the iterations of a resident query so far, averaged over iterations: (E[D²]/E[D] + 1)/2, for any N_D."""
    need, p = decode_iterations_of(workload.output, encoder_decoder)
    first = float(need @ p)
    return (float(need**2 @ p) / first + 1) / 2 if first else 0.0


def length_biased_context(workload: Workload, encoder_decoder: bool = False) -> float:
    """Return a resident query's mean context, averaged over iterations."""
    return resident_input(workload, encoder_decoder) + resident_age(workload, encoder_decoder)


def longest_of(distribution: LengthDistribution, batch: float) -> Array:
    """Return the probability of each length to be the greatest of `batch` independent ones."""
    return np.diff(np.concatenate([[0.0], np.cumsum(distribution.p)]) ** batch)


def expected_longest(distribution: LengthDistribution, batch: int) -> float:
    """Return the expected greatest of `batch` independent lengths."""
    return float(distribution.s @ longest_of(distribution, batch))
