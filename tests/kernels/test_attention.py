"""Paged attention against its plain reference, and that against PyTorch's own attention, over odd shapes."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.kernels.attention import attention, attention_reference
from exegpt.kernels.kv_layout import key_shape
from exegpt.kernels.kv_write import kv_write, kv_write_reference


def paged(news, contexts, heads, kv_heads, head_size, block_size, seed=0, dtype=torch.float32):
    """Queries, plain keys and values of every sequence, and the paged cache that holds them in shuffled blocks."""
    g = torch.Generator().manual_seed(seed)
    blocks = [-(-c // block_size) for c in contexts]
    order = torch.randperm(sum(blocks) + 2, generator=g).tolist()
    values = torch.zeros(len(order), kv_heads, block_size, head_size, dtype=dtype)
    keys = torch.zeros(key_shape(values), dtype=dtype)
    tables = torch.zeros(len(contexts), max(blocks), dtype=torch.int32)
    plain = []
    for i, context in enumerate(contexts):
        table = [order.pop() for _ in range(blocks[i])]
        tables[i, : len(table)] = torch.tensor(table)
        k, v = (torch.randn(context, kv_heads, head_size, generator=g).to(dtype) for _ in range(2))
        slots = torch.tensor([table[t // block_size] * block_size + t % block_size for t in range(context)])
        kv_write(k, v, keys, values, slots)
        plain.append((k, v))
    q = torch.randn(sum(news), heads, head_size, generator=g).to(dtype)
    offsets = torch.tensor([0, *news], dtype=torch.int32).cumsum(0).int()
    return q, plain, (keys, values, tables, offsets, torch.tensor(contexts, dtype=torch.int32))


def expected(q, plain, news, contexts):
    """PyTorch's attention with an explicit mask, sequence by sequence."""
    out, begin = [], 0
    for (k, v), new, context in zip(plain, news, contexts, strict=True):
        mask = torch.ones(new, context, dtype=torch.bool).tril(context - new)
        queries = q[begin : begin + new].transpose(0, 1)
        group = q.shape[1] // k.shape[1]
        k, v = (t.transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))
        out.append(F.scaled_dot_product_attention(queries[None], k[None], v[None], attn_mask=mask)[0].transpose(0, 1))
        begin += new
    return torch.cat(out)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"),
    [
        (8, 4, 64, 16),
        (6, 6, 8, 16),
        (8, 1, 24, 8),
        (4, 2, 12, 3),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((3, 1, 128, 16), (16, 1, 40, 16))),
    ],
)
@pytest.mark.parametrize(
    ("news", "contexts"),
    [
        ((1, 1, 1), (1, 16, 37)),  # decoding
        ((5, 1, 33, 16), (5, 1, 33, 16)),  # whole prompts
        ((7, 1, 20), (40, 18, 36)),  # chunks of prompts, and a decoding token among them
    ],
)
def test_kernel_and_reference_are_attention(heads, kv_heads, head_size, block_size, news, contexts):
    q, plain, cache = paged(news, contexts, heads, kv_heads, head_size, block_size)
    reference = expected(q, plain, news, contexts)
    torch.testing.assert_close(attention_reference(q, *cache), reference, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(attention(q, *cache), reference, atol=2e-6, rtol=1e-5)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=5),
    st.integers(0, 1000),
)
def test_any_ragged_batch(sizes, seed):
    news, contexts = [new for new, _ in sizes], [new + past for new, past in sizes]
    q, plain, cache = paged(news, contexts, 4, 2, 16, 16, seed)
    torch.testing.assert_close(attention(q, *cache), expected(q, plain, news, contexts), atol=2e-6, rtol=1e-5)


def test_scores_far_apart_stay_finite():
    q, plain, cache = paged((1, 4), (50, 30), 4, 2, 16, 16)
    torch.testing.assert_close(
        attention(q * 300, *cache), expected(q * 300, plain, (1, 4), (50, 30)), atol=2e-4, rtol=1e-4
    )


def test_a_view_of_the_queries_and_a_place_for_the_result():
    q, plain, cache = paged((3, 2), (20, 2), 4, 2, 16, 16)
    wide = torch.zeros(5, 7, 16)
    wide[:, 1:5] = q
    out = torch.zeros(9, 4, 16)
    attention(wide[:, 1:5], *cache, out[2:7])
    torch.testing.assert_close(out[2:7], expected(q, plain, (3, 2), (20, 2)), atol=2e-6, rtol=1e-5)
    assert not out[:2].any() and not out[7:].any()


def test_what_lies_behind_the_context_is_never_read():
    q, _, cache = paged((1, 3), (17, 5), 4, 2, 16, 16)
    reference = attention(q, *cache)
    keys, values, tables, _, contexts = cache
    for row, context in zip(tables.tolist(), contexts.tolist(), strict=True):
        block, place = row[context // 16], context % 16
        keys[block, :, :, place:] = 1e9
        values[block, :, place:] = 1e9
    torch.testing.assert_close(attention(q, *cache), reference, atol=0, rtol=0)


@pytest.mark.parametrize(("tokens", "heads", "head_size", "block_size"), [(1, 1, 8, 16), (37, 3, 24, 16), (9, 2, 5, 4)])
def test_kv_write_against_its_reference(tokens, heads, head_size, block_size):
    g = torch.Generator().manual_seed(1)
    both = torch.randn(tokens, 2 * heads, head_size, generator=g)
    slots = torch.randperm(12 * block_size, generator=g)[:tokens]
    empty = torch.zeros(12, heads, head_size, block_size), torch.zeros(12, heads, block_size, head_size)
    mine, plain = ([t.clone() for t in empty] for _ in range(2))
    kv_write(both[:, :heads], both[:, heads:], *mine, slots)
    kv_write_reference(both[:, :heads], both[:, heads:], *plain, slots)
    assert torch.equal(mine[0], plain[0]) and torch.equal(mine[1], plain[1])
    assert mine[0].count_nonzero() == mine[1].count_nonzero() == tokens * heads * head_size


@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=9),
    st.integers(1, 8),
    st.integers(1, 7),
    st.sampled_from([5, 10**9]),
    st.booleans(),
)
def test_shares_of_the_work_are_whole_and_about_even(contexts, heads, shares, window, decode):
    from exegpt.kernels.attention_cpu import _bounds

    tiles = np.array([[i, i, 1, context] for i, context in enumerate(contexts)])
    bounds = _bounds.py_func(tiles, heads, window, decode, shares)
    assert bounds[0] == 0 and bounds[-1] == heads * len(contexts) and (np.diff(bounds) >= 0).all()
    if decode:
        keys = np.repeat(np.minimum(tiles[:, 3], window), heads)
        parts = [keys[a:b].sum() for a, b in itertools.pairwise(bounds)]
        assert max(parts) <= keys.sum() / shares + keys.max()
