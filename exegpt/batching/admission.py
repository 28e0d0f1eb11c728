"""Admission: how many KV blocks a sequence must find free before it runs."""

from typing import Any

from exegpt.batching.kv_pool import KVPool
from exegpt.batching.sequence import Sequence


def most_cached(input_tokens: Any, max_output: Any, encoder_decoder: bool) -> Any:
    """The most tokens that a request ever has in the cache; ints, or arrays of one shape.

    A request's last token is never cached. An encoder-decoder caches a start token too.
    """
    return input_tokens + max_output - 1 + encoder_decoder


class Reserve:
    """A sequence is admitted when the blocks for all that it may ever cache are free, and holds them to its end: no
    running sequence can meet a full cache.
    """

    def __init__(self, pool: KVPool, encoder_decoder: bool):
        self._pool, self._encoder_decoder = pool, encoder_decoder

    def blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence is given when it is admitted."""
        return self._pool.blocks_for(most_cached(sequence.input_tokens, sequence.max_output, self._encoder_decoder))
