"""The Triton attention kernel against PyTorch's attention with the mask written out."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from exegpt.kernels import attention_prefill_gpu
from exegpt.kernels.attention import attention_reference
from exegpt.kernels.attention_gpu import attention_gpu
from exegpt.kernels.work_list import WorkList, deal

from .gpu import DEVICE, cache_there, needs_triton, there
from .test_attention import paged
from .test_attention_variants import BIAS, masked

pytestmark = needs_triton

CLOSE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
PROMPTS = ((5, 5), (1, 1), (19, 19))
PIECES = ((7, 80), (20, 36))
DECODING = ((1, 1), (1, 137))


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Also few keys are shared by several programs."""
    monkeypatch.setattr(attention_prefill_gpu, "LEAST_KEYS", 1)


def a_work_list(contexts, programs, kv_heads, window=None):
    arrays = deal(np.array(contexts, dtype=np.int32), programs, kv_heads, window)
    return WorkList(*(there(torch.from_numpy(array)) for array in arrays))


def assert_equal(
    sizes, heads, kv_heads, head_size, block_size=16, dtype=torch.float32, splits=None, work=None, **options
):
    news, contexts = zip(*sizes, strict=True)
    q, plain, cache = paged(news, contexts, heads, kv_heads, head_size, block_size, dtype=dtype)
    expected = masked(q.float(), [(k.float(), v.float()) for k, v in plain], news, contexts, **options)
    moved = {k: there(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    q, cache = there(q), cache_there(*cache)
    got = attention_gpu(q, *cache, torch.full_like(q, float("nan")), splits=splits, work=work, **moved)
    torch.testing.assert_close(got.float().cpu(), expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("sizes", [PROMPTS, PIECES, DECODING])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"),
    [(8, 2, 64, 16), (3, 3, 80, 16), (20, 1, 96, 8), (14, 2, 24, 16), (4, 2, 12, 3)],
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


@pytest.mark.slow
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
    assert attention_gpu(there(q[:0]), *cache_there(*cache), there(q[:0])).shape == (0, 4, 16)


def test_a_view_of_the_queries_and_a_place_for_the_result():
    q, _, cache = paged((3, 2), (20, 2), 4, 2, 16, 16)
    expected = attention_reference(q, *cache)
    wide = torch.zeros(5, 7, 16)
    wide[:, 1:5] = q
    out = torch.zeros(9, 4, 16, device=DEVICE)
    attention_gpu(there(wide)[:, 1:5], *cache_there(*cache), out[2:7], splits=2)
    torch.testing.assert_close(out[2:7].cpu(), expected, atol=2e-6, rtol=1e-5)
    assert not out[:2].any() and not out[7:].any()


def test_what_lies_outside_the_context_has_no_influence():
    q, _, cache = paged((1, 3), (17, 25), 4, 2, 16, 16)
    keys, values, tables, _, contexts = cache
    starts = torch.tensor([0, 20], dtype=torch.int32)
    expected = attention_reference(q, *cache, starts=starts)
    for row, context in zip(tables.tolist(), contexts.tolist(), strict=True):
        block, place = row[context // 16], context % 16
        keys[block, :, :, place:] = float("nan")
        values[block, :, place:] = float("nan")
    keys[tables[1, 0]] = float("nan")  # before the first token that is seen
    q, cache = there(q), cache_there(*cache)
    got = attention_gpu(q, *cache, torch.empty_like(q), starts=there(starts))
    torch.testing.assert_close(got.cpu(), expected, atol=2e-6, rtol=1e-5)


def test_scores_far_apart_stay_finite():
    q, _, cache = paged((1, 4), (50, 30), 4, 2, 16, 16)
    expected = attention_reference(q * 300, *cache)
    q, cache = there(q * 300), cache_there(*cache)
    got = attention_gpu(q, *cache, torch.empty_like(q), splits=2)
    torch.testing.assert_close(got.cpu(), expected, atol=2e-4, rtol=1e-4)


UNEVEN = (1, 700, 40, 129, 256)


@pytest.mark.parametrize("programs", [1, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 30))])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"), [(6, 2, 24, 16), (7, 1, 80, 16), (3, 3, 96, 8), (4, 2, 12, 3)]
)
def test_work_lists(programs, heads, kv_heads, head_size, block_size):
    work = a_work_list(UNEVEN, programs, kv_heads)
    assert_equal([(1, context) for context in UNEVEN], heads, kv_heads, head_size, block_size, work=work)
    assert not work.arrived.any()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 140, "scale": 0.3},
        {"bias": BIAS, "causal": False, "scale": 1.0},
        {"bias": BIAS, "window": 12},
        {"starts": torch.tensor([0, 600, 1, 128, 255], dtype=torch.int32)},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_work_lists_of_more_keys_than_are_seen(options, dtype):
    """A list is dealt by one attention's keys; others see fewer, some programs then none."""
    sizes = [(1, context) for context in UNEVEN]
    assert_equal(sizes, 6, 2, 24, work=a_work_list(UNEVEN, 5, 2), dtype=dtype, **options)
    if "window" in options:
        assert_equal(sizes, 6, 2, 24, work=a_work_list(UNEVEN, 5, 2, options["window"]), dtype=dtype, **options)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(1, 12), st.sampled_from([1, 3, 7]))
