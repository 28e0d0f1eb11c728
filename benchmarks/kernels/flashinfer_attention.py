"""The same attention by FlashInfer, over the very same queries, paged cache and block tables, where it is installed.

A GPU's cache is what FlashInfer calls the HND layout: keys and values, each [blocks, kv_heads, block_size, head_size].
It takes block tables as compressed rows, plans on the host once per batch, and then runs as often as there are layers.
Its interface is that of docs.flashinfer.ai, flashinfer.decode and flashinfer.prefill.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from exegpt.kernels import device

HEAD_SIZES = frozenset((64, 128, 256))
"""That its kernels are made for."""
_TENSOR_CORES_FROM = 4
"""Query heads of a KV head from which decoding by matrix units is the quicker of its two ways (SGLang's rule)."""
_WORKSPACE_BYTES = 256 * 2**20
"""For the partial results of split sequences: twice what it recommends, since batches here are up to 256 sequences."""


class Pages(NamedTuple):
    """Block tables as compressed rows, on the host."""

    indptr: torch.Tensor
    """int32 [sequences + 1]: sequence i has the blocks indices[indptr[i]] to indices[indptr[i + 1]]"""
    indices: torch.Tensor
    """int32 [blocks that are used]"""
    last_page_len: torch.Tensor
    """int32 [sequences]: tokens in each one's last block, 1 to block_size"""


def pages(tables: torch.Tensor, contexts: torch.Tensor, block_size: int) -> Pages:
    """The blocks that sequences of `contexts` tokens, int32 [sequences], use of their rows of `tables`, int32
    [sequences, most blocks]."""
    tables, contexts = tables.cpu(), contexts.cpu()
    used = (contexts + block_size - 1) // block_size
    indptr = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    own = torch.arange(tables.shape[1]) < used[:, None]
    return Pages(indptr, tables[own], (contexts - 1) % block_size + 1)


def peer(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    offsets: torch.Tensor,
    contexts: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> dict[str, Callable[[], torch.Tensor]]:
    """`attention.attention` of these arguments by FlashInfer, under its name: made and planned at the first call, which
    fails where it isn't installed or has no such heads. None on the CPU, and for a position bias.
    """
    if bias is not None or not device.on_gpu(q):
        return {}
    out = torch.empty_like(q)

    @functools.cache
    def planned() -> Any:
        return _plan(q, values, tables, offsets, contexts, **options)

    return {"FlashInfer": lambda: planned().run(q, (keys, values), out=out)}


def _plan(
    q: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    offsets: torch.Tensor,
    contexts: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Any:
    """Its wrapper for this batch, planned. Decoding's is the one that a CUDA graph can take for any lengths, as ours;
    prompts' is free to split as these lengths want, since iterations with prompts go without graphs.
    """
    (_, heads, head_size), (_, kv_heads, block_size, _) = q.shape, values.shape
    if head_size not in HEAD_SIZES:
        raise ValueError(f"It has no heads of {head_size}.")
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    arrays, sizes = pages(tables, contexts, block_size), (heads, kv_heads, head_size, block_size)
    options = {
        "sm_scale": scale,
        "window_left": window - 1 if window and causal else -1,  # tokens before the query's own, which it sees too
        "q_data_type": q.dtype,
        "kv_data_type": values.dtype,
    }
    if len(q) > len(tables):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(offsets.cpu(), *arrays, *sizes, causal=causal, **options)
        return wrapper
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=heads // kv_heads >= _TENSOR_CORES_FROM,
        paged_kv_indptr_buffer=torch.empty_like(arrays.indptr, device=q.device),
        paged_kv_indices_buffer=torch.empty_like(arrays.indices, device=q.device),
        paged_kv_last_page_len_buffer=torch.empty_like(arrays.last_page_len, device=q.device),
    )
    wrapper.plan(*arrays, *sizes, **options)
    return wrapper
