"""Iteration-level scheduling (Orca, vLLM): requests join and leave at every iteration."""

import math

import numpy as np

from xcore.arrays import Array
from xcore.policies.orca import TRAITS
from xsimulator.steady import lockstep
from xsimulator.steady.closed_form import ClosedForm, Controls, Steady, pool_of
from xsimulator.steady.iterations import Encoded, Mixture, Own, from_iterations, seconds_of
from xsimulator.steady.occupancy import RESERVED, Pool, reserved_needs
from xsimulator.steady.outcome import Needs, Outcome
from xsimulator.steady.scenario import Scenario


def admissions(rate: float, most: int) -> Array:
    """Return the distribution of the prompts that one iteration admits, [most + 1].

    The distribution is Poisson with the mean `rate`, truncated at `most`. Slots become free at random. Prompts beyond
    `most` wait for the next iteration, so the mean is kept.
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
    """Return the Poisson probabilities of 0, 1, ... `most` - 1."""
    distribution = [math.exp(-mu)]
    for k in range(1, most):
        distribution.append(distribution[-1] * mu / k)
    return distribution


def outcome(scenario: Scenario, max_num_seqs: int, prefills_per_step: int, pool: Pool = RESERVED) -> Outcome:
    """Return the steady state, in which λ queries enter per iteration.

    A query holds a slot for one prefill, D decode iterations and the idle iterations. λ is the smaller of the prefills
    per step and R / (E[D] + 1 + idle). The mixture averages over the number of prompts per iteration; preempted
    queries' prompts count again.
    """
    runs = scenario.load.mean_iterations + 1.0
    stay = runs + scenario.idle_iterations
    occupancy = pool.occupancy(scenario.load, max_num_seqs, stay, prefills_per_step)
    idle = scenario.idle_iterations
    longest = _most_tokens(scenario, max_num_seqs, prefills_per_step)
    if lockstep.in_step(scenario) and not occupancy.preemptions:
        turns = lockstep.turns(scenario, max_num_seqs, float(prefills_per_step), True, idle)
        if turns:
            return lockstep.outcome(scenario, turns, occupancy, longest)
    most_entering = occupancy.entering(runs, idle, occupancy.prefills / prefills_per_step)
    rate = min(prefills_per_step / occupancy.prefills, most_entering)
    most = min(prefills_per_step, max_num_seqs)
    distribution = admissions(rate * occupancy.prefills, most)
    prompts = np.arange(most + 1, dtype=np.float64)
    mixture = Mixture(
        weight=distribution,
        prompts=prompts,
        decoding=np.maximum(rate * runs - prompts, 0.0),
        chunk=scenario.load.workload.input,
        prefill_iterations=1.0,
    )
    return from_iterations(
        scenario, mixture, rate, max_num_seqs, occupancy, longest, lambda: _encoded(scenario, mixture)
    )


def _most_tokens(scenario: Scenario, max_num_seqs: int, prefills_per_step: int) -> float:
    """Return the most tokens of an iteration."""
    return float(min(prefills_per_step, max_num_seqs) * scenario.load.workload.input.max + max_num_seqs)


def _encoded(scenario: Scenario, mixture: Mixture) -> Encoded:
    """Return the seconds of the iteration that prefills a prompt, by its length, among other prompts of any length."""
    lengths, p = scenario.load.prompts.kinds
    share = mixture.weight * mixture.prompts / float(mixture.weight @ mixture.prompts)
    kinds = np.flatnonzero(share > 1e-9)
    share, prompts = share[kinds], mixture.prompts[kinds, None]
    tokens = lengths + (prompts - 1) * mixture.chunk.mean
    length, prompts, decoding = np.broadcast_arrays(lengths, prompts, mixture.decoding[kinds, None])
    table = seconds_of(scenario, prompts, tokens, decoding, Own(length, length))[..., 0]
    per_token = (table[:, -1] - table[:, 0]) / max(lengths[-1] - lengths[0], 1.0)
    deviation = np.sqrt(np.maximum(prompts[:, 0] - 1, 0.0)) * mixture.chunk.std * per_token
    return Encoded.of(table.T, np.broadcast_to(deviation, table.T.shape), np.outer(p, share))


def _steady(scenario: Scenario) -> Steady:
    return lambda controls: outcome(
        scenario, controls["max_num_seqs"], controls["prefills_per_step"], pool_of(controls)
    )


def _needs(scenario: Scenario, controls: Controls) -> Needs | None:
    if controls.get("grows"):
        return None  # memory depends on how long sequences stay
    most, prefills = controls["max_num_seqs"], controls["prefills_per_step"]
    return reserved_needs(scenario.load, most, _most_tokens(scenario, most, prefills))


CLOSED_FORM = ClosedForm((TRAITS.name,), _steady, grows=True, needs=_needs)
