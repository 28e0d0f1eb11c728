"""Prefix hit: a share of the prompts' tokens that a prefix cache has, where no trace says which prompts begin alike.

All prompts are taken to begin with the same text. A request finds the share of its prompt in it, to the nearest block,
but never its last token. So that text's keys and values are kept once, and its tokens need no prefill.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.policies import TRAITS
from xcore.quantity import percent_text
from xcore.specs.schedule import BLOCK_SIZE
from xcore.specs.workload import LengthDistribution, RequestLengths, Workload
from xcore.traces.prompt_identity import PromptIdentity


def found_tokens(inputs: ArrayLike, share: float) -> Array:
    """Return the tokens of prompts of these lengths that the cache has; the shape of `inputs`."""
    tokens = np.asarray(inputs, dtype=np.float64)
    found: Array = BLOCK_SIZE * np.minimum(np.floor(share * tokens / BLOCK_SIZE + 0.5), (tokens - 1) // BLOCK_SIZE)
    return found


def identified(requests: Iterable[RequestLengths], share: float) -> tuple[RequestLengths, ...]:
    """Return the requests with the identity of the common text."""
    rows = tuple(requests)
    found = found_tokens([row.input for row in rows], share).astype(int).tolist()
    return tuple(
        replace(row, identity=PromptIdentity(prefix="", prefix_tokens=tokens))
        for row, tokens in zip(rows, found, strict=True)
    )


def hit_text(share: float) -> str:
    """Return the sentence that says what a share means."""
    caching = " and ".join(name for name, traits in TRAITS.items() if traits.caches_prefixes)
    return (
        f"prefix hit: {percent_text(share)} of the prompts' tokens, to the nearest {BLOCK_SIZE}, are in the cache, as "
        f"if all prompts began with the same text; only {caching} cache prefixes"
    )


def with_prefix_hit(workload: Workload, share: float) -> Workload:
    """Return the workload with a share of hits; InputError if its trace already says which prompts begin alike."""
    rows = workload.requests
    if workload.prefix_hit == share:
        return workload
    if rows and any(row.identity for row in rows):
        raise InputError(
            f"--prefix-hit {share:g} is for prompts of which nothing is known, but {workload.name} says which prompts "
            "begin with the same tokens: leave --prefix-hit out."
        )
    return replace(workload, prefix_hit=share, requests=identified(rows, share) if rows else None)


@dataclass(frozen=True)
class CachedPrefix:
    """The part of the prompts that the cache has."""

    computed: LengthDistribution
    """The tokens that are left to prefill."""
    mean: float
    """Cached tokens of a prompt on average."""
    blocks: int
    """Blocks of `BLOCK_SIZE` tokens that hold the common text."""

    @staticmethod
    def of(inputs: LengthDistribution, share: float) -> "CachedPrefix":
        """Return the part of prompts with these lengths."""
        found = found_tokens(inputs.s, share)
        left, places = np.unique((inputs.s - found).astype(np.int64), return_inverse=True)
        p = np.bincount(places, weights=inputs.p)
        computed = LengthDistribution(tuple(left.tolist()), tuple((p / p.sum()).tolist()))
        return CachedPrefix(computed, float(found @ inputs.p), int(found.max()) // BLOCK_SIZE)
