"""Matrix products whose weights are packed once for the CPU's vector units."""

import functools
import os
from typing import Literal

import torch
import torch.nn.functional as F

from exegpt.kernels.kernel_dtypes import array_of
from exegpt.kernels.linear_amx import SWIGLU, amx_product, has_amx, to_amx_panels
from exegpt.kernels.linear_cpu import ACTIVATIONS, panel_product, to_panels

# Products are generated for each shape and kept; a model's shapes times the occurring rows are more than the default.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")

Activation = Literal["gelu_tanh", "relu", "swiglu"]

_FUSED = {None: ("none", ""), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}
"""Activation → oneDNN's name for it, and its variant."""

_BATCH_HINT = 16
"""Number of rows that the packing expects; other numbers run as fast."""


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this build of torch has oneDNN's packed product for `dtype` on this CPU."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:  # the capability is also lowered by ATEN_CPU_CAPABILITY, to test one CPU on another
        return bool(ops._is_mkldnn_bf16_supported()) and torch.backends.cpu.get_cpu_capability() != "AVX2"
    return dtype == torch.float32


@functools.cache
def can_tile(dtype: torch.dtype) -> bool:
    """Return whether products with weights of `dtype` run in tiles (`linear_cpu.py`) on this CPU.

    Bfloat16 ones do if they can't be packed. Float32 ones do with AVX2 alone, where that takes 0.54 to 0.92 of oneDNN's
    time for up to 64 rows, and 0.93 to 1.05 for more (`python -m benchmarks.tiles`).
    """
    if dtype == torch.bfloat16:
        return not can_pack(dtype)
    return dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX2"


_MOST_INPUTS = 2048
"""Inputs up to which AMX's tiles are used: with 8,192, 260 rows take 1.5 times as long as with oneDNN."""


def can_use_amx(dtype: torch.dtype, inputs: int) -> bool:
    """Return whether products with weights of `dtype` and so many inputs run in AMX's tiles (`linear_amx.py`)."""
    fits = inputs % 32 == 0 and inputs <= _MOST_INPUTS
    return dtype == torch.bfloat16 and fits and can_pack(dtype) and has_amx()


def can_gate(gate: torch.Tensor) -> bool:
    """Return whether a `PackedLinear` of gates [width, inputs], and as many other outputs, takes `swiglu`."""
    width, inputs = gate.shape
    return gate.device.type == "cpu" and width % 16 == 0 and can_use_amx(gate.dtype, inputs)


class PackedLinear:
    """A layer y = activation(x · Wᵀ + b), or y = x · Wᵀ + b + residual: 2.5 times as fast as `F.linear` in float32.

    `weight` is [outputs, inputs] and is not kept if it is packed; `bias` is [outputs]. `pack=False` uses the plain
    product, as do devices and dtypes without a packed product. `packed` is by oneDNN, `amx` by `linear_amx`, `tiled` by
    `linear_cpu`.

    The activation `swiglu` needs `can_gate`, and excludes a bias. It halves the outputs, of which the first half gates
    the second.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Activation | None = None,
        pack: bool = True,
    ):
        self.outputs, self.inputs = weight.shape
        self.bias = bias
        self.activation = activation
        self.weight_bytes = weight.nbytes
        gates, _ = weight.tensor_split(2)
        if activation == "swiglu" and (bias is not None or not pack or self.outputs % 2 or not can_gate(gates)):
            raise ValueError("This product can't apply SwiGLU: see can_gate.")
        on_cpu = pack and weight.device.type == "cpu"
        self.tiled = on_cpu and can_tile(weight.dtype)
        self.amx = on_cpu and not self.tiled and can_use_amx(weight.dtype, self.inputs)
        self.packed = on_cpu and not self.tiled and not self.amx and can_pack(weight.dtype)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)
        elif self.tiled or self.amx:
            no_bias, gated = torch.empty(0, dtype=weight.dtype), activation == "swiglu"
            weight = to_amx_panels(weight, gated) if self.amx else to_panels(weight)
            self._panels, self._bias = array_of(weight), array_of(no_bias if bias is None else bias)
            self.outputs = self.outputs // 2 if gated else self.outputs
        self.weight = weight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply [rows, inputs] → [rows, outputs], and add `residual` [rows, outputs].

        A residual excludes an activation, and may be overwritten by the sum.
        """
        if self.packed:
            ops = torch.ops.mkldnn
            if residual is not None:
                added: torch.Tensor = ops._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
                return added
            name, algorithm = _FUSED[self.activation]
            y: torch.Tensor = ops._linear_pointwise(x, self.weight, self.bias, name, [], algorithm)
            return y
        if self.tiled or self.amx:
            product = amx_product if self.amx else panel_product
            activation = SWIGLU if self.activation == "swiglu" else ACTIVATIONS[self.activation]
            return product(x, self._panels, self.outputs, self._bias, activation, residual)
        if residual is not None and self.bias is None:
            return residual.addmm_(
                x, self.weight.t()
            )  # one launch; another output tensor would copy the residual first
        y = F.linear(x, self.weight, self.bias)
        if self.activation:
            y = y.relu() if self.activation == "relu" else F.gelu(y, approximate="tanh")
        return y if residual is None else residual.add_(y)
