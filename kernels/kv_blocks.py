"""Moving blocks of the paged cache: into a contiguous buffer to be sent, out of one, and within the cache.

A cache is given as its tensors, all layers' keys and values, whose blocks are equally large: [blocks, ...], contiguous.
A buffer is [tensors, n, block], `block` being the elements of one block; both are the caller's and allocated once.
Blocks are int64 [n] on the cache's device.
"""

from collections.abc import Sequence

import torch

from exegpt.kernels import device


def gather_blocks(cache: Sequence[torch.Tensor], blocks: torch.Tensor, buffer: torch.Tensor) -> None:
    """buffer[t, i] ← block blocks[i] of the cache's tensor t."""
    if device.on_gpu(buffer):
        from exegpt.kernels.kv_blocks_gpu import copy_blocks_gpu

        copy_blocks_gpu(cache, list(buffer), blocks, None)
        return
    for tensor, part in zip(cache, buffer, strict=True):
        torch.index_select(tensor.flatten(1), 0, blocks, out=part)


def scatter_blocks(buffer: torch.Tensor, cache: Sequence[torch.Tensor], blocks: torch.Tensor) -> None:
    """Block blocks[i] of the cache's tensor t ← buffer[t, i]; no block is named twice."""
    if device.on_gpu(buffer):
        from exegpt.kernels.kv_blocks_gpu import copy_blocks_gpu

        copy_blocks_gpu(list(buffer), cache, None, blocks)
        return
    for tensor, part in zip(cache, buffer, strict=True):
        tensor.flatten(1).index_copy_(0, blocks, part)


def move_blocks(cache: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Block targets[i] ← block sources[i] in each of the cache's tensors: compaction.

    No block is named twice, neither as a target nor as a source of one and a target of another.
    """
    if device.on_gpu(cache[0]):
        from exegpt.kernels.kv_blocks_gpu import copy_blocks_gpu

        copy_blocks_gpu(cache, cache, sources, targets)
        return
    for tensor in cache:
        tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def move_blocks_reference(cache: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """`move_blocks` one block after the other; `gather_blocks` and `scatter_blocks` are plain PyTorch on any device."""
    for tensor in cache:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            tensor[target] = tensor[source]