def test_any_work_list(contexts, programs, group):
    work = a_work_list(contexts, programs, 2)
    assert_equal([(1, context) for context in contexts], 2 * group, 2, 16, work=work)
    assert not work.arrived.any()


def test_every_layer_takes_the_same_work_list():
    """And gives the same, whatever the layer before left in the counts and partial results."""
    q, _, cache = paged((1,) * len(UNEVEN), UNEVEN, 4, 2, 16, 16)
    q, cache, work = there(q), cache_there(*cache), a_work_list(UNEVEN, 6, 2)
    first, second = (attention_gpu(q, *cache, torch.empty_like(q), work=work) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("least_keys", [1, 64, 1 << 20])
def test_splits_of_no_fewer_keys(monkeypatch, least_keys):
    monkeypatch.setattr(attention_prefill_gpu, "LEAST_KEYS", least_keys)
    assert_equal(((3, 3), (9, 200), (2, 70)), 4, 2, 16, splits=4)


@settings(max_examples=4, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), max_size=3), st.lists(st.integers(1, 300), max_size=4)
)
def test_prompts_and_decoding_in_the_sizes_of_a_graph(prompts, decoding):
    """Both kernels on all rows, with sequences without tokens behind, beside each sequence alone."""
    sizes = [(new, new + past) for new, past in prompts] + [(1, context) for context in decoding]
    if not sizes:
        return
    news, contexts = map(list, zip(*sizes, strict=True))
    q, _, (keys, values, tables, offsets, all_contexts) = paged(news, contexts, 4, 2, 16, 16)
    expected = attention_reference(q, keys, values, tables, offsets, all_contexts)
    rows, more, first = len(q) + 5, 3, len(prompts)
    wide = torch.cat([q, torch.full((5, *q.shape[1:]), float("nan"))])
    got = there(torch.zeros(wide.shape))
    for begin, end in ((0, first), (first, len(sizes))):
        table = torch.cat([tables[begin:end], torch.zeros(more, tables.shape[1], dtype=torch.int32)])
        starts = torch.cat([offsets[begin : end + 1], offsets[end].expand(more)])
        lengths = torch.cat([all_contexts[begin:end], torch.zeros(more, dtype=torch.int32)])
        work = a_work_list(lengths.numpy(), 3, 2) if begin == first and end > first else None
        if begin < end:
            arrays = (there(wide), *cache_there(keys, values, table, starts, lengths))
            attention_gpu(*arrays, got, work=work, max_query_len=None if work else rows)
    torch.testing.assert_close(got[: len(q)].cpu(), expected, atol=5e-6, rtol=5e-6)
