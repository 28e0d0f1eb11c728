"""Chunked prefill (Sarathi, vLLM v1): a token budget an iteration, decoding first, prompts in pieces with the rest."""

import math

import numpy as np
from numpy.typing import NDArray

from exegpt.workload import LengthDistribution
from xsimulator.outcome import Outcome
from xsimulator.policies.iterations import Mixture, from_iterations
from xsimulator.scenario import Scenario

Array = NDArray[np.float64]


def pieces_of(law: LengthDistribution, room: float) -> LengthDistribution:
    """The tokens of one piece where prompts are cut after every `room` tokens."""
    most = max(1, int(room))
    full, rest = np.divmod(law.s, most)
    weights = np.bincount(rest.astype(np.intp), weights=law.p, minlength=most + 1)
    weights[0], weights[most] = 0.0, weights[most] + full @ law.p
    lengths = np.flatnonzero(weights)
    p = weights[lengths] / weights.sum()
    return LengthDistribution(tuple(lengths.tolist()), tuple(p.tolist()))


def outcome(scenario: Scenario, max_num_seqs: int, max_num_batched_tokens: int) -> Outcome:
    """Queries enter at the rate λ that slots (R / (E[D] + iterations of a prompt)) and budget (tokens a query needs in
    all) both allow; iterations with and without prompts are told apart.
    """
    need, p = scenario.iterations
    iterations = float(need @ p)
    law = scenario.workload.input
    budget = float(max_num_batched_tokens)
    rate = min(max_num_seqs / (iterations + 1.0), budget / (law.mean + iterations))
    pieces = 1.0
    for _ in range(20):  # a prompt's pieces depend on what decoding leaves of the budget, which depends on the rate
        room = max(budget - rate * iterations, 1.0)
        pieces = float(np.ceil(law.s / room) @ law.p)
        rate = min(max_num_seqs / (iterations + pieces), budget / (law.mean + iterations))
    decoding = rate * iterations
    room = max(budget - decoding, 1.0)
    idle = max(0.0, min(math.exp(-rate * pieces), 1.0 - rate * law.mean / room))
    share = 1.0 - idle
    mixture = Mixture(
        weight=np.array([idle, share]),
        prompts=np.array([0.0, rate * pieces / share]),
        decoding=np.array([decoding, decoding]),
        piece=pieces_of(law, room),
        prefill_iterations=pieces,
        most_tokens=room,
    )
    return from_iterations(scenario, mixture, rate, max_num_seqs)
