"""Matrix products whose weights stay in 8 or 4 bits: they are dequantised where they are multiplied."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from exegpt.kernels.linear import Activation, PackedLinear, can_gate
from exegpt.kernels.quantized_cpu import pack_codes, quantized_product, to_strips
from exegpt.kernels.quantized_weight import QuantizedWeight, side_by_side
from exegpt.kernels.swiglu import swiglu


class QuantizedLinear:
    """A layer as `PackedLinear`, of a weight in 8 or 4 bits, on the CPU; x is float32 or bfloat16."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None, activation: Activation | None = None):
        weight = weight.with_short_groups()
        self.outputs, self.inputs = weight.shape
        self.bits, self.group_size, self.order = weight.bits, weight.group_size, weight.order
        self.bias, self.activation = bias, activation
        unit = 16 if self.bits == 4 else 1  # the product's unit of codes
        self.codes = pack_codes(weight.codes, self.bits)
        self.scales = to_strips(weight.scales / unit)
        self.zeros = torch.empty(0, 0, 0, dtype=torch.int16)
        if weight.zeros is not None and weight.zeros.any():
            self.zeros = to_strips(weight.zeros * unit)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the codes, scales and zero points."""
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply [rows, inputs] → [rows, outputs], and add `residual` [rows, outputs], as `PackedLinear`."""
        x = x if self.order is None else x[:, self.order]
        packed = self.codes, self.scales, self.zeros, self.outputs, self.bits, self.group_size
        return quantized_product(x, *packed, self.bias, self.activation, residual)


def quantized_product_reference(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply by the dequantised weight, in x's dtype: what `QuantizedLinear` computes without an activation."""
    y = F.linear(x, weight.dequantized().to(x.dtype), bias)
    return y if residual is None else y + residual


class SideBySide:
    """Layers of the same input, whose outputs follow each other: quantised and plain ones, or of unlike groups."""

    def __init__(self, layers: "Sequence[Linear]"):
        self.layers = tuple(layers)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply [rows, inputs] → [rows, outputs], and add `residual` [rows, outputs]."""
        y = torch.cat([layer(x) for layer in self.layers], dim=1)
        return y if residual is None else residual.add_(y)


class GatedLinear:
    """SwiGLU of another layer's outputs, of which the first half gates the second."""

    def __init__(self, layer: "Linear"):
        self.layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [rows, inputs] → [rows, outputs / 2]."""
        return swiglu(self.layer(x))


Linear = PackedLinear | QuantizedLinear | SideBySide


def linear_of(weights: Sequence[torch.Tensor | QuantizedWeight], biases: Sequence[torch.Tensor] = ()) -> Linear:
    """Return one layer with the outputs of all weights; there is a bias for each weight, or none."""
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(plain) == len(weights):
        joined_plain = plain[0] if len(plain) == 1 else torch.cat(plain)  # a tied head shares the embedding's memory
        return PackedLinear(joined_plain, torch.cat(list(biases)) if biases else None)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    joined = side_by_side(quantized) if len(quantized) == len(weights) else None
    if joined is not None:
        return QuantizedLinear(joined, torch.cat(list(biases)) if biases else None)
    return SideBySide([linear_of([w], biases[i : i + 1]) for i, w in enumerate(weights)])


def gated_linear_of(gate: torch.Tensor | QuantizedWeight, up: torch.Tensor | QuantizedWeight) -> Linear | GatedLinear:
    """Return one layer x → silu(x · gateᵀ) · (x · upᵀ); weights are [outputs, inputs]."""
    if isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor) and can_gate(gate):
        return PackedLinear(torch.cat((gate, up)), activation="swiglu")
    return GatedLinear(linear_of((gate, up)))
