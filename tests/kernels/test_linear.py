"""The packed product and the plain one against F.linear."""

import pytest
import torch
import torch.nn.functional as F

from exegpt.kernels import linear
from exegpt.kernels.linear import PackedLinear, can_pack, can_tile


@pytest.mark.parametrize("way", ["packed", "tiled", "plain"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 1), (3, 17, 5), (64, 96, 64), (130, 33, 257)])
@pytest.mark.parametrize("bias", [True, False])
def test_product(monkeypatch, way, rows, outputs, inputs, bias):
    monkeypatch.setattr(linear, "can_tile", lambda dtype: way == "tiled")
    pack = way != "plain"
    g = torch.Generator().manual_seed(0)
    x, w, r = (torch.randn(*shape, generator=g) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    b = torch.randn(outputs, generator=g) if bias else None
    expected = F.linear(x, w, b)
    close = {"atol": 1e-4, "rtol": 1e-5}
    torch.testing.assert_close(PackedLinear(w, b, pack=pack)(x), expected, **close)
    torch.testing.assert_close(PackedLinear(w, b, pack=pack)(x, residual=r.clone()), expected + r, **close)
    gelu = PackedLinear(w, b, "gelu_tanh", pack=pack)(x)
    torch.testing.assert_close(gelu, F.gelu(expected, approximate="tanh"), **close)


@pytest.mark.parametrize("bias", [True, False])
def test_the_plain_product_adds_to_the_residual_in_place(bias):
    """Elsewhere a GPU would copy it first, by a launch of its own."""
    x, w, r = torch.randn(4, 8), torch.randn(6, 8), torch.randn(4, 6)
    y = PackedLinear(w, torch.randn(6) if bias else None, pack=False)(x, residual=r)
    assert y.data_ptr() == r.data_ptr()


def test_packing_is_chosen_where_it_exists():
    layer = PackedLinear(torch.randn(8, 8))
    assert layer.tiled == can_tile(torch.float32)
    assert layer.packed == (can_pack(torch.float32) and not layer.tiled)
    assert not PackedLinear(torch.randn(8, 8), pack=False).packed
    assert not can_pack(torch.float64)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 1), (3, 17, 5), (13, 96, 64), (130, 33, 257)])
@pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh"])
def test_bfloat16_weights_that_are_widened_in_registers(monkeypatch, rows, outputs, inputs, activation):
    """Sums are float32's, and the result is rounded once, whether this CPU needs that or not."""
    monkeypatch.setattr(linear, "can_tile", lambda dtype: True)
    x, w, b, r = (
        torch.randn(*shape).bfloat16() for shape in ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    )
    for bias in (None, b):
        y = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        layer = PackedLinear(w, bias, activation)
        assert layer.tiled and not layer.packed and layer.weight.dtype == torch.bfloat16
        expected = y.relu() if activation == "relu" else F.gelu(y, approximate="tanh") if activation else y
        got = layer(x)
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-6)
        tail = expected.abs() < 1e-3  # GELU's is rounded in float32
        assert ((got == expected.bfloat16()) | tail).double().mean() > 0.98
        if activation is None:
            assert (layer(x, residual=r.clone()) == (y + r).bfloat16()).double().mean() > 0.98


def test_a_tiled_output_does_not_depend_on_the_other_rows(monkeypatch):
    monkeypatch.setattr(linear, "can_tile", lambda dtype: True)
    layer, x = PackedLinear(torch.randn(50, 70)), torch.randn(13, 70)
    whole = layer(x)
    assert all(torch.equal(layer(x[row : row + 1])[0], whole[row]) for row in range(13))


def test_a_tiled_product_adds_to_its_own_input_and_to_a_residual_with_gaps(monkeypatch):
    monkeypatch.setattr(linear, "can_tile", lambda dtype: True)
    w, x, wide = torch.randn(40, 40), torch.randn(9, 40), torch.randn(9, 80)
    layer, y = PackedLinear(w), F.linear(x, w)
    torch.testing.assert_close(layer(x, residual=wide[:, ::2]), y + wide[:, ::2], atol=1e-4, rtol=1e-5)
    expected = x + y
    torch.testing.assert_close(layer(x, residual=x), expected, atol=1e-4, rtol=1e-5)


def test_widened_weights_that_are_not_finite_reach_their_output_alone(monkeypatch):
    monkeypatch.setattr(linear, "can_tile", lambda dtype: True)
    w = torch.ones(20, 3).bfloat16()
    w[2, 1], w[18, 0] = torch.nan, torch.inf
    got = PackedLinear(w, activation="relu")(torch.ones(2, 3).bfloat16())
    assert got[:, 2].isnan().all() and got[:, 18].isinf().all() and got.isfinite().sum() == 36


def test_bfloat16():
    x, w = torch.randn(5, 64), torch.randn(32, 64)
    y = PackedLinear(w.bfloat16())(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), F.linear(x.bfloat16().float(), w.bfloat16().float()), atol=0.2, rtol=0.02)
