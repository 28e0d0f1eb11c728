"""Chunked prefill (Sarathi, vLLM v1): each iteration has a token budget for decoding and then for chunks of prompts."""

import math

import numpy as np

from xcore.arrays import Array
from xcore.policies.chunked import TRAITS
from xcore.specs.workload import LengthDistribution
from xsimulator.steady import lockstep
from xsimulator.steady.chunk_times import IterationTimes, chunk_times
from xsimulator.steady.closed_form import ClosedForm, Controls, Steady, pool_of
from xsimulator.steady.iterations import Encoded, Mixture, from_iterations
from xsimulator.steady.occupancy import RESERVED, Occupancy, Pool, reserved_needs
from xsimulator.steady.outcome import Needs, Outcome
from xsimulator.steady.scenario import Scenario

_ROUNDS = 6
"""Rounds after which the rate and the chunks agree."""


def chunks_of(distribution: LengthDistribution, room: float, filled: float) -> Array:
    """Return the expected number of chunks of each length per prompt, [up to room + 1], no longer than the prompts.

    An iteration has `room` tokens for prompts, of which prompts take the share `filled`. A prompt that finds a fresh
    iteration is split after every `room` tokens. A prompt that begins after others has its first split anywhere in the
    room. The share `filled` of the prompts are of the second kind.
    """
    most = max(1, int(room))
    filled = min(max(filled, 0.0), 1.0)
    full, rest = np.divmod(distribution.s, most)
    last = min(most, distribution.max + 1)  # chunks are no longer than prompts, even if more tokens fit
    fresh = np.bincount(rest.astype(np.intp), weights=distribution.p, minlength=last + 1)
    fresh[0], fresh[last] = 0.0, fresh[last] + full @ distribution.p
    chunks: Array = (1 - filled) * fresh + filled * _begun_anywhere(distribution, most)
    return chunks


def _distribution_of(chunks: Array) -> LengthDistribution:
    """Return the distribution of one chunk's tokens."""
    lengths = np.flatnonzero(chunks > 1e-15)
    p = chunks[lengths] / chunks.sum()
    return LengthDistribution(tuple(lengths.tolist()), tuple(p.tolist()))


def _begun_anywhere(distribution: LengthDistribution, room: int) -> Array:
    """Return the chunks of each length per prompt, [up to room + 1], if the first split is uniform over the room."""
    last = min(room, distribution.max + 1)
    probabilities = np.zeros(distribution.max + 3)
    probabilities[distribution.s.astype(np.intp)] = distribution.p
    longer = np.cumsum(probabilities[::-1])[::-1]  # P(S ≥ k)
    k = np.arange(1, last)
    weights = np.zeros(last + 1)
    weights[1:last] = 2 / room * longer[k + 1] + probabilities[k] * (room - k + 1) / room
    weights[last] = float(np.maximum(distribution.s - room + 1, 0.0) @ distribution.p) / room
    return weights


def outcome(scenario: Scenario, max_num_seqs: int, max_num_batched_tokens: int, pool: Pool = RESERVED) -> Outcome:
    """Return the steady state, in which λ queries enter per iteration.

    λ is the highest rate that the slots and the budget both allow. The slots allow R / (E[D] + a prompt's iterations +
    idle ones); the budget allows its share of the tokens that a query needs in all. Iterations with and without prompts
    are distinguished. Prompts of preempted queries are prefilled again.
    """
    load, budget = scenario.load, float(max_num_batched_tokens)
    iterations, lengths = load.mean_iterations, load.workload.input
    verified = scenario.replica.decode.rows * iterations

    def entering(count: float) -> tuple[Occupancy, float]:
        """Return the residents whose prompts take `count` iterations, and the queries that enter an iteration."""
        runs, idle = iterations + count, scenario.idle_iterations
        occupancy = pool.occupancy(load, max_num_seqs, runs + idle, budget / (lengths.mean + verified))
        tokens = lengths.mean * occupancy.prefills + verified
        service = lengths.mean * occupancy.prefills / room
        return occupancy, min(occupancy.entering(runs, idle, service, lengths.std / lengths.mean), budget / tokens)

    chunks, count, room = np.zeros(0), 1.0, budget
    occupancy, rate = entering(count)
    if lockstep.in_step(scenario) and not occupancy.preemptions:
        turns = lockstep.turns(scenario, max_num_seqs, budget, False, scenario.idle_iterations)
        if turns:
            return lockstep.outcome(scenario, turns, occupancy, budget)
    for _ in range(_ROUNDS):  # chunks depend on the budget that decoding leaves, which depends on the rate
        room = max(budget - rate * verified, 1.0)
        chunks = chunks_of(lengths, room, rate * occupancy.prefills * lengths.mean / room)
        before, count = count, float(chunks.sum())
        if count == before:
            break
        occupancy, rate = entering(count)
    decoding, prompts = rate * iterations, rate * occupancy.prefills
    room = max(budget - rate * verified, 1.0)
    idle = max(0.0, min(math.exp(-prompts * count), 1.0 - prompts * lengths.mean / room))
    share = 1.0 - idle
    mixture = Mixture(
        weight=np.array([idle, share]),
        prompts=np.array([0.0, prompts * count / share]),
        decoding=np.array([decoding, decoding]),
        chunk=_distribution_of(chunks),
        prefill_iterations=count,
        most_tokens=room,
    )

    def encoded() -> Encoded:
        others = prompts * (1.0 - 1.0 / max(occupancy.residents, 1.0))
        return chunk_times(IterationTimes(scenario, room, prompts, others, decoding))

    return from_iterations(scenario, mixture, rate, max_num_seqs, occupancy, budget, encoded)


def _steady(scenario: Scenario) -> Steady:
    return lambda controls: outcome(
        scenario, controls["max_num_seqs"], controls["max_num_batched_tokens"], pool_of(controls)
    )


def _needs(scenario: Scenario, controls: Controls) -> Needs | None:
    if controls.get("grows"):
        return None  # memory depends on how long sequences stay
    return reserved_needs(scenario.load, controls["max_num_seqs"], float(controls["max_num_batched_tokens"]))


CLOSED_FORM = ClosedForm((TRAITS.name,), _steady, grows=True, needs=_needs)
