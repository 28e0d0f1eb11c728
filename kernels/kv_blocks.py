"""Copies between blocks of the paged cache and a contiguous buffer that is sent or received.

A cache is given as its tensors, all layers' keys and values, each [blocks, ...], or as the same KV heads of each: a
block's part is contiguous. Parts are equally large, and have the same distance in every tensor. A buffer is contiguous,
[tensors, n, part], where `part` is the number of elements of one block's part. Blocks are int64 [n], on the cache's
device.
"""

from collections.abc import Sequence

import torch

from exegpt.kernels import gpu_device


def gather_blocks(cache: Sequence[torch.Tensor], blocks: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy blocks to a buffer: buffer[t, i] ← block blocks[i] of the cache's tensor t."""
    if gpu_device.on_gpu(buffer):
        from exegpt.kernels.kv_blocks_gpu import copy_blocks_gpu

        copy_blocks_gpu(cache, blocks, buffer, gather=True)
        return
    for tensor, part in zip(cache, buffer, strict=True):
        torch.index_select(tensor.flatten(1), 0, blocks, out=part)


def scatter_blocks(buffer: torch.Tensor, cache: Sequence[torch.Tensor], blocks: torch.Tensor) -> None:
    """Copy a buffer to blocks: block blocks[i] of the cache's tensor t ← buffer[t, i]; no block occurs twice."""
    if gpu_device.on_gpu(buffer):
        from exegpt.kernels.kv_blocks_gpu import copy_blocks_gpu

        copy_blocks_gpu(cache, blocks, buffer, gather=False)
        return
    for tensor, part in zip(cache, buffer, strict=True):
        tensor.flatten(1).index_copy_(0, blocks, part)
