"""A Triton kernel that does nothing but read: what it reaches is a GPU's read bandwidth."""

import torch
import triton
import triton.language as tl

_BLOCK_SIZE = 8192


def partial_sums(x: torch.Tensor) -> torch.Tensor:
    """The sums of every 8,192 elements of x, int32 [n], modulo 2^32: int32 [⌈n / 8192⌉]."""
    out = torch.empty(triton.cdiv(len(x), _BLOCK_SIZE), dtype=torch.int32, device=x.device)
    _partial_sum[(len(out),)](x_ptr=x, out_ptr=out, n_elements=len(x), BLOCK_SIZE=_BLOCK_SIZE, num_warps=8)
    return out


@triton.jit
def _partial_sum(
    x_ptr,  # int32 [n_elements]
    out_ptr,  # int32 [programs]
    n_elements,
    BLOCK_SIZE: tl.constexpr,
):
    """The sum of one block."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements, other=0)
    tl.store(out_ptr + block, tl.sum(x, 0))
