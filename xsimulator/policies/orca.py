"""Iteration-level scheduling (Orca, vLLM): requests join and leave at every iteration."""

import math

import numpy as np
from numpy.typing import NDArray

from xsimulator.outcome import Outcome
from xsimulator.policies.iterations import Mixture, from_iterations
from xsimulator.scenario import Scenario

Array = NDArray[np.float64]


def admissions(rate: float, most: int) -> Array:
    """Law of the prompts that one iteration admits, [most + 1]: Poisson, cut at `most`, with the mean `rate`.

    Slots fall free at random; what exceeds `most` waits for the next iteration, so the mean is kept.
    """
    if rate >= most:
        return np.asarray(np.arange(most + 1) == most, dtype=np.float64)

    def cut(mu: float) -> Array:
        law: Array = np.array([math.exp(k * math.log(mu) - mu - math.lgamma(k + 1)) for k in range(most)])
        rest = max(0.0, 1.0 - float(law.sum()))
        return np.concatenate([law, [rest]])

    low, high = rate, rate + 10.0 * most + 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float(cut(middle) @ np.arange(most + 1)) < rate else (low, middle)
    return cut((low + high) / 2)


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
