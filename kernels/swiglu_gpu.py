"""SwiGLU and GEGLU on a GPU."""

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


def gated_gpu(x: torch.Tensor, slope: float, bend: float) -> torch.Tensor:
    """g · sigmoid(slope · (g + bend · g³)) · up by Triton, for gates g and up in x [tokens, 2·width]."""
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    _gate[(tokens, triton.cdiv(width, columns))](x, out, slope, bend, width, x.stride(0), COLUMNS=columns, num_warps=4)
    return out


@triton.jit
def _gate(x, out, slope, bend, width, x_row, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = i < width
    gate = tl.load(x + row * x_row + i, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + width + i, mask=there, other=0.0).to(tl.float32)
    inner = slope * (gate + bend * gate * gate * gate)
    result = gate / (1 + tl.exp2(inner * -1.4426950408889634)) * up
    tl.store(out + row * width + i, result.to(out.dtype.element_ty), mask=there)
