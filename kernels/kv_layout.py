"""The layouts of keys and values in the paged cache, by device; nothing else depends on the device's layout.

Values are [blocks, kv_heads, block_size, head_size] everywhere. On a GPU, keys have the same layout: a token's key is
written as one row, and other libraries read it (FlashInfer's `HND` layout). The CPU's kernel multiplies by a block of
keys as a matrix, and takes [blocks, kv_heads, head_size, block_size]; see `attention_cpu.py`.
"""

import torch

from exegpt.kernels import gpu_device


def key_shape(values: torch.Tensor) -> torch.Size:
    """Return the shape of a cache's keys on the device of its values [blocks, kv_heads, block_size, head_size]."""
    return values.shape if gpu_device.on_gpu(values) else values.mT.shape


def keys_like_values(keys: torch.Tensor) -> torch.Tensor:
    """Return a view of a cache's keys as [blocks, kv_heads, block_size, head_size], on any device."""
    return keys if gpu_device.on_gpu(keys) else keys.mT
