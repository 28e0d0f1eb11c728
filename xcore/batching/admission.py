"""Admission: the KV blocks that must be free before a sequence runs, and when it gets more.

*reserve*: blocks for all tokens that it may ever cache, so that no running sequence can meet a full cache. *grow*:
blocks for the tokens so far. Blocks are added with the tokens; if none are left, the newest resident is preempted, as
in vLLM.
"""

from collections.abc import Sequence as Items
from typing import Literal, TypeVar

from xcore.arrays import Array, Integers
from xcore.batching.kv_pool import KVPool
from xcore.batching.sequence import Sequence
from xcore.batching.step import ENDLESS

Admission = Literal["reserve", "grow"]
Tokens = TypeVar("Tokens", int, Array, Integers)


def most_cached(input_tokens: Tokens, max_output: Tokens, encoder_decoder: bool) -> Tokens:
    """Return the most tokens that a request ever has in the cache; ints, or arrays of one shape.

    A request's last token is never cached. An encoder-decoder caches a start token too.
    """
    return input_tokens + max_output - 1 + encoder_decoder


class Reserve:
    """Reserves blocks for all tokens that a sequence may ever cache, from its admission to its end."""

    grows = False

    def __init__(self, pool: KVPool, encoder_decoder: bool, drafted: int = 0):
        self._pool, self._encoder_decoder, self._drafted = pool, encoder_decoder, drafted

    def blocks(self, sequence: Sequence) -> int:
        """Return the blocks that must be free when a sequence is admitted."""
        tokens = most_cached(sequence.input_tokens, sequence.max_output, self._encoder_decoder)
        return self._pool.blocks_for(tokens + self._drafted)

    def first_blocks(self, sequence: Sequence, prefilled: int) -> int:
        """Return the blocks that a sequence gets at admission: all of them."""
        return self.blocks(sequence)


class Grow:
    """Allocates the blocks for the known tokens.

    Known tokens are the prompt, the generated tokens of a preempted sequence, and an encoder-decoder's start token.
    """

    grows = True

    def __init__(self, pool: KVPool, encoder_decoder: bool, drafted: int = 0):
        self._pool, self._encoder_decoder = pool, encoder_decoder

    def blocks(self, sequence: Sequence) -> int:
        """Return the blocks that must be free when a sequence is admitted."""
        return self._pool.blocks_for(self._known(sequence))

    def first_blocks(self, sequence: Sequence, prefilled: int) -> int:
        """Return the blocks that a sequence gets at admission: for its cached tokens and those prefilled first."""
        return self._pool.blocks_for(sequence.cached + prefilled)

    def _known(self, sequence: Sequence) -> int:
        return sequence.known + self._encoder_decoder


ADMISSIONS: dict[Admission, type[Reserve | Grow]] = {"reserve": Reserve, "grow": Grow}
"""The admission rules by their names in options and schedules."""


def iterations_until_shortage(pool: KVPool, sequences: Items[Sequence], most: int = ENDLESS, drafted: int = 0) -> int:
    """Return how many decode iterations in a row the free blocks suffice for: 1 to `most`.

    The sequences have their blocks for the first iteration already. Finished rows of a static batch need no more
    blocks. Each sequence needs blocks for `drafted` draft tokens too.
    """
    available = pool.available
    if len(sequences) * pool.blocks_for(min(most * (1 + drafted) + drafted, pool.total * pool.block_size)) <= available:
        return most  # enough even if each needed as many new blocks as an empty sequence
    unfinished = [sequence for sequence in sequences if not sequence.finished]
    blocks = sum(len(sequence.blocks) for sequence in sequences if not sequence.finished) + available
    low, high = 1, min(most, 1 + pool.block_size * (1 + available))
    while low < high:  # the blocks that k iterations need rise with k
        middle = (low + high + 1) // 2
        if sum([pool.blocks_for(s.cached + s.needed(middle) + drafted) for s in unfinished]) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low
