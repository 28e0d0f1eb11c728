"""Products in AMX's tiles: float32 sums of bfloat16, rounded once."""

import pytest
import torch
import torch.nn.functional as F

from exegpt.kernels.linear import PackedLinear, can_gate, can_use_amx
from exegpt.kernels.quantized_linear import GatedLinear, gated_linear_of
from exegpt.kernels.swiglu import swiglu_reference

AMX = pytest.mark.skipif(not can_use_amx(torch.bfloat16, 32), reason="this CPU has no AMX")


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def assert_rounded(got, exact):
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=1e-2)
    small = exact.abs() < 1e-2  # GELU's tail is rounded in float32
    assert ((got == exact.bfloat16()) | small).double().mean() > 0.97


@AMX
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 48, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (70, 96), (96, 1408)])
@pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh"])
def test_product(rows, outputs, inputs, activation):
    x, w, b, r = numbers(rows, inputs), numbers(outputs, inputs), numbers(outputs), numbers(rows, outputs)
    layer = PackedLinear(w, b, activation)
    assert layer.amx and not layer.packed and not layer.tiled
    y = F.linear(x.double(), w.double(), b.double())
    assert_rounded(layer(x), y.relu() if activation == "relu" else F.gelu(y, approximate="tanh") if activation else y)
    if activation is None:
        assert_rounded(PackedLinear(w)(x, residual=r.clone()), x.double() @ w.double().T + r)


@AMX
def test_a_result_beyond_the_caches_and_the_input_as_residual():
    x, w = numbers(300, 256), numbers(2048, 256)
    assert_rounded(PackedLinear(w)(x), x.double() @ w.double().T)
    square = numbers(256, 256)
    layer, y = PackedLinear(square), x.double() @ square.double().T + x
    assert_rounded(layer(x, residual=x), y)


@AMX
def test_an_output_does_not_depend_on_other_rows_or_outputs():
    x, w = numbers(70, 64), numbers(90, 64)
    x[3, 7], w[2, 1] = torch.nan, torch.inf
    whole = PackedLinear(w)(x)
    assert whole[3].isnan().all() and not whole[:, 2].isfinite().any()
    assert whole.isfinite().sum() == 69 * 89
    for rows in (1, 17, 40):
        torch.testing.assert_close(PackedLinear(w)(x[:rows]), whole[:rows], rtol=0, atol=0, equal_nan=True)


@AMX
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (37, 48), (64, 1408)])
def test_gates_in_the_product(rows, width):
    x, gate, up = numbers(rows, 64), numbers(width, 64) * 0.2, numbers(width, 64)
    layer = gated_linear_of(gate, up)
    assert isinstance(layer, PackedLinear) and layer.outputs == width
    assert_rounded(layer(x), swiglu_reference(x.double() @ torch.cat((gate, up)).double().T))


def test_gates_after_a_product():
    x, gate, up = torch.randn(5, 33), torch.randn(7, 33), torch.randn(7, 33)
    assert not can_gate(gate)
    with pytest.raises(ValueError, match="can_gate"):
        PackedLinear(torch.cat((gate, up)), activation="swiglu")
    layer = gated_linear_of(gate, up)
    assert isinstance(layer, GatedLinear)
    torch.testing.assert_close(layer(x), swiglu_reference(x @ torch.cat((gate, up)).T), atol=1e-4, rtol=1e-4)


def test_amx_is_not_used_for_float32_or_odd_or_many_inputs():
    assert not can_use_amx(torch.float32, 32) and not can_use_amx(torch.bfloat16, 33)
    assert not can_use_amx(torch.bfloat16, 4096)
