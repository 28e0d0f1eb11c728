"""The attention of one concrete iteration: prompts or chunks of different lengths, together with decoding sequences."""

from collections.abc import Sequence

from xcore.specs.profile import LayerTables


def iteration_attention(
    tables: LayerTables, tokens: Sequence[float], past: Sequence[float], decoding: int, context: float
) -> float:
    """Return the seconds of one layer's attention in an iteration.

    Prompt (or chunk) i has `tokens[i]` new tokens and `past[i]` tokens in the cache. `decoding` sequences have a mean
    context of `context` tokens, including the new one.

    If the profile measured prompts and decoding in one kernel, the longest chunk shares it with the decoding sequences.
    Every other chunk adds its time alone. Otherwise every phase has its own kernel. Whole prompts then cost the mean
    over their lengths of a batch of that length; chunks and decoding cost the sum.
    """
    if tables.mixed_attention is None or not tokens:
        decode = tables.decode_attention.at(decoding, context) if decoding else 0.0
        return _prompts(tables, tokens, past) + decode
    at = tables.mixed_attention.at
    chunks = sorted(zip(tokens, past, strict=True))
    beside = at(*chunks.pop(), decoding, context if decoding else 0.0)
    return beside + sum(at(new, cached, 0.0, 0.0) for new, cached in chunks)


def _prompts(tables: LayerTables, tokens: Sequence[float], past: Sequence[float]) -> float:
    """Return the seconds of the prompts' own kernels."""
    uncached = [new for new, cached in zip(tokens, past, strict=True) if cached == 0]
    batch = tables.encode_attention.at
    seconds = sum(batch(len(uncached), new) for new in uncached) / len(uncached) if uncached else 0.0
    chunk = tables.chunk_attention.at
    return seconds + sum(chunk(new, cached) for new, cached in zip(tokens, past, strict=True) if cached > 0)
