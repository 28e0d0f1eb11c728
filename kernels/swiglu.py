"""The gate of a SwiGLU feed-forward layer."""

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange

from exegpt.kernels.exponential import exp
from exegpt.kernels.threads import compiled


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up for x [tokens, 2·width], the gates first: [tokens, width]."""
    if not compiled(x):
        return swiglu_reference(x)
    out = torch.empty(x.shape[0], x.shape[1] // 2)
    _swiglu(x.numpy(), out.numpy())
    return out


def swiglu_reference(x: torch.Tensor) -> torch.Tensor:
    """`swiglu` in plain PyTorch."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@njit(
    ["void(float32[:, ::1], float32[:, ::1])"],
    parallel=True,
    cache=True,
    fastmath=True,
    error_model="numpy",
)
def _swiglu(x, out):  # type: ignore[no-untyped-def]
    width = out.shape[1]
    for row in prange(len(out)):
        for i in range(width):
            out[row, i] = x[row, i] / (np.float32(1) + exp(-x[row, i])) * x[row, width + i]
