"""Rotary position embedding (RoPE), in the convention that pairs dimension d with d + head_size/2."""

import numpy as np
import torch
from numba import prange

from exegpt.kernels import gpu_device
from exegpt.kernels.bfloat16 import rounded, widened
from exegpt.kernels.kernel_dtypes import njit_by_dtype
from exegpt.kernels.kv_int8 import store_int8
from exegpt.kernels.kv_write import kv_write_reference, store_value
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
    kernel = _rotate_and_write_int8 if values.dtype == torch.int8 else _rotate_and_write
    kernel(q, k, v, positions, cosines, sines, keys, values, slots)


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
    "void(real[:, :, :], real[:, :, :], real[:, :, :], int64[::1], float32[:, ::1], float32[:, ::1],"
    " real[:, :, :, ::1], real[:, :, :, ::1], int64[::1])",
    fastmath=True,
)
def _rotate_and_write(q, k, v, positions, cosines, sines, keys, values, slots):  # type: ignore[no-untyped-def]
    half, block_size = q.shape[2] // 2, values.shape[2]
    for token in prange(q.shape[0]):
        cos, sin = cosines[positions[token]], sines[positions[token]]
        block, place = slots[token] // block_size, slots[token] % block_size
        _rotate_token(q[token], cos, sin)
        for head in range(k.shape[1]):
            if not store_value(values[block, head, place], v[token, head]):
                keys[block, head, :, place] = rounded(np.float32(np.nan), keys)
                continue
            for d in range(half):
                a, b = widened(k[token, head, d]), widened(k[token, head, half + d])
                keys[block, head, d, place] = rounded(a * cos[d] - b * sin[d], keys)
                keys[block, head, half + d, place] = rounded(b * cos[d] + a * sin[d], keys)


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
