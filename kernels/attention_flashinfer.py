"""Attention by FlashInfer, where it is installed: another way to compute `attention.attention` over a paged cache.

A GPU's cache is FlashInfer's HND layout. Block tables are given as compressed rows to `plan`, on the host and once per
batch; `run` then computes every layer. A CUDA graph holds `run` alone: `plan` comes before each replay, and writes to
buffers of fixed sizes. Interface: docs.flashinfer.ai, flashinfer.decode and flashinfer.prefill, as of 0.7.2.
"""

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from exegpt.kernels.device import architecture

HEAD_SIZES = frozenset((64, 128, 256))
"""For which both wrappers have kernels."""
_DTYPES = frozenset((torch.float16, torch.bfloat16))
_LEAST_CAPABILITY = 80
"""Its bfloat16 needs Ampere."""
_TENSOR_CORES_FROM = 4
"""Query heads of a KV head from which decoding by matrix units is the quicker of its two ways (SGLang's rule)."""
_WORKSPACE_BYTES = 256 * 2**20
"""For the partial results of split sequences: twice what it recommends, since batches here are up to 512 sequences."""


def flashinfer() -> ModuleType:
    """The package, whose import takes seconds; ImportError where it isn't installed or can't be loaded."""
    return importlib.import_module("flashinfer")


def why_not(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why FlashInfer can't compute attention of such heads on a device; None where it can."""
    if device.type != "cuda":
        return "FlashInfer runs on GPUs alone"
    if dtype not in _DTYPES:
        return f"FlashInfer computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if head_size not in HEAD_SIZES:
        return f"FlashInfer has heads of {', '.join(map(str, sorted(HEAD_SIZES)))}, not of {head_size}"
    if (capability := architecture(device).capability) < _LEAST_CAPABILITY:
        return f"FlashInfer needs compute capability 8.0, and this GPU has {capability / 10}"
    try:
        flashinfer()
    except ModuleNotFoundError as error:
        if error.name == "flashinfer":
            return "FlashInfer is not installed (pip install 'exegpt[gpu-fast]')"
        return f"FlashInfer can't be imported ({error})"
    except Exception as error:  # a driver or a torch that it wasn't built for, among others
        return f"FlashInfer can't be imported ({error})"
    return None


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
    used = (contexts + block_size - 1) // block_size
    indptr = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    in_use = torch.arange(tables.shape[1]) < used[:, None]
    return Pages(indptr, tables[in_use], (contexts - 1) % block_size + 1)


class FlashInfer:
    """The plan of one batch's attention at a time, for layers with these windows (None: no window) and `heads` query
    heads over caches like `values`. Several plans on one stream may share a workspace.

    `graph`: the sequences and the most blocks of a decoding batch whose `run` is captured in a CUDA graph.
    """

    def __init__(
        self,
        heads: int,
        values: torch.Tensor,
        windows: Iterable[int | None],
        workspace: torch.Tensor,
        *,
        scale: float | None = None,
        graph: tuple[int, int] | None = None,
    ):
        _, kv_heads, block_size, head_size = values.shape
        self._sizes = heads, kv_heads, head_size, block_size
        self._dtype, self._workspace, self._graph, self.scale = values.dtype, workspace, graph, scale
        self._windows = frozenset(windows)
        self._wrappers: dict[tuple[bool, int | None], Any] = {}
        self._planned: dict[int | None, Any] = {}

    @staticmethod
    def new_workspace(device: torch.device) -> torch.Tensor:
        """A workspace for all plans of one stream. FlashInfer wants it zeroed."""
        return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def plan(
        self, tables: torch.Tensor | np.ndarray, offsets: torch.Tensor | np.ndarray, contexts: torch.Tensor | np.ndarray
    ) -> "FlashInfer":
        """Plan `run` for a batch, whose arrays are those of `attention.attention`, and return itself. The batch planned
        before must have been computed: its plan is overwritten.
        """
        tables, offsets, contexts = (torch.as_tensor(array).cpu() for array in (tables, offsets, contexts))
        decode = int(offsets[-1]) == len(contexts)
        arrays = pages(tables, contexts, self._sizes[-1])
        for window in self._windows:
            if (decode, window) not in self._wrappers:
                self._wrappers[decode, window] = self._decode() if decode else self._prefill()
            wrapper = self._planned[window] = self._wrappers[decode, window]
            options = {
                "sm_scale": self.scale,
                "window_left": window - 1 if window else -1,  # tokens before the query's own
                "q_data_type": self._dtype,
                "kv_data_type": self._dtype,
            }
            if decode:
                wrapper.plan(*arrays, *self._sizes, **options)
            else:
                wrapper.plan(offsets, *arrays, *self._sizes, causal=True, **options)
        return self

    def run(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """One layer's causal attention for the batch that was planned: [tokens, heads, head_size]."""
        return self._planned[window].run(q, (keys, values), out=out)

    def _prefill(self) -> Any:
        assert self._graph is None, "graphs are decoding's"
        return flashinfer().BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def _decode(self) -> Any:
        heads, kv_heads, *_ = self._sizes
        options: dict[str, Any] = {"use_tensor_cores": heads // kv_heads >= _TENSOR_CORES_FROM}
        if self._graph is not None:
            sequences, blocks = self._graph
            counts = {"indptr": sequences + 1, "indices": blocks, "last_page_len": sequences}
            options["use_cuda_graph"] = True
            for name, count in counts.items():
                buffer = torch.zeros(count, dtype=torch.int32, device=self._workspace.device)
                options[f"paged_kv_{name}_buffer"] = buffer
        return flashinfer().BatchDecodeWithPagedKVCacheWrapper(self._workspace, "HND", **options)
