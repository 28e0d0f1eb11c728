"""A stand-in for FlashInfer: its two wrappers of paged attention, as documented, in plain PyTorch on the CPU.

They know nothing but the arrays that they are given, as docs.flashinfer.ai describes them, and refuse others.
"""

import torch
import torch.nn.functional as F

CALLS = []
"""All calls: class, method, number of positional arguments, names of the others."""


class _Wrapper:
    """What both have in common."""

    def _note(self, method, *args, **kwargs):
        CALLS.append((type(self).__name__, method, len(args), tuple(kwargs)))

    def _begin(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8 and len(workspace) >= 128 * 2**20 and not workspace[:4096].any()
        assert kv_layout == "HND"

    def _arrays(self, indptr, indices, last_page_len, sizes, sm_scale, window_left, q_data_type, kv_data_type):
        for array in (indptr, indices, last_page_len):
            assert array.dtype == torch.int32 and array.device.type == "cpu" and array.dim() == 1
        assert len(indptr) == len(last_page_len) + 1 and indptr[0] == 0 and indptr[-1] == len(indices)
        heads, kv_heads, head_size, page_size = sizes
        assert heads % kv_heads == 0 and ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self.sizes, self.scale, self.window_left = sizes, sm_scale or head_size**-0.5, window_left
        self.dtypes = q_data_type, kv_data_type

    def _run(self, q, kv_cache, out, qo_indptr, indptr, indices, last_page_len, causal):
        (keys, values), (heads, kv_heads, head_size, page_size) = kv_cache, self.sizes
        assert (q.dtype, keys.dtype) == self.dtypes and q.shape[1:] == (heads, head_size)
        assert keys.shape == values.shape and keys.shape[1:] == (kv_heads, page_size, head_size)
        for i, last in enumerate(last_page_len.tolist()):
            mine = indices[indptr[i] : indptr[i + 1]].long()
            length = (len(mine) - 1) * page_size + last
            k, v = (
                cache[mine].transpose(0, 1).reshape(kv_heads, -1, head_size)[:, :length].float() for cache in kv_cache
            )
            rows = slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))
            new = rows.stop - rows.start
            seen = torch.ones(new, length, dtype=torch.bool)
            if causal:
                seen = seen.tril(length - new)
            if self.window_left >= 0:
                seen = seen.triu(length - new - self.window_left)
            one = q[rows].transpose(0, 1).float()
            k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
            attended = F.scaled_dot_product_attention(one, k, v, attn_mask=seen, scale=self.scale)
            out[rows] = attended.transpose(0, 1).to(out.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One new token of each sequence; by a CUDA graph, so that arrays are copied to buffers of fixed sizes."""

    def __init__(self, workspace, kv_layout, **options):
        self._note("__init__", workspace, kv_layout, **options)
        self._begin(workspace, kv_layout)
        assert options["use_cuda_graph"] and isinstance(options["use_tensor_cores"], bool)
        names = ("indptr", "indices", "last_page_len")
        self.buffers = [options[f"paged_kv_{name}_buffer"] for name in names]

    def plan(self, indptr, indices, last_page_len, *sizes, **options):
        self._note("plan", indptr, indices, last_page_len, *sizes, **options)
        self._arrays(indptr, indices, last_page_len, sizes, **options)
        for buffer, array in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
            assert buffer.data_ptr() != array.data_ptr()
            buffer[: len(array)].copy_(array)

    def run(self, q, kv_cache, *, out):
        self._note("run", q, kv_cache, out=out)
        assert len(q) == len(self.buffers[2])
        return self._run(q, kv_cache, out, torch.arange(len(q) + 1), *self.buffers, causal=False)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Several new tokens of each."""

    def __init__(self, workspace, kv_layout):
        self._note("__init__", workspace, kv_layout)
        self._begin(workspace, kv_layout)

    def plan(self, qo_indptr, indptr, indices, last_page_len, *sizes, causal, **options):
        self._note("plan", qo_indptr, indptr, indices, last_page_len, *sizes, causal=causal, **options)
        self._arrays(indptr, indices, last_page_len, sizes, **options)
        assert qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu"
        assert len(qo_indptr) == len(indptr) and qo_indptr[0] == 0
        self.planned = qo_indptr, indptr, indices, last_page_len, causal

    def run(self, q, kv_cache, *, out):
        self._note("run", q, kv_cache, out=out)
        assert len(q) == self.planned[0][-1]
        return self._run(q, kv_cache, out, *self.planned)
