"""Attention by FlashInfer: what it is asked, by a stand-in over odd shapes, and by its signatures where it is there."""

import inspect
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernels.check import compare
from exegpt.kernels import attention_flashinfer, gpu_device
from exegpt.kernels.attention import attention, attention_reference
from exegpt.kernels.attention_flashinfer import FlashInfer, pages, why_not
from exegpt.kernels.gpu_device import Architecture
from exegpt.kernels.kv_layout import keys_like_values

from . import flashinfer_stand_in
from .test_attention import paged

NOT_THERE = "FlashInfer is not installed: pip install flashinfer-python."
GPU = torch.device("cuda", 0)


@pytest.fixture
def calls():
    with flashinfer_stand_in.in_its_place() as calls:
        yield calls


def batch(sizes, heads, kv_heads, head_size, block_size, dtype=torch.float32, to="cpu"):
    """`attention`'s arguments for sequences of (new tokens, context); queries lie beside keys and values."""
    news, contexts = zip(*sizes, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_device, "on_gpu", lambda x: False)  # the cache is filled by the CPU's kernel
        q, _, (keys, *others) = paged(news, contexts, heads, kv_heads, head_size, block_size, dtype=dtype)
        keys = keys_like_values(keys).contiguous()
    qkv = torch.randn(len(q), heads + 2 * kv_heads, head_size, dtype=dtype)
    qkv[:, :heads] = q
    return [t.to(to) for t in (qkv, keys, *others)], heads


def both(sizes, heads, *shape, dtype=torch.float32, to="cpu", graph=False, **options):
    """FlashInfer's result and the reference's."""
    (qkv, keys, values, *others), heads = batch(sizes, heads, *shape, dtype, to)
    q, scale, window = qkv[:, :heads], options.get("scale"), options.get("window")
    fixed = (len(sizes), others[0].numel()) if graph else None
    plan = FlashInfer(heads, values, {window}, FlashInfer.new_workspace(values.device), scale=scale, graph=fixed)
    plan.plan(*others)
    got = [attention(q, keys, values, *others, work=plan, **options) for _ in range(2)]
    assert torch.equal(*got)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_device, "on_gpu", lambda x: True)
        return got[0], attention_reference(q.float(), keys, values, *others, **options)


SHAPES = [(8, 2, 64, 16), (3, 3, 80, 16), (20, 1, 24, 8), (4, 2, 12, 3)]
DECODING = ((1, 1), (1, 16), (1, 37))
PROMPTS = ((7, 40), (1, 18), (20, 36))
OPTIONS = [{}, {"window": 1}, {"window": 21, "scale": 0.3}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sizes", [DECODING, ((5, 5), (1, 1), (33, 33)), PROMPTS, ((1, 1),)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_flashinfer_is_planned_for_the_same_attention(calls, sizes, shape, options):
    got, expected = both(sizes, *shape, **options)
    torch.testing.assert_close(got, expected, atol=5e-6, rtol=1e-5)
    assert [method for _, method, _, _ in calls] == ["__init__", "plan", "run", "run"]  # planned once
    kind = "Decode" if len(sizes) == sum(new for new, _ in sizes) else "Prefill"
    assert {name for name, *_ in calls} == {f"Batch{kind}WithPagedKVCacheWrapper"}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_graphs_plan_is_for_the_same_attention(calls, shape, options):
    got, expected = both(DECODING, *shape, graph=True, **options)
    torch.testing.assert_close(got, expected, atol=5e-6, rtol=1e-5)


def test_layers_with_unlike_windows_have_a_plan_each(calls):
    (qkv, keys, values, *others), heads = batch(PROMPTS, *SHAPES[0])
    plan = FlashInfer(heads, values, (None, 5), FlashInfer.new_workspace(values.device)).plan(*others)
    for window in (5, None, 5):
        got = attention(qkv[:, :heads], keys, values, *others, window=window, work=plan)
        expected = attention_reference(qkv[:, :heads], keys, values, *others, window=window)
        torch.testing.assert_close(got, expected, atol=5e-6, rtol=1e-5)


def rolled(array):
    return array.roll(1)


def shortened(indptr):
    """A block of the first sequence counts as the second's."""
    return torch.cat((indptr[:1], indptr[1:-1] - 1, indptr[-1:]))


@pytest.mark.parametrize("sizes", [((1, 40), (1, 18), (1, 36)), PROMPTS])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("indices", rolled),
        ("indices", lambda array: array.flip(0)),
        ("indptr", shortened),
        ("last_page_len", rolled),
        ("last_page_len", lambda array: array % 16 + 1),
    ],
)
def test_a_wrong_array_is_found(calls, monkeypatch, sizes, name, wrong):
    """The stand-in computes with its arguments, so that these tests can fail."""

    def mistaken(*arguments):
        right = pages(*arguments)
        return right._replace(**{name: wrong(getattr(right, name))})

    monkeypatch.setattr(attention_flashinfer, "pages", mistaken)
    got, expected = both(sizes, *SHAPES[0])
    assert (got - expected).abs().max() > 0.01


