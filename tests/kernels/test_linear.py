"""The packed product and the plain one against F.linear."""

import pytest
import torch
import torch.nn.functional as F

from exegpt.kernels.linear import PackedLinear, can_pack


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 1), (3, 17, 5), (64, 96, 64), (130, 33, 257)])
@pytest.mark.parametrize("bias", [True, False])
def test_product(pack, rows, outputs, inputs, bias):
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
    assert PackedLinear(torch.randn(8, 8)).packed == can_pack(torch.float32)
    assert not PackedLinear(torch.randn(8, 8), pack=False).packed
    assert not can_pack(torch.float64)


def test_bfloat16():
    x, w = torch.randn(5, 64), torch.randn(32, 64)
    y = PackedLinear(w.bfloat16())(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), F.linear(x.bfloat16().float(), w.bfloat16().float()), atol=0.2, rtol=0.02)
