"""RMSNorm and LayerNorm on a GPU, with the residual's addition in the same pass."""

import torch
import triton
import triton.language as tl


def norm_gpu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, residual: torch.Tensor | None
) -> torch.Tensor:
    """`norm.layer_norm` where there is a bias, `norm.rms_norm` where there is none, by Triton."""
    tokens, hidden = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = triton.next_power_of_2(hidden)
    _norm[(tokens,)](
        x,
        residual,
        weight,
        bias,
        out,
        epsilon,
        hidden,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        WIDTH=width,
        num_warps=min(16, max(1, width // 512)),
    )
    return out


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    x, residual, weight, bias, out, epsilon, hidden, x_row, residual_row, WIDTH: tl.constexpr
):
    """One row, in registers as a whole."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    there = i < hidden
    line = tl.load(x + row * x_row + i, mask=there, other=0.0).to(tl.float32)
    if residual is not None:
        line += tl.load(residual + row * residual_row + i, mask=there, other=0.0).to(tl.float32)
        rounded = line.to(residual.dtype.element_ty)
        tl.store(residual + row * residual_row + i, rounded, mask=there)
        line = rounded.to(tl.float32)
    if bias is not None:
        line = tl.where(there, line - tl.sum(line, 0) / hidden, 0.0)
    scale = 1 / tl.sqrt_rn(tl.sum(line * line, 0) / hidden + epsilon)
    factor = tl.load(weight + i, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        line = line * scale * factor + tl.load(bias + i, mask=there, other=0.0).to(tl.float32)
    else:  # rounded before it is weighted, as models are trained
        line = (line * scale).to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + row * hidden + i, line.to(out.dtype.element_ty), mask=there)
