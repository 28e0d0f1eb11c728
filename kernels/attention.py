"""Attention of new tokens over the paged cache: whole prompts, chunks of prompts and decoding, in ragged batches."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from exegpt.kernels import gpu_device
from exegpt.kernels.attention_flashinfer import FlashInfer
from exegpt.kernels.kv_layout import as_floats
from exegpt.kernels.numba_threads import compiled
from exegpt.kernels.work_list import WorkList, deal

_UNBOUNDED = 2**31 - 1
"""A window that contains every token."""


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    offsets: torch.Tensor,
    contexts: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    starts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    work: WorkList | FlashInfer | None = None,
    max_query_len: int | None = None,
) -> torch.Tensor:
    """Compute the attention of every sequence's last tokens over its cache: [tokens, heads, head_size].

    q         [tokens, heads, head_size], the sequences' new tokens one after the other
    keys      of the shape `kv_layout.key_shape`; the new tokens are already in it
    values    [blocks, kv_heads, block_size, head_size]; with the scales of `kv_int8.py` if both are int8
    tables    int32 [sequences, most blocks]: the blocks of each sequence in order, then anything valid
    offsets   int32 [sequences + 1]: sequence i has the new tokens offsets[i] to offsets[i + 1], maybe none. The result
              of tokens that are no sequence's is arbitrary
    contexts  int32 [sequences]: tokens in the cache, including the new ones; in cross-attention another sequence's; 0
              where there are no new ones
    out       where to write the result, or None
    scale     factor of q · k; None: 1 / √head_size
    window    number of tokens that a token sees, itself and earlier ones; None: all
    causal    whether a token sees no later token; otherwise it sees the whole cache, without a window
    starts    int32 [sequences]: the first token that is seen, below every new token's place; the cache's first if None
    bias      float32 [heads, 2 · D + 1], added to the scores: bias[h, D + d] for a key d tokens after the query; keys
              further away than D count as at D; None: no bias
    work      how decoding's keys are dealt to a GPU's programs, built from these `contexts`; None: each sequence's
              alike. Or FlashInfer's plan for this batch, which then computes instead of Triton
    max_query_len  how many new tokens a sequence may have, for the size of tiles; None: as many as all have on average
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if isinstance(work, FlashInfer):
        if not causal or starts is not None or bias is not None or scale != work.scale:
            raise ValueError("FlashInfer's plan is for causal attention of whole sequences at its scale, without bias.")
        return work.run(q, keys, values, out, window)
    inputs = q, keys, values, tables, offsets, contexts, out
    if gpu_device.on_gpu(q):
        from exegpt.kernels.attention_gpu import attention_gpu

        return attention_gpu(
            *inputs,
            window=window,
            causal=causal,
            starts=starts,
            scale=scale,
            bias=bias,
            work=work,
            max_query_len=max_query_len,
        )
    if not compiled(q):
        return attention_reference(*inputs, scale=scale, window=window, causal=causal, starts=starts, bias=bias)
    from exegpt.kernels.attention_cpu import kernel

    decode = q.shape[0] == contexts.shape[0]
    quantised = keys.dtype == torch.int8
    attend = kernel(q.shape[1] // keys.shape[1], q.shape[2], keys.shape[3], decode, quantised)
    starts = torch.zeros_like(contexts) if starts is None else starts
    bias = torch.empty(q.shape[1], 0) if bias is None else bias
    scale = scale or 1 / math.sqrt(q.shape[2])
    threads, window = torch.get_num_threads(), window or _UNBOUNDED
    attend(q, keys, values, tables, offsets, contexts, starts, bias, scale, window, causal, threads, out)
    return out


def programs_of_decoding(heads: int, values: torch.Tensor) -> int | None:
    """Return the number of programs per KV head to which `work_list.deal` deals decoding's keys; None on the CPU.

    There are `heads` query heads over a cache with these `values`. The CPU takes no work list.
    """
    if not gpu_device.on_gpu(values):
        return None
    from exegpt.kernels import attention_gpu

    return attention_gpu.programs_of_decoding(heads, values)


def make_work_list(
    seq_lens: NDArray[np.int32], heads: int, values: torch.Tensor, window: int | None = None
) -> WorkList | None:
    """Build a work list on the cache's device for one new token of each of these sequences; None on the CPU."""
    programs = programs_of_decoding(heads, values)
    if programs is None:
        return None
    arrays = deal(seq_lens, programs, values.shape[1], window)
    return WorkList(*(torch.from_numpy(array).to(values.device) for array in arrays))


def attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    offsets: torch.Tensor,
    contexts: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    starts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `attention` in plain PyTorch, one sequence after the other, in float32."""
    out = torch.empty_like(q) if out is None else out
    scale = scale or 1 / math.sqrt(q.shape[2])
    group, block_size = q.shape[1] // values.shape[1], values.shape[2]
    for i, context in enumerate(contexts.tolist()):
        begin, end = int(offsets[i]), int(offsets[i + 1])
        if begin == end:
            continue
        blocks = tables[i, : -(-context // block_size)].long()
        k, v = (
            cache.transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(group, 0)
            for cache in as_floats(keys[blocks], values[blocks])
        )
        scores = q[begin:end].float().transpose(0, 1) @ k.mT * scale
        places = torch.arange(context, device=q.device)
        queries = torch.arange(context - (end - begin), context, device=q.device)
        distance = places - queries.unsqueeze(1)  # of every key from every query
        if bias is not None:
            reach = bias.shape[1] // 2
            scores = scores + bias[:, distance.clamp(-reach, reach) + reach]
        unseen = (distance > 0) | (distance <= -(window or _UNBOUNDED)) if causal else torch.zeros_like(distance) > 0
        if starts is not None:
            unseen = unseen | (places < starts[i])
        weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
        out[begin:end] = _weighted(weights, v, ~unseen).transpose(0, 1).to(q.dtype)
    return out


def _weighted(weights: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return weights [heads, queries, keys] · v [heads, keys, head_size] over the `seen` keys.

    `seen` is bool [queries, keys]. Other keys are left out, since NaN times a weight of zero would be NaN. A query gets
    NaN if it sees a value that is not finite.
    """
    finite = v.isfinite()
    if finite.all():
        return weights @ v
    reached = seen.float() @ (~finite).float()
    return (weights @ v.where(finite, 0)).masked_fill(reached > 0, math.nan)
