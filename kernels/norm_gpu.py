"""RMSNorm and LayerNorm on a GPU, with the residual's addition in the same pass."""

import torch
import triton
import triton.language as tl


def norm_gpu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, residual: torch.Tensor | None
) -> torch.Tensor:
    """Compute `norm.layer_norm` if there is a bias, else `norm.rms_norm`, by Triton."""
    n_rows, n_cols = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_size = triton.next_power_of_2(n_cols)
    _norm[(n_rows,)](
        x_ptr=x,
        residual_ptr=residual,
        weight_ptr=weight,
        bias_ptr=bias,
        out_ptr=out,
        eps=epsilon,
        n_cols=n_cols,
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        BLOCK_SIZE=block_size,
        num_warps=min(16, max(1, block_size // 512)),
    )
    return out


@triton.jit
def _norm(
    x_ptr,  # [n_rows, n_cols]
    residual_ptr,  # [n_rows, n_cols], or None; x is added to it in place
    weight_ptr,  # [n_cols]
    bias_ptr,  # [n_cols] of LayerNorm; None for RMSNorm
    out_ptr,  # [n_rows, n_cols], contiguous
    eps,
    n_cols,
    x_stride,  # elements from one row to the next
    residual_stride,
    BLOCK_SIZE: tl.constexpr,  # at least n_cols
):
    """Normalise one row, which is in registers as a whole."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_ptr += row * residual_stride
        x += tl.load(residual_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if bias_ptr is not None:
        x = tl.where(mask, x - tl.sum(x, 0) / n_cols, 0.0)
    x_hat = x * (1 / tl.sqrt_rn(tl.sum(x * x, 0) / n_cols + eps))
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y = x_hat * weight + tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    else:  # rounded before the weight is applied, as in training
        y = x_hat.to(out_ptr.dtype.element_ty).to(tl.float32) * weight
    tl.store(out_ptr + row * n_cols + cols, y.to(out_ptr.dtype.element_ty), mask=mask)
