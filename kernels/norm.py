"""Normalisation of rows: by their root mean square (RMSNorm), or by mean and variance (LayerNorm)."""

import numpy as np
import torch
import torch.nn.functional as F
from numba import prange

from exegpt.kernels import gpu_device
from exegpt.kernels.bfloat16 import rounded, widened
from exegpt.kernels.kernel_dtypes import njit_by_dtype
from exegpt.kernels.numba_threads import compiled


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Normalise rows of x [tokens, hidden] by their root mean square, times weight [hidden]."""
    if gpu_device.on_gpu(x):
        from exegpt.kernels.norm_gpu import norm_gpu

        return norm_gpu(x, weight, None, epsilon, None)
    if not compiled(x):
        return rms_norm_reference(x, weight, epsilon)
    out = torch.empty_like(x)
    _rms_norm(x, weight, epsilon, out)
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute `rms_norm` in plain PyTorch, with sums in float32 for every dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise rows of x [tokens, hidden] to mean 0 and variance 1, times weight, plus bias, both [hidden].

    With `residual` [tokens, hidden], x is first added to it in place, and its rows are normalised.
    """
    if gpu_device.on_gpu(x):
        from exegpt.kernels.norm_gpu import norm_gpu

        return norm_gpu(x, weight, bias, epsilon, residual)
    return layer_norm_reference(x, weight, bias, epsilon, residual)


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `layer_norm` in plain PyTorch, as on the CPU."""
    return F.layer_norm(x if residual is None else residual.add_(x), weight.shape, weight, bias, epsilon)


@njit_by_dtype("void(real[:, ::1], real[::1], float64, real[:, ::1])", fastmath=True)
def _rms_norm(x, weight, epsilon, out):  # type: ignore[no-untyped-def]
    width = x.shape[1]
    for row in prange(len(x)):
        squares = np.float32(0)
        for i in range(width):
            squares += widened(x[row, i]) * widened(x[row, i])
        scale = np.float32(1 / np.sqrt(squares / width + epsilon))
        for i in range(width):
            out[row, i] = rounded(widened(x[row, i]) * scale * widened(weight[i]), out)
