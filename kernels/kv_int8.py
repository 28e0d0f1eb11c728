"""Keys and values in 8 bits: a token's vector of one head is int8 codes and one float32 scale.

The scale is the vector's greatest magnitude / 127, and a code is the value / scale, rounded to the nearest. So what is
stored depends on the token alone, not on its chunk or its neighbours.

A cache is int8 tensors of the usual layouts (`kv_layout.py`), with `SCALE_BYTES` more per token in head_size: keys are
[blocks, kv_heads, head_size + 4, block_size], values [blocks, kv_heads, block_size, head_size + 4]. The memory of one
head of a block begins with the codes, laid out as without scales. It ends with its tokens' scales, float32
[block_size]. So whatever copies, sends or shares blocks carries the scales.
"""

import numpy as np
import torch

from exegpt.kernels.bfloat16 import widened
from exegpt.kernels.numba_jit import njit

SCALE_BYTES = 4
"""Bytes of the scale of one token's key or value of one head."""
_MOST = np.float32(127)
"""The greatest code."""
_LEAST = np.float32(1e-30)
"""A vector of smaller values is stored as zeros: the inverse of its scale could overflow."""


def codes_and_scales(
    keys: torch.Tensor, values: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return views of the keys' codes and scales, and of the values'.

    Codes are int8 [blocks, kv_heads, block_size, head_size], scales float32 [blocks, kv_heads, block_size].
    """
    block_size, head_size = values.shape[2], values.shape[3] - SCALE_BYTES
    key_codes, key_scales = _split(keys, head_size, block_size)
    return (key_codes.mT, key_scales), _split(values, block_size, head_size)


def _split(cache: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    flat, size = cache.flatten(2), rows * columns
    return flat[..., :size].unflatten(-1, (rows, columns)), flat[..., size:].view(torch.float32)


def dequantised(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values that codes and scales stand for, in float32; NaN where a scale is NaN."""
    return codes.float() * scales.unsqueeze(-1)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of x [..., head_size] and their scales [...]; zeros and NaN where a value is not finite."""
    x = x.float()
    top = x.abs().amax(-1)
    whole = x.isfinite().all(-1)
    large = whole & (top >= _LEAST)
    inverse = torch.where(large, torch.full_like(top, 127) / top, 0.0).unsqueeze(-1)  # 127 / top would round twice
    codes = (x.where(whole.unsqueeze(-1), 0) * inverse).round().to(torch.int8)
    return codes, torch.where(whole, top / 127, torch.nan)


@njit(error_model="numpy")
def _greatest(x):  # type: ignore[no-untyped-def]
    """Return the greatest magnitude of a token's vector; NaN if a value is not finite."""
    top, whole = np.float32(0), True
    for d in range(len(x)):
        magnitude = abs(widened(x[d]))
        top = max(top, magnitude)
        whole &= np.isfinite(magnitude)
    return top if whole else np.float32(np.nan)


@njit(error_model="numpy")
def _store_codes(x, top, codes, begin, step):  # type: ignore[no-untyped-def]
    """Store a vector's codes in the flat cache from `begin` on, `step` apart; zeros if `top` is NaN."""
    inverse = _MOST / top
    for d in range(len(x)):
        codes[begin + d * step] = np.int8(np.rint(widened(x[d]) * inverse)) if top >= _LEAST else 0


@njit(error_model="numpy")
def store_int8(k, v, keys, values, slot):  # type: ignore[no-untyped-def]
    """Store a token's k and v, each [kv_heads, head_size], at its slot of a cache of 8 bits, as `kv_write` does."""
    heads, head_size = k.shape
    block_size = values.shape[2]
    block, place = slot // block_size, slot % block_size
    key_codes, value_codes = keys.reshape(-1), values.reshape(-1)
    key_scales, value_scales = key_codes.view(np.float32), value_codes.view(np.float32)
    for head in range(heads):
        begin = (block * heads + head) * (head_size + SCALE_BYTES) * block_size
        scale = (begin + head_size * block_size) // SCALE_BYTES + place
        key, value = _greatest(k[head]), _greatest(v[head])
        if np.isnan(value):
            key, value = np.float32(np.nan), np.float32(0)
        _store_codes(k[head], key, key_codes, begin + place, block_size)
        _store_codes(v[head], value, value_codes, begin + place * head_size, 1)
        key_scales[scale], value_scales[scale] = key / _MOST, value / _MOST
