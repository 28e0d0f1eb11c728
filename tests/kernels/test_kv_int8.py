"""Keys and values in 8 bits: kernels against their references; what is stored depends on the tokens alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.kernels.attention import attention, attention_reference
from exegpt.kernels.kv_int8 import SCALE_BYTES, codes_and_scales, dequantised
from exegpt.kernels.kv_layout import as_floats, key_shape
from exegpt.kernels.kv_write import kv_write, kv_write_reference
from exegpt.kernels.rotary import rotate, rotate_and_write, rotate_and_write_reference

from .test_attention_variants import masked
from .test_rows import new_tokens


def empty(blocks, kv_heads, head_size, block_size):
    values = torch.zeros(blocks, kv_heads, block_size, head_size + SCALE_BYTES, dtype=torch.int8)
    return torch.zeros(key_shape(values), dtype=torch.int8), values


def stored(cache, slots):
    """The codes and scales at these slots, as bytes [tokens, kv_heads, 2 · (head_size + 4)]."""
    block_size = cache[1].shape[2]
    block, place = slots // block_size, slots % block_size
    parts = [x[block, :, place] for pair in codes_and_scales(*cache) for x in pair]
    return torch.cat([p if p.dtype == torch.int8 else p.unsqueeze(-1).view(torch.int8) for p in parts], dim=-1)


SHAPES = [(1, 1, 8, 16), (37, 3, 24, 16), (9, 2, 4, 5), (20, 4, 64, 8)]


@pytest.mark.parametrize(("tokens", "heads", "head_size", "block_size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_write_against_its_reference(tokens, heads, head_size, block_size, dtype):
    g = torch.Generator().manual_seed(1)
    both = (torch.randn(tokens, 2 * heads, head_size, generator=g) * 10).to(dtype)
    both[0, 0] = 0
    slots = torch.randperm(12 * block_size, generator=g)[:tokens]
    mine, plain = (empty(12, heads, head_size, block_size) for _ in range(2))
    kv_write(both[:, :heads], both[:, heads:], *mine, slots)
    kv_write_reference(both[:, :heads], both[:, heads:], *plain, slots)
    assert torch.equal(mine[0], plain[0]) and torch.equal(mine[1], plain[1])
    for x, (codes, scales) in zip(both.float().split(heads, 1), codes_and_scales(*mine), strict=True):
        at = slots // block_size, slice(None), slots % block_size
        torch.testing.assert_close(scales[at], x.abs().amax(-1) / 127, rtol=1e-6, atol=0)
        error = (dequantised(codes[at], scales[at]) - x).abs()
        assert (error <= scales[at].unsqueeze(-1) * 0.5001).all()  # half a step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_keys_are_stored_as_kv_write_stores_them(dtype):
    qkv, where, slots, _ = new_tokens(37, 4, 2, 24, 16, dtype=dtype)
    alone, rotated = qkv.clone(), qkv.clone()
    mine, plain, other = (empty(6, 2, 24, 16) for _ in range(3))
    rotate_and_write(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], *where, *mine, slots)
    rotate(alone[:, :6], *where)
    kv_write(alone[:, 4:6], alone[:, 6:], *plain, slots)
    assert torch.equal(qkv[:, :4], alone[:, :4])
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
    rotate_and_write_reference(rotated[:, :4], rotated[:, 4:6], rotated[:, 6:], *where, *other, slots)
    for got, expected in zip(as_floats(*mine), as_floats(*other), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0.05)  # a step: rotations differ in their last bit


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_broken_token_is_a_key_of_nan_with_a_value_of_zero(broken, part):
    k, v = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    (k if part == "key" else v)[3, 1, 2] = broken
    mine, plain = empty(2, 2, 8, 4), empty(2, 2, 8, 4)
    for write, cache in ((kv_write, mine), (kv_write_reference, plain)):
        write(k, v, *cache, torch.arange(5))
        (_, key_scales), (value_codes, value_scales) = codes_and_scales(*cache)
        assert key_scales.isnan().nonzero().tolist() == [[0, 1, 3]] and not value_scales.isnan().any()
        assert value_codes[0, 1, 3].any() == (part == "key")
    assert torch.equal(mine[0], plain[0]) and torch.equal(mine[1], plain[1])
    q, tables = torch.randn(2, 2, 8), torch.tensor([[0, 1]], dtype=torch.int32)
    offsets, contexts = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    got = attention(q, *mine, tables, offsets, contexts)
    assert got.isnan().all(-1).tolist() == [[False, False], [False, True]] and not got[0].isnan().any()


SIZES = st.sampled_from([(4, 2, 16, 16), (8, 1, 24, 8), (3, 3, 12, 3)])
RAGGED = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=4)
OPTIONS = st.sampled_from([{}, {"window": 5}, {"causal": False, "scale": 1.0}, {"scale": 0.4}])


@settings(max_examples=40, deadline=None)
@given(RAGGED, SIZES, OPTIONS, st.booleans(), st.integers(0, 1000))
def test_attention_is_that_of_the_dequantised_cache(ragged, sizes, options, decoding, seed):
    heads, kv_heads, head_size, block_size = sizes
    news, contexts = zip(*((1 if decoding else new, new + past) for new, past in ragged), strict=True)
    g = torch.Generator().manual_seed(seed)
    blocks = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(blocks), generator=g).split(blocks)
    cache = empty(sum(blocks), kv_heads, head_size, block_size)
    for tensor in cache:  # what no token has written is garbage: some scales are NaN
        tensor.random_(-128, 128, generator=g)
    tables, plain = torch.zeros(len(contexts), max(blocks), dtype=torch.int32), []
    for row, table, context in zip(tables, order, contexts, strict=True):
        row[: len(table)] = table
        places = torch.arange(context)
        slots = table[places // block_size] * block_size + places % block_size
        kv_write(*(torch.randn(context, kv_heads, head_size, generator=g) for _ in range(2)), *cache, slots)
        kept = as_floats(*cache)
        plain.append(tuple(x[slots // block_size, :, slots % block_size] for x in kept))
    q = torch.randn(sum(news), heads, head_size, generator=g)
    offsets = torch.tensor([0, *news]).cumsum(0).int()
    rest = tables, offsets, torch.tensor(contexts, dtype=torch.int32)
    got = attention(q, *cache, *rest, **options)
    torch.testing.assert_close(got, attention_reference(q, *cache, *rest, **options), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, masked(q, plain, news, contexts, **options), atol=1e-5, rtol=1e-5)


def test_queries_in_bfloat16():
    cache = empty(3, 2, 16, 16)
    kv_write(*(torch.randn(40, 2, 16).bfloat16() for _ in range(2)), *cache, torch.arange(40))
    q, tables = torch.randn(7, 4, 16).bfloat16(), torch.tensor([[0, 1, 2]], dtype=torch.int32)
    rest = tables, torch.tensor([0, 7], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    exact = attention_reference(q.float(), *cache, *rest)
    torch.testing.assert_close(attention(q, *cache, *rest).float(), exact, rtol=2**-8, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 59), max_size=5),
    st.integers(0, 59),
    st.sampled_from([(2, 8, 16), (1, 64, 4), (3, 12, 5)]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_what_is_stored_depends_on_the_tokens_alone(tokens, cuts, prefix, sizes, rotated, seed):
    """Whole, in chunks, again in other blocks after a preemption, and behind another request's prefix: bit by bit."""
    kv_heads, head_size, block_size = sizes
    g = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, 3 * kv_heads, head_size, generator=g)
    angles = torch.outer(torch.arange(60.0), torch.rand(head_size // 2, generator=g))
    cosines, sines = angles.cos(), angles.sin()
    blocks = 60 // block_size + 1

    def slots_of(order):
        places = torch.arange(tokens)
        return order[places // block_size] * block_size + places % block_size

    def write(cache, slots, chunks):
        for begin, end in itertools.pairwise(chunks):
            q, k, v = qkv[begin:end].clone().split(kv_heads, 1)
            if rotated:
                positions = torch.arange(begin, end)
                rotate_and_write(q, k, v, positions, cosines, sines, *cache, slots[begin:end])
            else:
                kv_write(k, v, *cache, slots[begin:end])
        return stored(cache, slots)

    first, second = torch.randperm(2 * blocks, generator=g).split(blocks)
    chunks = sorted({0, tokens, *(cut for cut in cuts if cut < tokens)})
    cache = empty(2 * blocks, kv_heads, head_size, block_size)
    whole = write(cache, slots_of(first), [0, tokens])
    assert torch.equal(write(cache, slots_of(second), chunks), whole)  # recomputed in chunks, in other blocks
    assert torch.equal(write(empty(2 * blocks, kv_heads, head_size, block_size), slots_of(second), chunks), whole)
    kept = min(prefix, tokens) // block_size  # whole blocks of a prefix that another request has computed
    shared = torch.cat([first[:kept], second[kept:]])
    assert torch.equal(write(cache, slots_of(shared), sorted({kept * block_size, tokens})), whole)
    decoded = write(empty(2 * blocks, kv_heads, head_size, block_size), slots_of(first), range(tokens + 1))
    assert torch.equal(decoded, whole)
