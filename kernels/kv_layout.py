"""The layouts of keys and values in the paged cache, by device; nothing else depends on the device's layout.

Values are [blocks, kv_heads, block_size, head_size] everywhere. On a GPU, keys have the same layout: a token's key is
written as one row, and other libraries read it (FlashInfer's `HND` layout). The CPU's kernel multiplies by a block of
keys as a matrix, and takes [blocks, kv_heads, head_size, block_size]; see `attention_cpu.py`. A cache of 8 bits, on the
CPU only, has scales in addition: see `kv_int8.py`.
"""

import torch

from exegpt.kernels import gpu_device
from exegpt.kernels.kv_int8 import codes_and_scales, dequantised


def key_shape(values: torch.Tensor) -> torch.Size:
    """Return the shape of a cache's keys on the device of its values [blocks, kv_heads, block_size, head_size]."""
    return values.shape if gpu_device.on_gpu(values) else values.mT.shape


def keys_like_values(keys: torch.Tensor) -> torch.Tensor:
    """Return a view of a cache's keys as [blocks, kv_heads, block_size, head_size], on any device."""
    return keys if gpu_device.on_gpu(keys) else keys.mT


def as_floats(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks of keys and of values in float32, both [blocks, kv_heads, block_size, head_size]."""
    if values.dtype == torch.int8:
        stored_keys, stored_values = codes_and_scales(keys, values)
        return dequantised(*stored_keys), dequantised(*stored_values)
    return keys_like_values(keys).float(), values.float()
