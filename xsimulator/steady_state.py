"""RRA's steady state (spec section 3.1): how many sequences decode at each iteration of a phase, and how long they are.

Let D(S) be the decoding iterations that a query of output length S needs, and c(S) = ceil(D / N_D) the phases that it
stays. By Little's law over the law of arriving queries,

    B_D = B_E · E[c(S)],   active(u) = B_E · Σ_S P(S) · (c(S) - 1 + [u ≤ 1 + (D - 1) mod N_D]),   u = 1..N_D.

The paper weighs 1/c(S) with the same law, which gives B_D = B_E / E[1/c(S)]; that form is kept behind
`form="paper"`, to reproduce its tables.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from exegpt.workload import LengthDistribution, Workload

Array = NDArray[np.float64]
Form = Literal["exact", "paper"]

KV_QUANTILE = 0.999
"""Memory is sized for this quantile of the resident tokens."""
_Z = 3.0902
"""The standard normal's 99.9th percentile."""


def decode_iterations_of(
    output: LengthDistribution, encoder_decoder: bool, form: Form = "exact"
) -> tuple[Array, Array]:
    """D(S) for every output length, and the lengths' probabilities, each [n].

    An encoder-decoder, and the paper's own counting, decodes S times; a decoder-only model's encoding pass gives the
    first token, so S - 1 times.
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
    """[N_D]: mean context of the resident sequences, the token being decoded included."""
    tokens_mean: Array
    """[N_D]: expected resident tokens / B_E."""
    tokens_variance: Array
    """[N_D]: their variance / B_E."""
    tokens_skewness: Array
    """[N_D]: their third central moment / B_E."""

    def resident_tokens(self, encode_batch: float) -> float:
        """The 99.9th percentile of the resident tokens (Cornish-Fisher to the skewness), its maximum over u."""
        mean, variance = encode_batch * self.tokens_mean, encode_batch * self.tokens_variance
        return float(np.max(cornish_fisher(mean, variance, encode_batch * self.tokens_skewness)))


def cornish_fisher(mean: Array, variance: Array, third: Array) -> Array:
    """The 99.9th percentile of a law with this mean, variance and third central moment."""
    deviation = np.sqrt(np.maximum(variance, 1e-300))
    skewness = np.where(variance > 0, third / deviation**3, 0.0)
    quantile: Array = mean + deviation * (_Z + (_Z**2 - 1) / 6 * skewness)
    return np.where(variance > 0, quantile, mean)


def steady_state(
    workload: Workload, iterations: int, encoder_decoder: bool = False, form: Form = "exact"
) -> SteadyState:
    """The steady state of RRA with N_D = `iterations`."""
    need, p = decode_iterations_of(workload.output, encoder_decoder, form)
    phases = np.ceil(need / iterations)
    last = 1 + (need - 1) % iterations
    u = np.arange(1, iterations + 1, dtype=np.float64)[:, None]
    stays = np.where(need > 0, phases - 1 + (u <= last), 0.0)  # [N_D, S]: phases in which it is present at u
    active = stays @ p
    ratio = float(phases @ p)
    if form == "paper":
        ratio_paper = 1.0 / float((1.0 / phases) @ p)
        active = active * ratio_paper / ratio
        ratio = ratio_paper
    entered, mean_in = workload.input, workload.input.mean
    # The i-th iteration of a query with input x has the context x + i; present at i = (j - 1)·N_D + u for j = 1..stays.
    sum_i = iterations * stays * (stays - 1) / 2 + stays * u
    total = (stays * mean_in + sum_i) @ p
    mean, variance, third = _moments(stays, p, u, iterations, entered)
    context = np.where(stays @ p > 0, total / np.maximum(stays @ p, 1e-300), mean_in)
    return SteadyState(ratio, active, context, mean, variance, third)


def _moments(
    stays: Array, p: Array, u: Array, iterations: int, entered: LengthDistribution
) -> tuple[Array, Array, Array]:
    """Mean, variance and third central moment of the tokens at each u that one query a phase leaves resident.

    Cohorts of different age are independent: one that entered j phases ago holds x + (j - 1)·N_D + u with the
    probability that it is still there.
    """
    ages = np.arange(1, int(stays.max(initial=1.0)) + 1, dtype=np.float64)
    present = np.stack([(stays >= j) @ p for j in ages], axis=1)  # [N_D, ages]
    offset = (ages - 1) * iterations + u
    x1, x2, x3 = (float(entered.s**k @ entered.p) for k in (1, 2, 3))
    m1 = present * (x1 + offset)
    m2 = present * (x2 + 2 * x1 * offset + offset**2)
    m3 = present * (x3 + 3 * x2 * offset + 3 * x1 * offset**2 + offset**3)
    third = m3 - 3 * m1 * m2 + 2 * m1**3
    return m1.sum(axis=1), (m2 - m1**2).sum(axis=1), third.sum(axis=1)


def length_biased_context(workload: Workload, encoder_decoder: bool = False) -> float:
    """Mean context of a resident query averaged over iterations: E[S_E] + (E[D²]/E[D] + 1)/2, whatever N_D is."""
    need, p = decode_iterations_of(workload.output, encoder_decoder)
    first = float(need @ p)
    return workload.input.mean + (float(need**2 @ p) / first + 1) / 2 if first else workload.input.mean
