"""Root-mean-square normalisation."""

import numpy as np
import torch
from numba import njit, prange

from exegpt.kernels.threads import compiled


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Rows of x [tokens, hidden] over their root mean square, times weight [hidden]."""
    if not compiled(x):
        return rms_norm_reference(x, weight, epsilon)
    out = torch.empty_like(x)
    _rms_norm(x.numpy(), weight.numpy(), epsilon, out.numpy())
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`rms_norm` in plain PyTorch; sums in float32 whatever the dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


@njit(
    ["void(float32[:, ::1], float32[::1], float64, float32[:, ::1])"],
    parallel=True,
    cache=True,
    fastmath=True,
    error_model="numpy",
)
def _rms_norm(x, weight, epsilon, out):  # type: ignore[no-untyped-def]
    width = x.shape[1]
    for row in prange(len(x)):
        squares = np.float32(0)
        for i in range(width):
            squares += x[row, i] * x[row, i]
        scale = np.float32(1 / np.sqrt(squares / width + epsilon))
        for i in range(width):
            out[row, i] = x[row, i] * scale * weight[i]
