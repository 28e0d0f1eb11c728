"""Writing new keys and values into the paged cache on a GPU: a token's key and value are a row of its block each."""

import torch
import triton
import triton.language as tl


def kv_write_gpu(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Run `kv_write.kv_write` by Triton, with keys in the layout of values."""
    tokens, kv_heads, head_size = k.shape
    block_m = 4 if tokens < 1024 else 16
    _write[triton.cdiv(tokens, block_m), kv_heads](
        k=k,
        v=v,
        k_cache=keys,
        v_cache=values,
        slots=slots,
        tokens=tokens,
        k_stride_token=k.stride(0),
        k_stride_head=k.stride(1),
        v_stride_token=v.stride(0),
        v_stride_head=v.stride(1),
        HEAD_SIZE=head_size,
        HEAD_DIM=triton.next_power_of_2(head_size),
        BLOCK_SIZE=values.shape[2],
        BLOCK_M=block_m,
        num_warps=1 if block_m == 4 else 4,
    )


# A slice of a batch begins anywhere in its slots.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _write(
    k,  # [tokens, kv_heads, HEAD_SIZE]
    v,  # [tokens, kv_heads, HEAD_SIZE]
    k_cache,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_SIZE]
    v_cache,  # [blocks, kv_heads, BLOCK_SIZE, HEAD_SIZE]
    slots,  # int64 [tokens]
    tokens,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    HEAD_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # HEAD_SIZE padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # tokens of a program
):
    """Write some tokens' keys and values of one KV head."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    offs_d = tl.arange(0, HEAD_DIM)
    real = token < tokens
    mask = real[:, None] & (offs_d < HEAD_SIZE)[None, :]
    row = cache_rows(slots, token, real, kv_head, kv_heads, HEAD_SIZE, BLOCK_SIZE)
    token = token.to(tl.int64)
    whole = store_values(v + token * v_stride_token + kv_head * v_stride_head, v_cache + row, offs_d, mask)
    key = tl.load((k + token * k_stride_token + kv_head * k_stride_head)[:, None] + offs_d[None, :], mask=mask, other=0)
    key = tl.where(whole[:, None], key.to(tl.float32), float("nan"))
    tl.store((k_cache + row)[:, None] + offs_d[None, :], key.to(k_cache.dtype.element_ty), mask=mask)


@triton.jit
def cache_rows(
    slots,  # int64 [tokens]
    token,  # [BLOCK_M]
    real,  # bool [BLOCK_M]: tokens that there are
    kv_head,
    kv_heads,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return where the tokens' rows of one KV head begin in a cache: int64 [BLOCK_M]."""
    slot = tl.load(slots + token, mask=real, other=0)
    return ((slot // BLOCK_SIZE * kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_SIZE


@triton.jit
def store_values(source, target, offs_d, mask):
    """Copy values from the pointers `source` [BLOCK_M] to `target` [BLOCK_M], columns `offs_d` [HEAD_SIZE].

    Values that are not finite are stored as zeros. Returns which values are finite: bool [BLOCK_M].
    """
    row = tl.load(source[:, None] + offs_d[None, :], mask=mask, other=0.0).to(target.dtype.element_ty)
    whole = tl.min((tl.abs(row.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0
    tl.store(target[:, None] + offs_d[None, :], tl.where(whole[:, None], row, 0.0), mask=mask)
    return whole
