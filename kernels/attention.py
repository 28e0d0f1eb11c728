"""Attention of new tokens over the paged cache: whole prompts, pieces of prompts and decoding, in ragged batches."""

import math

import torch

from exegpt.kernels.threads import compiled


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    offsets: torch.Tensor,
    contexts: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every sequence's last tokens over its whole cache: [tokens, heads, head_size].

    q         [tokens, heads, head_size], the sequences' new tokens one after the other
    keys      [blocks, kv_heads, head_size, block_size]; the new tokens are already in it
    values    [blocks, kv_heads, block_size, head_size]
    tables    int32 [sequences, most blocks]: the blocks of each sequence in order, then anything valid
    offsets   int32 [sequences + 1]: sequence i has the new tokens offsets[i] to offsets[i + 1], at least one
    contexts  int32 [sequences]: tokens in the cache, the new ones included
    out       where to write the result, or None
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not compiled(q):
        return attention_reference(q, keys, values, tables, offsets, contexts, out)
    from exegpt.kernels.attention_cpu import kernel

    decode = q.shape[0] == contexts.shape[0]
    attend = kernel(q.shape[1] // keys.shape[1], q.shape[2], keys.shape[3], decode)
    arrays = (t.numpy() for t in (q, keys, values, tables, offsets, contexts))
    attend(*arrays, 1 / math.sqrt(q.shape[2]), out.numpy())
    return out


def attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    offsets: torch.Tensor,
    contexts: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention` in plain PyTorch, one sequence after the other, in float32."""
    out = torch.empty_like(q) if out is None else out
    group, block_size = q.shape[1] // keys.shape[1], keys.shape[3]
    for i, context in enumerate(contexts.tolist()):
        begin, end = int(offsets[i]), int(offsets[i + 1])
        blocks = tables[i, : -(-context // block_size)].long()
        k = keys[blocks].float().permute(1, 2, 0, 3).flatten(2)[:, :, :context].repeat_interleave(group, 0)
        v = values[blocks].float().transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(group, 0)
        scores = q[begin:end].float().transpose(0, 1) @ k / math.sqrt(q.shape[2])
        seen = torch.arange(context - (end - begin), context, device=q.device)
        future = torch.arange(context, device=q.device) > seen.unsqueeze(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        out[begin:end] = (weights @ v).transpose(0, 1).to(q.dtype)
    return out
