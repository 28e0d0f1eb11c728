"""The attention of one concrete iteration: unequal prompts or chunks of them, beside decoding sequences."""

from collections.abc import Sequence

from xcore.specs.profile import LayerTables


def iteration_attention(
    tables: LayerTables, tokens: Sequence[float], past: Sequence[float], decoding: int, context: float
) -> float:
    """Seconds of one layer's attention for prompts, or chunks, of `tokens[i]` tokens each of which has `past[i]` in the
    cache, beside `decoding` sequences with a mean context of `context` tokens, the new one included.

    Where the profile measured prompts and decoding in one kernel, the longest chunk is the one beside the decoding and
    every other adds what it takes alone. Otherwise every phase has its own kernel: whole prompts cost the mean of what
    batches of each length would, chunks and decoding the sum.
    """
    if tables.mixed_attention is None or not tokens:
        decode = tables.decode_attention.at(decoding, context) if decoding else 0.0
        return _prompts(tables, tokens, past) + decode
    at = tables.mixed_attention.at
    chunks = sorted(zip(tokens, past, strict=True))
    beside = at(*chunks.pop(), decoding, context if decoding else 0.0)
    return beside + sum(at(new, cached, 0.0, 0.0) for new, cached in chunks)


def _prompts(tables: LayerTables, tokens: Sequence[float], past: Sequence[float]) -> float:
    """Seconds of the prompts' own kernels."""
    uncached = [new for new, cached in zip(tokens, past, strict=True) if cached == 0]
    batch = tables.encode_attention.at
    seconds = sum(batch(len(uncached), new) for new in uncached) / len(uncached) if uncached else 0.0
    chunk = tables.chunk_attention.at
    return seconds + sum(chunk(new, cached) for new, cached in zip(tokens, past, strict=True) if cached > 0)
