"""The Triton attention kernel against PyTorch's attention with the mask written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from exegpt.kernels.attention import attention_reference
from exegpt.kernels.attention_gpu import Tile, attention_gpu, choose_splits, choose_tile, padded

from .gpu import DEVICE, needs_triton, there
from .test_attention import paged
from .test_attention_variants import BIAS, masked

pytestmark = needs_triton

CLOSE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
PROMPTS = ((5, 5), (1, 1), (19, 19))
PIECES = ((7, 80), (20, 36))
DECODING = ((1, 1), (1, 137))


def assert_equal(sizes, heads, kv_heads, head_size, block_size=16, dtype=torch.float32, splits=None, **options):
    news, contexts = zip(*sizes, strict=True)
    q, plain, cache = paged(news, contexts, heads, kv_heads, head_size, block_size, dtype=dtype)
    want = masked(q.float(), [(k.float(), v.float()) for k, v in plain], news, contexts, **options)
    moved = {k: there(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    q, cache = there(q), there(list(cache))
    got = attention_gpu(q, *cache, torch.full_like(q, float("nan")), splits=splits, **moved)
    torch.testing.assert_close(got.float().cpu(), want, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("sizes", [PROMPTS, PIECES, DECODING])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"), [(8, 2, 64, 16), (3, 3, 80, 16), (20, 1, 96, 8), (4, 2, 12, 3)]
)
def test_heads_and_blocks(sizes, heads, kv_heads, head_size, block_size):
    assert_equal(sizes, heads, kv_heads, head_size, block_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [PROMPTS, DECODING])
@pytest.mark.parametrize("head_size", [64, 256])
def test_half_precision(dtype, sizes, head_size):
    assert_equal(sizes, 4, 2, head_size, dtype=dtype)


@pytest.mark.parametrize(("sizes", "splits"), [(PROMPTS, 1), (PIECES, 3), (DECODING, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 21, "scale": 0.3},
        {"causal": False},
        {"bias": BIAS, "causal": False, "scale": 1.0},
        {"bias": BIAS, "window": 12},
    ],
    ids=lambda options: "-".join(options),
)
def test_variants(sizes, splits, options):
    assert_equal(sizes, 6, 2, 24, splits=splits, **options)


@settings(max_examples=5)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 70)),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([1, 3, 20, 40]),
)
def test_any_ragged_batch(rows, window, causal, splits, group):
    sizes = [(new, past + new) for new, past, _ in rows]
    starts = torch.tensor([min(start, past) for _, past, start in rows], dtype=torch.int32)
    assert_equal(sizes, 2 * group, 2, 16, splits=splits, window=window, causal=causal, starts=starts)


def test_more_splits_than_there_are_keys():
    assert_equal(((1, 3), (1, 70)), 4, 1, 16, splits=9)


def test_no_tokens_at_all():
    q, _, cache = paged((1,), (20,), 4, 2, 16, 16)
    cache = (*cache[:2], cache[2][:0], cache[3][:1], cache[4][:0])
    assert attention_gpu(there(q[:0]), *there(list(cache)), there(q[:0])).shape == (0, 4, 16)


def test_a_view_of_the_queries_and_a_place_for_the_result():
    q, _, cache = paged((3, 2), (20, 2), 4, 2, 16, 16)
    want = attention_reference(q, *cache)
    wide = torch.zeros(5, 7, 16)
    wide[:, 1:5] = q
    out = torch.zeros(9, 4, 16, device=DEVICE)
    attention_gpu(there(wide)[:, 1:5], *there(list(cache)), out[2:7], splits=2)
    torch.testing.assert_close(out[2:7].cpu(), want, atol=2e-6, rtol=1e-5)
    assert not out[:2].any() and not out[7:].any()


def test_what_lies_outside_the_context_has_no_influence():
    q, _, cache = paged((1, 3), (17, 25), 4, 2, 16, 16)
    keys, values, tables, _, contexts = cache
    starts = torch.tensor([0, 20], dtype=torch.int32)
    want = attention_reference(q, *cache, starts=starts)
    for row, context in zip(tables.tolist(), contexts.tolist(), strict=True):
        block, place = row[context // 16], context % 16
        keys[block, :, :, place:] = float("nan")
        values[block, :, place:] = float("nan")
    keys[tables[1, 0]] = float("nan")  # before the first token that is seen
    q, cache = there(q), there(list(cache))
    got = attention_gpu(q, *cache, torch.empty_like(q), starts=there(starts))
    torch.testing.assert_close(got.cpu(), want, atol=2e-6, rtol=1e-5)


def test_scores_far_apart_stay_finite():
    q, _, cache = paged((1, 4), (50, 30), 4, 2, 16, 16)
    want = attention_reference(q * 300, *cache)
    q, cache = there(q * 300), there(list(cache))
    got = attention_gpu(q, *cache, torch.empty_like(q), splits=2)
    torch.testing.assert_close(got.cpu(), want, atol=2e-4, rtol=1e-4)


@given(
    st.integers(1, 4096),
    st.integers(1, 64),
    st.integers(1, 71),
    st.integers(1, 256),
    st.sampled_from([2, 4]),
    st.booleans(),
)
def test_tiles_hold_whole_tokens(tokens, sequences, group, head_size, itemsize, biased):
    tokens = max(tokens, sequences)
    tile = choose_tile(tokens, sequences, group, head_size, itemsize, biased, 101_376)
    assert 1 <= tile.queries <= tile.rows // group
    assert tile.rows >= 16 and tile.keys >= 16 and tile.rows & (tile.rows - 1) == 0
    width = padded(head_size)
    if group <= 16:  # what two stages take is within a small GPU's memory
        assert (tile.rows + 4 * tile.keys) * width * itemsize <= 101_376


@given(
    st.integers(1, 10_000),
    st.integers(1, 1_000_000),
    st.sampled_from([16, 128]),
    st.sampled_from([32, 64]),
    st.integers(1, 160),
)
def test_splits_cover_the_keys_and_fill_the_device(programs, most_keys, rows, keys, processors):
    splits, each = choose_splits(programs, most_keys, Tile(rows, 1, keys, 4, 3), processors)
    assert splits >= 1 and each >= 1
    assert (splits - 1) * each * keys < most_keys <= splits * each * keys
    assert splits == 1 or programs * (splits - 1) < 4 * processors
