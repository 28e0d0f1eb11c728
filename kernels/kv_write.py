"""Writing new keys and values into the paged cache."""

import numpy as np
import torch
from numba import prange

from exegpt.kernels import gpu_device
from exegpt.kernels.bfloat16 import rounded, widened
from exegpt.kernels.kernel_dtypes import njit_by_dtype
from exegpt.kernels.kv_int8 import codes_and_scales, quantised, store_int8
from exegpt.kernels.kv_layout import keys_like_values
from exegpt.kernels.numba_jit import njit
from exegpt.kernels.numba_threads import compiled


def kv_write(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Store k and v, each [tokens, kv_heads, head_size], at their tokens' slots, int64 [tokens].

    Slot s is position s mod block_size of block s // block_size. `values` is [blocks, kv_heads, block_size, head_size];
    `keys` has the shape of `kv_layout.key_shape`.

    A value that is not finite is stored as zeros with a key of NaN. A query that sees it gets NaN. Queries that don't
    see it are not affected, even in the same tile, where zero times infinity would be NaN.

    An int8 cache gets codes and scales, see `kv_int8.py`; a key that is not finite is then one of NaN.
    """
    if gpu_device.on_gpu(k):
        from exegpt.kernels.kv_write_gpu import kv_write_gpu

        kv_write_gpu(k, v, keys, values, slots)
        return
    if not compiled(k):
        kv_write_reference(k, v, keys, values, slots)
        return
    (_kv_write_int8 if values.dtype == torch.int8 else _kv_write)(k, v, keys, values, slots)


def kv_write_reference(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Run `kv_write` in plain PyTorch."""
    block_size = values.shape[2]
    block, place = slots // block_size, slots % block_size
    if values.dtype == torch.int8:
        (key_codes, key_scales), (value_codes, value_scales) = codes_and_scales(keys, values)
        whole = v.isfinite().all(-1, keepdim=True)
        key_codes[block, :, place], key_scales[block, :, place] = quantised(k.where(whole, torch.nan))
        value_codes[block, :, place], value_scales[block, :, place] = quantised(v.where(whole, 0))
        return
    whole = v.to(values.dtype).isfinite().all(-1, keepdim=True)
    keys_like_values(keys)[block, :, place] = k.where(whole, torch.nan).to(keys.dtype)
    values[block, :, place] = v.where(whole, 0).to(values.dtype)


@njit(error_model="numpy")
def store_value(target, value):  # type: ignore[no-untyped-def]
    """Copy a token's value, or zeros if it is not finite; return whether it is."""
    whole = True
    for d in range(len(value)):
        target[d] = value[d]
        whole &= np.isfinite(widened(value[d]))
    if not whole:
        target[:] = 0
    return whole


@njit_by_dtype("void(real[:, :, :], real[:, :, :], real[:, :, :, ::1], real[:, :, :, ::1], int64[::1])")
def _kv_write(k, v, keys, values, slots):  # type: ignore[no-untyped-def]
    block_size = values.shape[2]
    for token in prange(len(slots)):
        block, place = slots[token] // block_size, slots[token] % block_size
        for head in range(k.shape[1]):
            if store_value(values[block, head, place], v[token, head]):
                for d in range(k.shape[2]):
                    keys[block, head, d, place] = k[token, head, d]
            else:
                keys[block, head, :, place] = rounded(np.float32(np.nan), keys)


@njit_by_dtype("void(real[:, :, :], real[:, :, :], int8[:, :, :, ::1], int8[:, :, :, ::1], int64[::1])")
def _kv_write_int8(k, v, keys, values, slots):  # type: ignore[no-untyped-def]
    for token in prange(len(slots)):
        store_int8(k[token], v[token], keys, values, slots[token])
