"""Attention by FlashInfer, if it is installed: another implementation of `attention.attention` over a paged cache.

A GPU's cache has FlashInfer's HND layout. `plan` gets the block tables as compressed rows, on the host and once per
batch; `run` then computes every layer. A CUDA graph holds `run` alone: `plan` comes before each replay, and writes to
buffers of fixed sizes. Interface: docs.flashinfer.ai, flashinfer.decode and flashinfer.prefill, as of 0.7.2.
"""

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from exegpt.kernels.gpu_device import architecture

HEAD_SIZES = frozenset((64, 128, 256))
"""Head sizes for which both wrappers have kernels."""
_DTYPES = frozenset((torch.float16, torch.bfloat16))
_LEAST_CAPABILITY = 80
"""Least compute capability: its bfloat16 needs Ampere."""
_TENSOR_CORES_FROM = 4
"""Query heads per KV head from which decoding by matrix units is the faster of its two ways (SGLang's rule)."""
_WORKSPACE_BYTES = 256 * 2**20
"""Bytes for the partial results of split sequences: twice the recommended size."""


def most_planned(heads: int, kv_heads: int, head_size: int) -> int:
    """Return the most sequences for which decoding in a graph has room in the workspace.

    Matrix units compute tiles of 16 rows. There are at most a sequence's tiles and one more for each sequence, and each
    has a partial result in float32 (`PrefillPlan` in scheduler.cuh).
    """
    each = heads * 16 * head_size * 4
    return int(_WORKSPACE_BYTES / each / (1 + heads / kv_heads / 16))


def flashinfer() -> ModuleType:
    """Import the package, which takes seconds; ImportError if it isn't installed or can't be loaded."""
    return importlib.import_module("flashinfer")


def why_not(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Return why FlashInfer can't compute attention of such heads on a device; None if it can."""
    if device.type != "cuda":
        return "FlashInfer runs only on GPUs"
    if dtype not in _DTYPES:
        return f"FlashInfer computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if head_size not in HEAD_SIZES:
        return f"FlashInfer supports the head sizes {', '.join(map(str, sorted(HEAD_SIZES)))}, not {head_size}"
    if (capability := architecture(device).capability) < _LEAST_CAPABILITY:
        return f"FlashInfer needs compute capability 8.0, and this GPU has {capability / 10}"
    try:
        flashinfer()
    except ModuleNotFoundError as error:
        if error.name == "flashinfer":
            return "FlashInfer is not installed (pip install 'exegpt[gpu-fast]')"
        return f"FlashInfer can't be imported ({error})"
    except Exception as error:  # among others, a driver or a torch that it wasn't built for
        return f"FlashInfer can't be imported ({error})"
    return None


class Pages(NamedTuple):
    """Block tables as compressed rows, on the host."""

    indptr: torch.Tensor
    """int32 [sequences + 1]: sequence i has the blocks indices[indptr[i]] to indices[indptr[i + 1]]."""
    indices: torch.Tensor
    """int32 [used blocks]."""
    last_page_len: torch.Tensor
    """int32 [sequences]: tokens in each sequence's last block, 1 to block_size."""


def pages(tables: torch.Tensor, contexts: torch.Tensor, block_size: int) -> Pages:
    """Return the used blocks of each row of `tables`, int32 [sequences, most blocks].

    The sequences have `contexts` tokens, int32 [sequences].
    """
    used = (contexts + block_size - 1) // block_size
    indptr = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    in_use = torch.arange(tables.shape[1]) < used[:, None]
    return Pages(indptr, tables[in_use], (contexts - 1) % block_size + 1)


class _Wrapper(Protocol):
    """FlashInfer's wrapper of one kind of batches."""

    def plan(self, *arrays: object, **options: object) -> None: ...

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor: ...


class FlashInfer:
    """Plans and runs the attention of one batch at a time, on caches like `values` with `heads` query heads.

    The layers have these windows (None: no window). Several plans on one stream may share a workspace. `graph`: the
    sequences and the most blocks of a decoding batch whose `run` is captured in a CUDA graph.
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
        self._wrappers: dict[tuple[bool, int | None], _Wrapper] = {}
        self._planned: dict[int | None, _Wrapper] = {}

    @staticmethod
    def new_workspace(device: torch.device) -> torch.Tensor:
        """Allocate a workspace for all plans of one stream. FlashInfer needs it zeroed."""
        return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def plan(
        self,
        tables: torch.Tensor | NDArray[np.int32],
        offsets: torch.Tensor | NDArray[np.int32],
        contexts: torch.Tensor | NDArray[np.int32],
    ) -> "FlashInfer":
        """Plan `run` for a batch, whose arrays are those of `attention.attention`, and return itself.

        The previous batch must have been computed: its plan is overwritten.
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
        """Compute one layer's causal attention for the planned batch: [tokens, heads, head_size]."""
        return self._planned[window].run(q, (keys, values), out=out)

    def _prefill(self) -> _Wrapper:
        assert self._graph is None, "graphs are decoding's"
        wrapper: _Wrapper = flashinfer().BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        return wrapper

    def _decode(self) -> _Wrapper:
        heads, kv_heads, *_ = self._sizes
        options: dict[str, object] = {"use_tensor_cores": heads // kv_heads >= _TENSOR_CORES_FROM}
        if self._graph is not None:
            sequences, blocks = self._graph
            counts = {"indptr": sequences + 1, "indices": blocks, "last_page_len": sequences}
            options["use_cuda_graph"] = True
            for name, count in counts.items():
                buffer = torch.zeros(count, dtype=torch.int32, device=self._workspace.device)
                options[f"paged_kv_{name}_buffer"] = buffer
        wrapper: _Wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(self._workspace, "HND", **options)
        return wrapper
