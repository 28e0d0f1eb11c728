"""Logit edits on a GPU: one launch, a program per edited row and block of it."""

import torch
import triton
import triton.language as tl

from exegpt.kernels.logit_edits import LogitEdits

_BLOCK_SIZE = 4096
"""Number of a row's logits that a program edits."""


def edit_rows_gpu(x: torch.Tensor, edits: LogitEdits, block_size: int = _BLOCK_SIZE) -> None:
    """Apply the mask and the penalties to rows of x, float32 [rows, vocab], in place."""
    n_cols = x.shape[1]
    block_size = min(block_size, max(16, triton.next_power_of_2(n_cols)))
    _edit[(edits.rows.shape[0], triton.cdiv(n_cols, block_size))](
        x_ptr=x,
        rows_ptr=edits.rows,
        penalty_ptr=edits.penalty,
        frequency_ptr=edits.frequency,
        presence_ptr=edits.presence,
        slot_ptr=edits.slot,
        mask_ptr=edits.mask,
        allowed_ptr=edits.allowed,
        seen_ptr=edits.seen,
        counts_ptr=edits.counts,
        n_cols=n_cols,
        BLOCK_SIZE=block_size,
        num_warps=min(8, max(1, block_size // 256)),
    )


@triton.jit
def _edit(
    x_ptr,  # float32 [n_rows, n_cols]
    rows_ptr,  # int64 [edited]
    penalty_ptr,  # float32 [edited]
    frequency_ptr,  # float32 [edited]
    presence_ptr,  # float32 [edited]
    slot_ptr,  # int64 [edited]
    mask_ptr,  # int64 [edited]
    allowed_ptr,  # int32 [masks, ceil(n_cols / 32)]
    seen_ptr,  # uint8 [slots, n_cols]
    counts_ptr,  # int32 [slots, n_cols]
    n_cols,  # the vocabulary
    BLOCK_SIZE: tl.constexpr,
):
    """Edit a block of one row."""
    i = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = cols < n_cols
    x_ptr += tl.load(rows_ptr + i) * n_cols
    slot, mask = tl.load(slot_ptr + i), tl.load(mask_ptr + i)
    penalty, frequency, presence = tl.load(penalty_ptr + i), tl.load(frequency_ptr + i), tl.load(presence_ptr + i)
    x = tl.load(x_ptr + cols, mask=inside, other=0.0)
    if mask >= 0:
        words = tl.load(allowed_ptr + mask * tl.cdiv(n_cols, 32) + cols // 32, mask=inside, other=0)
        ruled_out = ((words >> (cols % 32)) & 1 == 0) & (tl.abs(x) < float("inf"))  # NaN stays, so that the row fails
        x = tl.where(ruled_out, float("-inf"), x)
    if penalty != 1:
        seen = tl.load(seen_ptr + slot * n_cols + cols, mask=inside, other=0) != 0
        x = tl.where(seen, tl.where(x < 0, x * penalty, tl.div_rn(x, penalty + tl.zeros_like(x))), x)
    if (frequency != 0) | (presence != 0):
        count = tl.load(counts_ptr + slot * n_cols + cols, mask=inside, other=0)
        x = tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)
    tl.store(x_ptr + cols, x, mask=inside)
