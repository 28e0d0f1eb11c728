"""Rotary position embedding (RoPE), in the convention that pairs dimension d with d + head_size/2."""

import numpy as np
import torch
from numba import prange

from exegpt.kernels import gpu_device
from exegpt.kernels.bfloat16 import rounded, widened
from exegpt.kernels.kernel_dtypes import njit_by_dtype
from exegpt.kernels.kv_int8 import store_int8
from exegpt.kernels.kv_write import kv_write, kv_write_reference, store_value
from exegpt.kernels.numba_jit import njit
from exegpt.kernels.numba_threads import compiled


def rotate(x: torch.Tensor, positions: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Rotate x [tokens, heads, head_size] in place, by its tokens' positions, int64 [tokens].

    `cosines` and `sines` are float32 [context, head_size / 2].
    """
    if gpu_device.on_gpu(x):
        from exegpt.kernels.rotary_gpu import rotate_gpu

        rotate_gpu(x, positions, cosines, sines)
        return
    if not compiled(x):
        rotate_reference(x, positions, cosines, sines)
        return
    _rotate(x, positions, cosines, sines)


def rotate_reference(x: torch.Tensor, positions: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Compute `rotate` in plain PyTorch."""
    cos, sin = cosines[positions].unsqueeze(1), sines[positions].unsqueeze(1)
    a, b = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))


def rotate_and_write(
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
    """Rotate q [tokens, heads, head_size] in place; store k rotated and v, [tokens, kv_heads, head_size], in the cache.

    Does the work of `rotate`, for q and k, and of `kv_write` in one kernel, with the same arguments. Afterwards k may
    or may not be rotated.
    """
    if gpu_device.on_gpu(q):
        from exegpt.kernels.rotary_gpu import rotate_and_write_gpu

        rotate_and_write_gpu(q, k, v, positions, cosines, sines, keys, values, slots)
        return
    if not compiled(q):
        rotate_and_write_reference(q, k, v, positions, cosines, sines, keys, values, slots)
        return
    if values.dtype == torch.int8:
        _rotate_and_write_int8(q, k, v, positions, cosines, sines, keys, values, slots)
    elif (qkv := _side_by_side(q, k, v)) is not None:
        _rotate_and_write(qkv, q.shape[1], positions, cosines, sines, keys, values, slots)
    else:
        _rotate(q, positions, cosines, sines)
        _rotate(k, positions, cosines, sines)
        kv_write(k, v, keys, values, slots)


def _side_by_side(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """Return the contiguous tensor whose parts q, k and v are, one beside the other; None if there is none."""
    heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[2]
    strides, item = ((heads + 2 * kv_heads) * size, size, 1), q.element_size()
    places = (0, heads * size * item, (heads + kv_heads) * size * item)
    if any(t.stride() != strides or t.data_ptr() - q.data_ptr() != at for t, at in zip((q, k, v), places, strict=True)):
        return None
    return q.as_strided((len(q), heads + 2 * kv_heads, size), strides)


def rotate_and_write_reference(
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
    """Compute `rotate_and_write` in plain PyTorch."""
    rotate_reference(q, positions, cosines, sines)
    rotate_reference(k, positions, cosines, sines)
    kv_write_reference(k, v, keys, values, slots)


@njit(fastmath=True)
def _rotate_token(x, cos, sin):  # type: ignore[no-untyped-def]
    """Rotate a token's x [heads, head_size] in place."""
    half = x.shape[1] // 2
    for head in range(x.shape[0]):
        for d in range(half):
            a, b = widened(x[head, d]), widened(x[head, half + d])
            x[head, d] = rounded(a * cos[d] - b * sin[d], x)
            x[head, half + d] = rounded(b * cos[d] + a * sin[d], x)


@njit_by_dtype("void(real[:, :, :], int64[::1], float32[:, ::1], float32[:, ::1])", fastmath=True)
def _rotate(x, positions, cosines, sines):  # type: ignore[no-untyped-def]
    for token in prange(x.shape[0]):
        _rotate_token(x[token], cosines[positions[token]], sines[positions[token]])


@njit_by_dtype(
    "void(real[:, :, ::1], int64, int64[::1], float32[:, ::1], float32[:, ::1], real[:, :, :, ::1],"
    " real[:, :, :, ::1], int64[::1])",
    fastmath=True,
)
def _rotate_and_write(qkv, heads, positions, cosines, sines, keys, values, slots):  # type: ignore[no-untyped-def]
    kv_heads, block_size, size = values.shape[1], values.shape[2], values.shape[3]
    for token in prange(len(qkv)):
        cos, sin = cosines[positions[token]], sines[positions[token]]
        block, place = slots[token] // block_size, slots[token] % block_size
        _rotate_token(qkv[token, : heads + kv_heads], cos, sin)
        for head in range(kv_heads):
            key, target = qkv[token, heads + head], keys[block, head]
            if store_value(values[block, head, place], qkv[token, heads + kv_heads + head]):
                for d in range(size):
                    target[d, place] = key[d]
            else:
                target[:, place] = rounded(np.float32(np.nan), keys)


@njit_by_dtype(
    "void(real[:, :, :], real[:, :, :], real[:, :, :], int64[::1], float32[:, ::1], float32[:, ::1],"
    " int8[:, :, :, ::1], int8[:, :, :, ::1], int64[::1])",
    fastmath=True,
)
def _rotate_and_write_int8(q, k, v, positions, cosines, sines, keys, values, slots):  # type: ignore[no-untyped-def]
    for token in prange(q.shape[0]):
        cos, sin = cosines[positions[token]], sines[positions[token]]
        _rotate_token(q[token], cos, sin)
        _rotate_token(k[token], cos, sin)
        store_int8(k[token], v[token], keys, values, slots[token])
