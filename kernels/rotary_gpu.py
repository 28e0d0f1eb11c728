"""What new tokens need before attention, on a GPU: RoPE, and writing keys and values into the paged cache.

One kernel does both or either. Many tokens are taken 16 at a time and a tile of keys is turned round in registers: the
cache stores keys with the tokens of a block side by side, so that neighbours are written together.
"""

import torch
import triton
import triton.language as tl


def rotate_gpu(x: torch.Tensor, positions: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """`rotary.rotate` by Triton."""
    _launch(x, None, None, positions, cosines, sines, None, None, None)


def kv_write_gpu(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """`kv_write.kv_write` by Triton."""
    _launch(None, k, v, None, None, None, keys, values, slots)


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
    """`rotary.rotate_and_write` by Triton."""
    _launch(q, k, v, positions, cosines, sines, keys, values, slots)


def _launch(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    positions: torch.Tensor | None,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> None:
    some = k if q is None else q
    assert some is not None
    tokens, _, head_size = some.shape
    heads, kv_heads = (0 if x is None else x.shape[1] for x in (q, k))
    together = 4 if tokens < 1024 else 16
    _prepare[(triton.cdiv(tokens, together), heads + kv_heads)](
        q,
        k,
        v,
        positions,
        cosines,
        sines,
        keys,
        values,
        slots,
        tokens,
        *(0 if x is None else x.stride(i) for x in (q, k, v) for i in (0, 1)),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        WIDTH=triton.next_power_of_2(head_size),
        BLOCK_SIZE=1 if values is None else values.shape[2],
        TOKENS=together,
        num_warps=1 if together == 4 else 4,
    )


# Part of a batch begins anywhere in its positions and slots.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions", "slots"])
def _prepare(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    positions,
    cosines,
    sines,
    keys,
    values,
    slots,
    tokens,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Some tokens' q of one head, rotated in place, or their k and v of one KV head, stored."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < tokens
    token = token.to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = HEAD_SIZE // 2
    h = tl.arange(0, WIDTH // 2 if WIDTH > 1 else 1)
    half = real[:, None] & (h < HALF)[None, :]
    if head < HEADS:
        if q is not None:
            at = q + (token * q_token + head * q_head)[:, None] + h[None, :]
            a, b = _rotated(at, half, positions, cosines, sines, token, real, h, HALF)
            tl.store(at, a.to(q.dtype.element_ty), mask=half)
            tl.store(at + HALF, b.to(q.dtype.element_ty), mask=half)
    else:
        if k is not None:
            kv_head = head - HEADS
            d = tl.arange(0, WIDTH)
            whole = real[:, None] & (d < HEAD_SIZE)[None, :]
            slot = tl.load(slots + token, mask=real, other=0)
            start = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * (HEAD_SIZE * BLOCK_SIZE)
            place = slot % BLOCK_SIZE
            k_at = k + (token * k_token + kv_head * k_head)[:, None]
            key_at = keys + (start + place)[None, :]
            if positions is not None:
                a, b = _rotated(k_at + h[None, :], half, positions, cosines, sines, token, real, h, HALF)
                key_at += h[:, None] * BLOCK_SIZE
                tl.store(key_at, tl.trans(a).to(keys.dtype.element_ty), mask=tl.trans(half))
                tl.store(key_at + HALF * BLOCK_SIZE, tl.trans(b).to(keys.dtype.element_ty), mask=tl.trans(half))
            else:
                key = tl.load(k_at + d[None, :], mask=whole, other=0.0).to(tl.float32)
                key_at += d[:, None] * BLOCK_SIZE
                tl.store(key_at, tl.trans(key).to(keys.dtype.element_ty), mask=tl.trans(whole))
            value_at = v + (token * v_token + kv_head * v_head)[:, None] + d[None, :]
            value = tl.load(value_at, mask=whole, other=0.0).to(tl.float32)
            store_at = values + (start + place * HEAD_SIZE)[:, None] + d[None, :]
            tl.store(store_at, value.to(values.dtype.element_ty), mask=whole)


@triton.jit
def _rotated(x, mask, positions, cosines, sines, token, real, h, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves of the heads at the pointers x [tokens, half], rotated, float32."""
    a = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    angle = (tl.load(positions + token, mask=real, other=0) * HALF)[:, None] + h[None, :]
    cos = tl.load(cosines + angle, mask=mask, other=0.0)
    sin = tl.load(sines + angle, mask=mask, other=0.0)
    return a * cos - b * sin, b * cos + a * sin
