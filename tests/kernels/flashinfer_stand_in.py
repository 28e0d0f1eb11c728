"""A stand-in for FlashInfer: its two wrappers of paged attention, as documented, in plain PyTorch on the CPU.

They compute with nothing but the arrays that docs.flashinfer.ai describes, and refuse others. Attention is our
reference's, over block tables made of those arrays.
"""

import contextlib
import sys

import pytest
import torch

from exegpt.kernels import attention_flashinfer, gpu_device
from exegpt.kernels.attention import attention_reference

__version__ = "0.7.2.stand-in"

CALLS = []
"""All calls: class, method, number of positional arguments, names of the others."""
NAMES = ("indptr", "indices", "last_page_len")


@contextlib.contextmanager
def in_its_place():
    """Within it FlashInfer is installed, and takes the CPU's tensors, like Triton's kernels, for any head and dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", sys.modules[__name__])
        patch.setattr(gpu_device, "on_gpu", lambda x: True)
        patch.setattr(attention_flashinfer, "why_not", lambda *arguments: None)
        patch.setattr(attention_flashinfer, "_WORKSPACE_BYTES", 128 * 2**20)
        CALLS.clear()
        yield CALLS


class _Wrapper:
    """What both have in common."""

    planned = None
    """Offsets, indptr, indices, last_page_len: where a kernel finds them."""

    def _note(self, method, *args, **kwargs):
        CALLS.append((type(self).__name__, method, len(args), tuple(kwargs)))

    def _begin(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8 and len(workspace) >= 128 * 2**20 and not workspace[:4096].any()
        assert kv_layout == "HND"

    def _arrays(self, indptr, indices, last_page_len, sizes, sm_scale, window_left, q_data_type, kv_data_type):
        for array in (indptr, indices, last_page_len):
            assert array.dtype == torch.int32 and array.device.type == "cpu" and array.dim() == 1
        assert len(indptr) == len(last_page_len) + 1 and indptr[0] == 0 and indptr[-1] == len(indices)
        heads, kv_heads, _, page_size = sizes
        assert heads % kv_heads == 0 and ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self.sizes, self.scale, self.window_left = sizes, sm_scale, window_left
        self.dtypes = q_data_type, kv_data_type

    def _run(self, q, kv_cache, out):
        (keys, values), (heads, kv_heads, head_size, page_size) = kv_cache, self.sizes
        offsets, indptr, indices, last_page_len = self.planned
        assert (q.dtype, keys.dtype) == self.dtypes and q.shape[1:] == (heads, head_size) and len(q) == offsets[-1]
        assert keys.shape == values.shape and keys.shape[1:] == (kv_heads, page_size, head_size)
        assert out.is_contiguous() and q.stride(2) == 1
        tables = torch.nn.utils.rnn.pad_sequence(indices[: indptr[-1]].split(indptr.diff().tolist()), batch_first=True)
        contexts = (indptr.diff() - 1) * page_size + last_page_len
        window = self.window_left + 1 if self.window_left >= 0 else None
        arrays = q, keys, values, tables, offsets, contexts
        return attention_reference(*arrays, out, scale=self.scale, window=window)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One new token of each sequence; for a CUDA graph arrays are copied to buffers of fixed sizes."""

    def __init__(self, workspace, kv_layout, *, use_tensor_cores, use_cuda_graph=False, **buffers):
        self._note("__init__", workspace, kv_layout, use_tensor_cores=0, use_cuda_graph=0, **buffers)
        self._begin(workspace, kv_layout)
        assert isinstance(use_tensor_cores, bool) and use_cuda_graph == bool(buffers)
        self.buffers = [buffers[f"paged_kv_{name}_buffer"] for name in NAMES] if use_cuda_graph else None
        if self.buffers:
            indptr, _, last_page_len = self.buffers
            assert len(indptr) == len(last_page_len) + 1 and {b.dtype for b in self.buffers} == {torch.int32}

    def plan(self, indptr, indices, last_page_len, *sizes, **options):
        self._note("plan", indptr, indices, last_page_len, *sizes, **options)
        self._arrays(indptr, indices, last_page_len, sizes, **options)
        arrays = [indptr, indices, last_page_len]
        if self.buffers:
            assert len(last_page_len) == len(self.buffers[2]), "the batch is fixed in a graph"
            assert len(indices) <= len(self.buffers[1]), "more blocks than the buffer has"
            for buffer, array in zip(self.buffers, arrays, strict=True):
                buffer[: len(array)].copy_(array)
            arrays = self.buffers
        self.planned = torch.arange(len(last_page_len) + 1), *arrays

    def run(self, q, kv_cache, *, out):
        self._note("run", q, kv_cache, out=out)
        return self._run(q, kv_cache, out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Several new tokens of each."""

    def __init__(self, workspace, kv_layout):
        self._note("__init__", workspace, kv_layout)
        self._begin(workspace, kv_layout)

    def plan(self, qo_indptr, indptr, indices, last_page_len, *sizes, causal, **options):
        self._note("plan", qo_indptr, indptr, indices, last_page_len, *sizes, causal=causal, **options)
        self._arrays(indptr, indices, last_page_len, sizes, **options)
        assert qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu" and causal
        assert len(qo_indptr) == len(indptr) and qo_indptr[0] == 0
        self.planned = qo_indptr, indptr, indices, last_page_len

    def run(self, q, kv_cache, *, out):
        self._note("run", q, kv_cache, out=out)
        return self._run(q, kv_cache, out)
