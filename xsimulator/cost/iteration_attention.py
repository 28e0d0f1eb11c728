"""The attention of one concrete iteration: unequal prompts or pieces of them, beside sequences that decode."""

from collections.abc import Sequence

from exegpt.profile import LayerTables


def iteration_attention(
    tables: LayerTables, tokens: Sequence[float], past: Sequence[float], decoding: int, context: float
) -> float:
    """Seconds of one layer's attention for prompts, or pieces, of `tokens[i]` tokens each of which has `past[i]` in the
    cache, beside `decoding` sequences with a mean context of `context` tokens, the new one included.

    Where the profile measured prompts and decoding in one kernel, the longest piece is the one beside the decoding and
    every other adds what it takes alone. Otherwise every phase has its own kernel: whole prompts cost the mean of what
    batches of each length would, pieces and decoding the sum.
    """
    if tables.mixed_attention is None:
        decode = tables.decode_attention.at(decoding, context) if decoding else 0.0
        return _prompts(tables, tokens, past) + decode
    at = tables.mixed_attention.at
    if not tokens:
        return at(0.0, 0.0, decoding, context) if decoding else 0.0
    pieces = sorted(zip(tokens, past, strict=True))
    beside = at(*pieces.pop(), decoding, context if decoding else 0.0)
    return beside + sum(at(new, cached, 0.0, 0.0) for new, cached in pieces)


def _prompts(tables: LayerTables, tokens: Sequence[float], past: Sequence[float]) -> float:
    """Seconds of the prompts' own kernels."""
    whole = [new for new, cached in zip(tokens, past, strict=True) if cached == 0]
    batch = tables.encode_attention.at
    seconds = sum(batch(len(whole), new) for new in whole) / len(whole) if whole else 0.0
    piece = tables.chunk_attention.at
    return seconds + sum(piece(new, cached) for new, cached in zip(tokens, past, strict=True) if cached > 0)
