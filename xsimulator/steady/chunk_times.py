"""The seconds of prompts prefilled in chunks, by the prompts' lengths and the other prompts in the same iterations."""

from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array, Flags
from xsimulator.steady.iterations import Encoded, Own, seconds_of
from xsimulator.steady.scenario import Scenario

_PLACES, _COUNTED = 6, 10
"""Number of places in an iteration where a prompt may begin; most earlier prompts that are counted."""


@dataclass(frozen=True)
class IterationTimes:
    """The iterations in which a prompt is prefilled, as they are in the steady state."""

    scenario: Scenario
    room: float
    """Prompt tokens that each iteration takes."""
    prompts: float
    """New prompts per iteration."""
    others: float
    """New prompts per iteration without the sequence's own."""
    decoding: float
    """Sequences decoded in each iteration."""

    def seconds(self, length: Array, own: Array, before: Array, behind: Array) -> Array:
        """Return the seconds of iterations with `own` tokens of a prompt of this length.

        The iteration has `before` tokens of other prompts before it. `behind` prompts after it take the tokens that are
        left.
        """
        inputs = self.scenario.load.prompts
        free = np.maximum(self.room - own - before, 0.0)
        tokens = own + before + np.minimum(free, behind * inputs.mean)
        chunks = 1.0 + (tokens - own) / inputs.mean
        decoding = np.full_like(tokens, self.decoding)
        return seconds_of(self.scenario, chunks, tokens, decoding, Own(own, length))[..., 0]


@dataclass(frozen=True)
class ChunkTimes:
    """A prompt's chunks, as arrays [lengths, ways to begin]."""

    length: Array
    before: Array
    """Tokens of other prompts before it in its first iteration."""
    first: Array
    """Tokens in its first iteration."""
    whole: Array
    """Number of iterations that it fills."""
    last: Array
    """Tokens in one more iteration; 0: there is none."""

    @staticmethod
    def of(lengths: Array, before: Array, room: float) -> "ChunkTimes":
        """Return the chunks of prompts of `lengths` that begin after `before` tokens of other prompts."""
        length, taken = np.broadcast_arrays(lengths[:, None], before)
        first = np.minimum(length, room - taken)
        whole = np.maximum(np.ceil((length - first) / room - 1e-9) - 1, 0.0)
        return ChunkTimes(length, taken, first, whole, length - first - whole * room)


def chunk_times(iterations: IterationTimes) -> Encoded:
    """Return the seconds of prompts' chunks.

    A prompt begins after other prompts that start in the same iteration (a Poisson number), or after the last chunk of
    an earlier prompt. Later prompts, if any, take the tokens that are left in its last iteration.
    """
    inputs, room = iterations.scenario.load.prompts, iterations.room
    lengths, p = inputs.kinds
    before, share = _begins(iterations, lengths, p)
    chunks = ChunkTimes.of(lengths, before, room)
    ends = chunks.last > 0
    behind = iterations.others * (0.5 + ends * (1 + chunks.whole))
    none = np.exp(-behind)
    some = behind / np.maximum(1 - none, 1e-12)
    begun, alone, followed = _seconds(iterations, chunks, ends, some)
    slope = (begun[-1, 0] - begun[0, 0]) / max(lengths[-1] - lengths[0], 1.0)
    ahead, varies = _variance(iterations, chunks, ends, some)
    return Encoded.of(
        np.hstack([alone, followed]),
        slope * np.sqrt(np.hstack([ahead, ahead + varies])),
        p[:, None] * np.hstack([share * none, share * (1 - none)]),
    )


def _seconds(iterations: IterationTimes, chunks: ChunkTimes, ends: Flags, some: Array) -> tuple[Array, Array, Array]:
    """Return the seconds of a prompt's iterations: all but the last; all, if none follows; all, if `some` follow."""
    nothing, room = np.zeros_like(chunks.length), np.full_like(chunks.length, iterations.room)
    begun = iterations.seconds(chunks.length, chunks.first, chunks.before, nothing)
    if chunks.whole.any():
        begun = begun + chunks.whole * iterations.seconds(chunks.length, room, nothing, nothing)
    rest = np.maximum(chunks.last, 1.0)
    alone = begun + ends * iterations.seconds(chunks.length, rest, nothing, nothing)
    in_last = begun + iterations.seconds(chunks.length, rest, nothing, some)
    return begun, alone, np.where(ends, in_last, iterations.seconds(chunks.length, chunks.first, chunks.before, some))


def _variance(iterations: IterationTimes, chunks: ChunkTimes, ends: Flags, some: Array) -> tuple[Array, Array]:
    """Return the variances of the other prompts' tokens before a prompt and behind it.

    The prompts behind fill no more than the rest of an iteration.
    """
    mean, spread = iterations.scenario.load.prompts.mean, iterations.scenario.load.workload.input.std
    free = iterations.room - np.where(ends, chunks.last, chunks.first + chunks.before)
    filled = np.minimum(free, some * mean)
    varies = np.minimum(some * spread**2 + np.maximum(some - 1, 0.0) * mean**2, filled * (free - filled))
    return chunks.before / mean * spread**2, varies


def _begins(iterations: IterationTimes, lengths: Array, p: Array) -> tuple[Array, Array]:
    """Return the ways in which a prompt may begin: other prompts' tokens before it, and the probability of each."""
    mean, room = iterations.scenario.load.prompts.mean, iterations.room
    ahead, chance = _poisson(iterations.others / 2, mean, room)
    more = np.maximum(np.ceil(lengths / room) - 1, 0.0) * p
    goes_on, busy = min(1.0, iterations.others * float(more.sum())), min(1.0, iterations.prompts * mean / room)
    anywhere = (np.arange(_PLACES) + 0.5) / _PLACES * room
    each = np.repeat([goes_on * (1 - busy) / _PLACES, goes_on * busy / _PLACES], _PLACES)
    return np.concatenate([ahead, _ends(lengths, more, room), anywhere]), np.append(chance * (1 - goes_on), each)


def _ends(lengths: Array, more: Array, room: float) -> Array:
    """Return the tokens in the last iterations of prompts that began in a fresh iteration.

    These are `_PLACES` equally likely values. `more` [lengths] is the number of iterations in which a prompt of each
    length continues.
    """
    last = lengths - np.maximum(np.ceil(lengths / room) - 1, 0.0) * room
    order = np.argsort(last)
    reached = np.cumsum(more[order])
    places = np.searchsorted(reached, (np.arange(_PLACES) + 0.5) / _PLACES * reached[-1])
    ends: Array = np.minimum(last[order][np.minimum(places, len(last) - 1)], room - 1.0)
    return ends


def _poisson(mean: float, tokens: float, room: float) -> tuple[Array, Array]:
    """Return the tokens that prompts of `tokens` tokens take of an iteration, and the probability of each number.

    The last value stands for larger numbers too.
    """
    most = max(1, min(_COUNTED, int(room / tokens)))
    counts = np.arange(most + 1.0)
    chance = np.exp(-mean) * np.cumprod(np.concatenate([[1.0], mean / counts[1:]]))
    chance[-1] += max(0.0, 1.0 - chance.sum())
    return np.minimum(counts * tokens, room - 1.0), chance
