"""Products with codes against the dequantised weight in plain PyTorch, and rounding against the nearest code."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.kernels.linear import PackedLinear
from exegpt.kernels.quantized_linear import QuantizedLinear, SideBySide, linear_of, quantized_product_reference
from exegpt.kernels.quantized_weight import QuantizedWeight, rounded_to_nearest, side_by_side

SHAPES = st.tuples(
    st.integers(1, 90), st.integers(1, 300), st.sampled_from((2, 32, 128, 192, 256, 400)), st.sampled_from((8, 4))
)


def drawn(outputs, inputs, group, bits, zeros=True, ordered=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    half, groups = 2 ** (bits - 1), -(-inputs // group)
    codes = torch.randint(-half, half, (outputs, inputs), dtype=torch.int8, generator=g)
    scales = (torch.rand(outputs, groups, generator=g) + 0.1) / half
    offsets = torch.randint(-half, half + 1, (outputs, groups), dtype=torch.int16, generator=g) if zeros else None
    order = torch.randperm(inputs, generator=g) if ordered else None
    return QuantizedWeight(codes, scales, offsets, bits, group, order)


@settings(deadline=None, max_examples=40)
@given(SHAPES, st.integers(1, 120), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_a_product_is_that_with_the_dequantised_weight(shape, rows, zeros, ordered, seed):
    weight, g = drawn(*shape, zeros, ordered, seed), torch.Generator().manual_seed(seed)
    x, r = (torch.randn(rows, n, generator=g) for n in (shape[1], shape[0]))
    bias = torch.randn(shape[0], generator=g)
    expected = quantized_product_reference(x.double(), weight, bias.double())
    layer = QuantizedLinear(weight, bias)
    close = {"rtol": 1e-5, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(layer(x), expected, **close)
    torch.testing.assert_close(layer(x, residual=r.clone()), expected + r, **close)
    gelu = QuantizedLinear(weight, bias, "gelu_tanh")(x)
    torch.testing.assert_close(gelu, F.gelu(expected, approximate="tanh"), **close)
    narrow = layer(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    exact = quantized_product_reference(x.bfloat16().double(), weight, bias.double())
    torch.testing.assert_close(narrow, exact, rtol=2**-8, atol=1e-3, check_dtype=False)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("zeros", [False, True])
def test_an_output_does_not_depend_on_the_other_rows(bits, zeros):
    """So chunked, whole and preempted prompts have the same keys and values, bit by bit."""
    layer, x = QuantizedLinear(drawn(70, 200, 64, bits, zeros)), torch.randn(130, 200)
    whole = layer(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 9, 64, 97):
        assert torch.equal(layer(x[:rows]), whole[:rows])


def test_layers_side_by_side():
    x = torch.randn(5, 96)
    alike = [drawn(10, 96, 32, 4, zeros, seed=i) for i, zeros in enumerate((True, False))]
    unlike = [drawn(10, 96, 64, 4), torch.randn(7, 96), drawn(3, 96, 32, 4, ordered=True)]
    biases = [torch.randn(10), torch.randn(7), torch.randn(3)]
    assert isinstance(linear_of(alike), QuantizedLinear) and isinstance(linear_of(unlike, biases), SideBySide)
    assert isinstance(linear_of(unlike[1:2]), PackedLinear)
    assert side_by_side([alike[0], drawn(10, 96, 32, 4, ordered=True)]) is None
    for weights, bias in ((alike, None), (unlike, torch.cat(biases))):
        full = torch.cat([w if isinstance(w, torch.Tensor) else w.dequantized() for w in weights])
        layer, residual = linear_of(weights, [] if bias is None else biases), torch.randn(5, len(full))
        expected = F.linear(x, full, bias) + residual
        torch.testing.assert_close(layer(x, residual=residual), expected, rtol=1e-5, atol=1e-4)


def test_parts():
    weight = drawn(12, 160, 32, 8)
    full = weight.dequantized()
    assert torch.equal(weight.part(0, 3, 5).dequantized(), full[3:8])
    assert torch.equal(weight.part(1, 64, 80).dequantized(), full[:, 64:144])
    for wrong, start in ((weight, 16), (drawn(12, 160, 32, 8, ordered=True), 64)):
        with pytest.raises(ValueError, match=f"groups of 32 inputs can't be split at input {start}"):
            wrong.part(1, start, 64)


@settings(deadline=None, max_examples=40)
@given(SHAPES, st.integers(0, 2**32))
def test_rounding_chooses_the_nearest_code(shape, seed):
    outputs, inputs, group, bits = shape
    x = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    x[0, : inputs // 2] = 0
    weight = rounded_to_nearest(x, bits, group)
    scales = weight.scales.repeat_interleave(group, 1)[:, :inputs]
    levels = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).float()
    nearest = (x[..., None] - levels * scales[..., None]).abs().amin(-1)
    torch.testing.assert_close((weight.dequantized() - x).abs(), nearest, rtol=0, atol=1e-6)
    assert (weight.dequantized() - x).abs().max() <= 0.502 * weight.scales.max()


def test_a_single_plain_weight_is_not_copied():
    weight = torch.randn(8, 16, dtype=torch.float16)
    assert linear_of([weight]).weight.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("size", [64, 128])
def test_parts_of_the_inputs_are_whole_groups_or_of_one_scale(size):
    weight = rounded_to_nearest(torch.randn(8, 128), 4, size)
    halves = [weight.part(1, start, 64).dequantized() for start in (0, 64)]
    assert torch.equal(torch.cat(halves, 1), weight.dequantized())
    if size == 64:
        with pytest.raises(ValueError, match="can't be split at input 96"):
            weight.part(1, 96, 32)
