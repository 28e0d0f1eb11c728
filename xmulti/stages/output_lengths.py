"""Output lengths by sampling: l = min(X, cap, context - prompt).

X is from the model's distribution of output lengths.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

from xcore.errors import InputError
from xcore.specs.workload import LengthDistribution

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


def quantiles(count: int, seed: int, name: str, shared: bool = False) -> Array:
    """Return uniform random numbers [count], from a separate stream for each name.

    `shared`: one stream for all names, as in SamuLLM's code.
    """
    stream = [seed] if shared else [seed, zlib.crc32(name.encode())]
    return np.random.default_rng(stream).random(count)


def lengths_at(outputs: LengthDistribution, at: Array) -> Integers:
    """Return the lengths at these quantiles, before any cap."""
    cumulative = np.cumsum(outputs.p)
    index = np.minimum(np.searchsorted(cumulative / cumulative[-1], at, side="right"), len(outputs.lengths) - 1)
    return np.asarray(outputs.lengths, dtype=np.int64)[index]


def capped(lengths: Integers, prompts: Integers, context: int, cap: int | None = None) -> Integers:
    """Return output lengths limited by the cap and the context.

    Raises:
        InputError: A prompt leaves no room for one token.
    """
    room = context - prompts
    if len(room) and int(room.min()) < 1:
        raise InputError(f"A prompt of {int(prompts.max()):,} tokens fills the context of {context:,}: shorten it.")
    return np.minimum(np.minimum(lengths, room), lengths if cap is None else cap)


def uncensored(prompts: Integers, outputs: Integers, context: int) -> LengthDistribution:
    """Return the distribution of output lengths from observations, some of which the context has cut short.

    P(n) = outputs that end at n / prompts that leave room for more than n; the remaining probability is on the context
    (SamuLLM). A histogram would count an output that was cut at 100 as one that ends there.
    """
    room = context - prompts
    if not len(prompts) or int(room.min()) < 1 or int(outputs.min()) < 1 or (outputs > room).any():
        raise InputError("Outputs must have at least one token and end within the context.")
    lengths, ended = np.unique(outputs[outputs < room], return_counts=True)
    roomy = np.sort(room)
    weights = ended / (len(room) - np.searchsorted(roomy, lengths, side="right"))
    cumulative = np.minimum(np.cumsum(weights), 1.0)
    weights = np.diff(cumulative, prepend=0.0)
    rest = 1.0 - float(cumulative[-1]) if len(cumulative) else 1.0
    shares = dict(zip(lengths.tolist(), weights.tolist(), strict=True))
    shares[context] = shares.get(context, 0.0) + rest
    kept = {length: share for length, share in shares.items() if share > 0}
    return LengthDistribution(tuple(kept), tuple(kept.values()))
