"""Iteration-level scheduling (Orca, vLLM): requests join and leave at every iteration."""

import math

import numpy as np
from numpy.typing import NDArray

from xsimulator.steady.iterations import Mixture, from_iterations
from xsimulator.steady.outcome import Outcome
from xsimulator.steady.scenario import Scenario

Array = NDArray[np.float64]


def admissions(rate: float, most: int) -> Array:
    """Law of the prompts that one iteration admits, [most + 1]: Poisson, cut at `most`, with the mean `rate`.

    Slots fall free at random; what exceeds `most` waits for the next iteration, so the mean is kept.
    """
    if rate >= most:
        return np.asarray(np.arange(most + 1) == most, dtype=np.float64)
    mu = rate
    while True:  # Newton's method: the mean of the cut law is concave in μ, so that its steps only rise
        law = _poisson(mu, most)
        below = sum(law)
        mean = sum(k * p for k, p in enumerate(law)) + most * (1.0 - below)
        step = (rate - mean) / below
        if step <= 1e-12 * mu:
            return np.array([*law, 1.0 - below])
        mu += step


def _poisson(mu: float, most: int) -> list[float]:
    """Probabilities of 0, 1, ... `most` - 1."""
    law = [math.exp(-mu)]
    for k in range(1, most):
        law.append(law[-1] * mu / k)
    return law


def outcome(scenario: Scenario, max_num_seqs: int, prefills_per_step: int) -> Outcome:
    """A query holds a slot for one encoding and D decoding iterations: λ = min(prefills, R / (E[D] + 1)) queries enter
    an iteration, and iterations are averaged over how many do.
    """
    need, p = scenario.iterations
    stay = float(need @ p) + 1.0
    rate = min(float(prefills_per_step), max_num_seqs / stay)
    most = min(prefills_per_step, max_num_seqs)
    law = admissions(rate, most)
    prompts = np.arange(most + 1, dtype=np.float64)
    mixture = Mixture(
        weight=law,
        prompts=prompts,
        decoding=np.maximum(rate * stay - prompts, 0.0),
        piece=scenario.workload.input,
        prefill_iterations=1.0,
    )
    return from_iterations(scenario, mixture, rate, max_num_seqs)
