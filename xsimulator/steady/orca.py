"""Iteration-level scheduling (Orca, vLLM): requests join and leave at every iteration."""

import math

import numpy as np
from numpy.typing import NDArray

from xsimulator.steady.iterations import Mixture, from_iterations
from xsimulator.steady.occupancy import RESERVED, Pool
from xsimulator.steady.outcome import Outcome
from xsimulator.steady.scenario import Scenario

Array = NDArray[np.float64]


def admissions(rate: float, most: int) -> Array:
    """Distribution of the prompts that one iteration admits, [most + 1]: Poisson, truncated at `most`, with the mean
    `rate`.

    Slots fall free at random; what exceeds `most` waits for the next iteration, so the mean is kept.
    """
    if rate >= most:
        return np.asarray(np.arange(most + 1) == most, dtype=np.float64)
    mu = rate
    while True:  # Newton's method: the mean of the truncated distribution is concave in μ, so that its steps only rise
        distribution = _poisson(mu, most)
        below = sum(distribution)
        mean = sum(k * p for k, p in enumerate(distribution)) + most * (1.0 - below)
        step = (rate - mean) / below
        if step <= 1e-12 * mu:
            return np.array([*distribution, 1.0 - below])
        mu += step


def _poisson(mu: float, most: int) -> list[float]:
    """Probabilities of 0, 1, ... `most` - 1."""
    distribution = [math.exp(-mu)]
    for k in range(1, most):
        distribution.append(distribution[-1] * mu / k)
    return distribution


def outcome(scenario: Scenario, max_num_seqs: int, prefills_per_step: int, pool: Pool = RESERVED) -> Outcome:
    """A query holds a slot for one encoding and D decoding iterations: λ = min(prefills, R / (E[D] + 1)) queries enter
    an iteration, and iterations are averaged over how many prompts they encode, those of preempted queries again.
    """
    stay = scenario.load.mean_iterations + 1.0
    occupancy = pool.occupancy(scenario.load, max_num_seqs, stay, prefills_per_step)
    rate = min(prefills_per_step / occupancy.prefills, occupancy.residents / stay)
    most = min(prefills_per_step, max_num_seqs)
    distribution = admissions(rate * occupancy.prefills, most)
    prompts = np.arange(most + 1, dtype=np.float64)
    mixture = Mixture(
        weight=distribution,
        prompts=prompts,
        decoding=np.maximum(rate * stay - prompts, 0.0),
        chunk=scenario.load.workload.input,
        prefill_iterations=1.0,
    )
    longest = float(most * scenario.load.workload.input.max + max_num_seqs)
    return from_iterations(scenario, mixture, rate, max_num_seqs, occupancy, longest)