def test_what_it_was_not_planned_for_is_refused(calls):
    (qkv, keys, values, *others), heads = batch(DECODING, *SHAPES[0])
    plan = FlashInfer(heads, values, {None}, FlashInfer.new_workspace(values.device)).plan(*others)
    bias = torch.zeros(heads, 3)
    for options in ({"causal": False}, {"bias": bias}, {"starts": torch.zeros(3, dtype=torch.int32)}, {"scale": 1.0}):
        with pytest.raises(ValueError, match="FlashInfer's plan is for"):
            attention(qkv[:, :heads], keys, values, *others, work=plan, **options)
    with pytest.raises(KeyError):
        attention(qkv[:, :heads], keys, values, *others, work=plan, window=7)


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=5), st.data())
def test_pages_are_each_sequences_blocks_in_order(blocks, data):
    block_size = data.draw(st.integers(1, 16))
    last = [data.draw(st.integers(1, block_size)) for _ in blocks]
    tables = torch.full((len(blocks), 7), -1, dtype=torch.int32)  # anything may follow a sequence's blocks
    for i, row in enumerate(blocks):
        tables[i, : len(row)] = torch.tensor(row)
    lengths = [(len(row) - 1) * block_size + rest for row, rest in zip(blocks, last, strict=True)]
    result = pages(tables, torch.tensor(lengths, dtype=torch.int32), block_size)
    assert [result.indices[a:b].tolist() for a, b in zip(result.indptr, result.indptr[1:], strict=False)] == blocks
    assert result.last_page_len.tolist() == last and result.indptr[-1] == len(result.indices)
    assert {array.dtype for array in result} == {torch.int32}


def test_why_it_can_not_be_had(monkeypatch):
    monkeypatch.setattr(attention_flashinfer, "architecture", lambda device: Architecture(90, 132, 227 * 1024))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    half, bf16 = torch.float16, torch.bfloat16
    assert [why_not(GPU, dtype, size) for dtype in (half, bf16) for size in (64, 128, 256)] == [None] * 6
    assert "only on GPUs" in why_not(torch.device("cpu"), half, 64)
    assert "not in float32" in why_not(GPU, torch.float32, 64)
    assert "head sizes 64, 128, 256, not 80" in why_not(GPU, half, 80)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "not installed (pip install 'exegpt[gpu-fast]')" in why_not(GPU, half, 64)

    def broken():
        raise RuntimeError("no driver")

    monkeypatch.setattr(attention_flashinfer, "flashinfer", broken)
    assert "can't be imported (no driver)" in why_not(GPU, half, 64)
    monkeypatch.setattr(attention_flashinfer, "architecture", lambda device: Architecture(75, 40, 64 * 1024))
    assert "8.0, and this GPU has 7.5" in why_not(GPU, half, 64)


def test_calls_bind_to_its_own_signatures(calls):
    both(DECODING, *SHAPES[0], window=4)
    both(DECODING, *SHAPES[0], graph=True)
    both(PROMPTS, *SHAPES[0])
    assert len({name for name, *_ in calls}) == 2
    sys.modules.pop("flashinfer")
    real = pytest.importorskip("flashinfer", reason=NOT_THERE, exc_type=ImportError)
    for name, method, count, names in calls:
        wrapper = getattr(real, name)
        bound = inspect.signature(getattr(wrapper, method)).bind(None, *range(count), **dict.fromkeys(names))
        assert "deprecated_positional_args" not in bound.arguments
        if unnamed := bound.arguments.get("kwargs"):  # plan hands them on
            assert set(unnamed) <= set(inspect.signature(wrapper._plan_impl).parameters)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [((1, 1), (1, 16), (1, 1037)), ((5, 5), (1, 1), (133, 133)), ((7, 400), (1, 18))])
@pytest.mark.parametrize("options", [{}, {"window": 21}], ids=str)
def test_it_is_right_on_a_gpu(dtype, sizes, options):
    pytest.importorskip("flashinfer", reason=NOT_THERE, exc_type=ImportError)
    decode = len(sizes) == sum(new for new, _ in sizes)
    for graph in {False, decode}:
        got, expected = both(sizes, 8, 2, 128, 16, dtype=dtype, to="cuda", graph=graph, **options)
        assert compare(got, expected, dtype).passed
