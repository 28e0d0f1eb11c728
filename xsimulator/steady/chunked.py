"""Chunked prefill (Sarathi, vLLM v1): a token budget an iteration, decoding first, prompts in pieces with the rest."""

import math

import numpy as np
from numpy.typing import NDArray

from exegpt.workload import LengthDistribution
from xsimulator.steady.iterations import Mixture, from_iterations
from xsimulator.steady.outcome import Outcome
from xsimulator.steady.scenario import Scenario

Array = NDArray[np.float64]

_ROUNDS = 6
"""After which rate and pieces agree."""


def pieces_of(law: LengthDistribution, room: float, filled: float) -> Array:
    """[up to room + 1]: pieces of each length per prompt, as far as prompts are so long, cut by what iterations have
    left for them, `room` tokens, of which prompts take the share `filled`.

    A prompt that finds a fresh iteration is cut after every `room` tokens; one that begins where others have been, at a
    place anywhere in the room, has its first cut there. The share `filled` of the prompts are of the second kind.
    """
    most = max(1, int(room))
    filled = min(max(filled, 0.0), 1.0)
    full, rest = np.divmod(law.s, most)
    last = min(most, law.max + 1)  # pieces are no longer than prompts, however many tokens there is room for
    fresh = np.bincount(rest.astype(np.intp), weights=law.p, minlength=last + 1)
    fresh[0], fresh[last] = 0.0, fresh[last] + full @ law.p
    pieces: Array = (1 - filled) * fresh + filled * _begun_anywhere(law, most)
    return pieces


def _law_of(pieces: Array) -> LengthDistribution:
    """The law of one piece's tokens."""
    lengths = np.flatnonzero(pieces > 1e-15)
    p = pieces[lengths] / pieces.sum()
    return LengthDistribution(tuple(lengths.tolist()), tuple(p.tolist()))


def _begun_anywhere(law: LengthDistribution, room: int) -> Array:
    """[up to room + 1]: pieces of each length per prompt, where the first cut lies anywhere in the room alike."""
    last = min(room, law.max + 1)
    own = np.zeros(law.max + 3)
    own[law.s.astype(np.intp)] = law.p
    longer = np.cumsum(own[::-1])[::-1]  # P(S ≥ k)
    k = np.arange(1, last)
    weights = np.zeros(last + 1)
    weights[1:last] = 2 / room * longer[k + 1] + own[k] * (room - k + 1) / room
    weights[last] = float(np.maximum(law.s - room + 1, 0.0) @ law.p) / room
    return weights


def outcome(scenario: Scenario, max_num_seqs: int, max_num_batched_tokens: int) -> Outcome:
    """Queries enter at the rate λ that slots (R / (E[D] + iterations of a prompt)) and budget (tokens a query needs in
    all) both allow; iterations with and without prompts are told apart.
    """
    need, p = scenario.iterations
    iterations = float(need @ p)
    law = scenario.workload.input
    budget = float(max_num_batched_tokens)
    rate = min(max_num_seqs / (iterations + 1.0), budget / (law.mean + iterations))
    pieces, count = np.zeros(0), 1.0
    for _ in range(_ROUNDS):  # pieces depend on what decoding leaves of the budget, which depends on the rate
        room = max(budget - rate * iterations, 1.0)
        pieces = pieces_of(law, room, rate * law.mean / room)
        before, count = count, float(pieces.sum())
        if count == before:
            break
        rate = min(max_num_seqs / (iterations + count), budget / (law.mean + iterations))
    decoding = rate * iterations
    room = max(budget - decoding, 1.0)
    idle = max(0.0, min(math.exp(-rate * count), 1.0 - rate * law.mean / room))
    share = 1.0 - idle
    mixture = Mixture(
        weight=np.array([idle, share]),
        prompts=np.array([0.0, rate * count / share]),
        decoding=np.array([decoding, decoding]),
        piece=_law_of(pieces),
        prefill_iterations=count,
        most_tokens=room,
    )
    return from_iterations(scenario, mixture, rate, max_num_seqs)
