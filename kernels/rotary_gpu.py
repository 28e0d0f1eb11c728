"""RoPE on a GPU; keys and values, if given, go into the paged cache by the same launch."""

import torch
import triton
import triton.language as tl

from exegpt.kernels.kv_write_gpu import cache_rows, store_values


def rotate_gpu(x: torch.Tensor, positions: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Run `rotary.rotate` by Triton."""
    _launch(x, positions, cosines, sines)


def rotate_and_write_gpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Run `rotary.rotate_and_write` by Triton, with keys in the layout of values."""
    _launch(q, positions, cosines, sines, k, v, keys, values, slots)


def _launch(
    q: torch.Tensor,
    positions: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    tokens, heads, head_size = q.shape
    kv_heads = 0 if k is None else k.shape[1]
    block_m = 4 if tokens < 1024 else 16
    _rotate[triton.cdiv(tokens, block_m), heads + kv_heads](
        q=q,
        k=k,
        v=v,
        positions=positions,
        cosines=cosines,
        sines=sines,
        k_cache=keys,
        v_cache=values,
        slots=slots,
        tokens=tokens,
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        k_stride_token=0 if k is None else k.stride(0),
        k_stride_head=0 if k is None else k.stride(1),
        v_stride_token=0 if v is None else v.stride(0),
        v_stride_head=0 if v is None else v.stride(1),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        HEAD_DIM=triton.next_power_of_2(head_size),
        BLOCK_SIZE=1 if values is None else values.shape[2],
        BLOCK_M=block_m,
        num_warps=1 if block_m == 4 else 4,
    )


# A slice of a batch begins anywhere in its positions and slots.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions", "slots"])
def _rotate(
    q,  # [tokens, HEADS, HEAD_SIZE]
    k,  # [tokens, KV_HEADS, HEAD_SIZE], or None
    v,  # [tokens, KV_HEADS, HEAD_SIZE], or None
    positions,  # int64 [tokens]
    cosines,  # float32 [context, HEAD_SIZE / 2]
    sines,  # float32 [context, HEAD_SIZE / 2]
    k_cache,  # [blocks, KV_HEADS, BLOCK_SIZE, HEAD_SIZE], or None
    v_cache,  # [blocks, KV_HEADS, BLOCK_SIZE, HEAD_SIZE], or None
    slots,  # int64 [tokens], or None
    tokens,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # HEAD_SIZE padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # tokens of a program
):
    """Rotate some tokens' q of one head in place, or write their k (rotated) and v of one KV head into the cache."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    real = token < tokens
    token = token.to(tl.int64)
    HALF: tl.constexpr = HEAD_SIZE // 2
    offs_h = tl.arange(0, HEAD_DIM // 2 if HEAD_DIM > 1 else 1)
    half = real[:, None] & (offs_h < HALF)[None, :]
    position = tl.load(positions + token, mask=real, other=0)
    angle = (position * HALF)[:, None] + offs_h[None, :]
    cos = tl.load(cosines + angle, mask=half, other=0.0)
    sin = tl.load(sines + angle, mask=half, other=0.0)
    if head < HEADS:
        q_row = q + token * q_stride_token + head * q_stride_head
        rotate_rows(q_row, q_row, cos, sin, offs_h, half, HALF)
    else:
        if k is not None:
            kv_head = head - HEADS
            row = cache_rows(slots, token, real, kv_head, KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
            offs_d = tl.arange(0, HEAD_DIM)
            mask = real[:, None] & (offs_d < HEAD_SIZE)[None, :]
            whole = store_values(v + token * v_stride_token + kv_head * v_stride_head, v_cache + row, offs_d, mask)
            cos = tl.where(whole[:, None], cos, float("nan"))  # see `kv_write`
            rotate_rows(
                k + token * k_stride_token + kv_head * k_stride_head, k_cache + row, cos, sin, offs_h, half, HALF
            )


@triton.jit
def rotate_rows(
    source,  # pointers [BLOCK_M] to rows of HEAD_SIZE
    target,  # pointers [BLOCK_M]
    cos,  # float32 [BLOCK_M, HEAD_DIM / 2]
    sin,  # float32 [BLOCK_M, HEAD_DIM / 2]
    offs_h,  # [HEAD_DIM / 2]
    mask,  # bool [BLOCK_M, HEAD_DIM / 2]
    HALF: tl.constexpr,
):
    """Copy rows, rotated: dimension d with d + HALF."""
    source, target = source[:, None] + offs_h[None, :], target[:, None] + offs_h[None, :]
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (a * cos - b * sin).to(target.dtype.element_ty), mask=mask)
    tl.store(target + HALF, (b * cos + a * sin).to(target.dtype.element_ty), mask=mask)
