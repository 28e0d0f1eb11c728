"""The gates of feed-forward layers: SwiGLU with SiLU, GEGLU with GELU in its tanh form."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numba import prange

from exegpt.kernels import gpu_device
from exegpt.kernels.bfloat16 import rounded, widened
from exegpt.kernels.exponential import exp
from exegpt.kernels.kernel_dtypes import njit_by_dtype
from exegpt.kernels.numba_threads import compiled

SLOPE, BEND = 2 * math.sqrt(2 / math.pi), 0.044715
"""GELU's tanh form is x · sigmoid(SLOPE · (x + BEND · x³)), SiLU is x · sigmoid(x)."""


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) · up for x [tokens, 2·width], the gates first: [tokens, width]."""
    return _gated(x) if _fast(x) else swiglu_reference(x)


def geglu(x: torch.Tensor) -> torch.Tensor:
    """Compute gelu(gate) · up, GELU in its tanh form, for x [tokens, 2·width], the gates first: [tokens, width]."""
    return _gated(x, SLOPE, BEND) if _fast(x) else geglu_reference(x)


def swiglu_reference(x: torch.Tensor) -> torch.Tensor:
    """Compute `swiglu` in plain PyTorch."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu_reference(x: torch.Tensor) -> torch.Tensor:
    """Compute `geglu` in plain PyTorch."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _fast(x: torch.Tensor) -> bool:
    return gpu_device.on_gpu(x) or compiled(x)


def _gated(x: torch.Tensor, slope: float = 1.0, bend: float = 0.0) -> torch.Tensor:
    if gpu_device.on_gpu(x):
        from exegpt.kernels.swiglu_gpu import gated_gpu

        return gated_gpu(x, slope, bend)
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype)
    _gate(x, slope, bend, out)
    return out


@njit_by_dtype("void(real[:, ::1], float32, float32, real[:, ::1])", fastmath=True)
def _gate(x, slope, bend, out):  # type: ignore[no-untyped-def]
    width = out.shape[1]
    for row in prange(len(out)):
        for i in range(width):
            gate = widened(x[row, i])
            inner = slope * (gate + bend * gate * gate * gate)
            out[row, i] = rounded(gate / (np.float32(1) + exp(-inner)) * widened(x[row, width + i]), out)
