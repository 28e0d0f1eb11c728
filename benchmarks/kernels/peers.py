"""The same work by what PyTorch brings: its attention kernels, FlexAttention, compiled references, sorting."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Make = Callable[[], Any]


def plain(reference: Make) -> dict[str, Make]:
    """The reference as it stands, and compiled."""
    return {"PyTorch": reference, "torch.compile": _compile(reference)}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flex: bool) -> dict[str, Make]:
    """Causal attention of q over contiguous k and v [sequences, heads, tokens, head_size]; one token in q sees all."""
    causal, grouped = q.shape[2] > 1, q.shape[1] != k.shape[1]

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def by(backend: SDPBackend) -> Make:
        def attend_by() -> torch.Tensor:
            with sdpa_kernel(backend):
                return attend()

        return attend_by

    calls = {"SDPA": attend}
    if q.is_cuda:
        calls = {"SDPA flash": by(SDPBackend.FLASH_ATTENTION), "SDPA cuDNN": by(SDPBackend.CUDNN_ATTENTION)}
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        length, device = q.shape[2], str(q.device)
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device) if causal else None
        compiled = _compile(flex_attention)
        calls["FlexAttention"] = lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)
    return calls


def gathered(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, context: int) -> Make:
    """SDPA of q [sequences, heads, tokens, head_size] over paged keys and values [blocks, heads, block_size,
    head_size], whose blocks are first brought together by indexing: the plain way to let it read a paged cache.
    """
    causal, grouped, blocks = q.shape[2] > 1, q.shape[1] != keys.shape[1], tables.long()

    def attend() -> torch.Tensor:
        k, v = (cache[blocks].transpose(1, 2).flatten(2, 3)[:, :, :context] for cache in (keys, values))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return attend


def sorted_sampling(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> Make:
    """The usual way in PyTorch, without a seed per row and without a penalty."""

    def choose() -> torch.Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        x = logits.float() / temperature
        if not top_k and top_p == 1:
            return _draw(x.softmax(-1))
        best, order = x.topk(top_k) if top_k else x.sort(descending=True)
        chances = best.softmax(-1)
        chances = chances.where(chances.cumsum(-1) - chances < top_p, 0)
        return order.gather(1, _draw(chances).unsqueeze(1))

    return choose


def _draw(chances: torch.Tensor) -> torch.Tensor:
    """As torch.multinomial draws one, which may wait for the device."""
    return (chances / torch.empty_like(chances).exponential_()).argmax(-1)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()  # beyond a number of compilations per function torch silently stops compiling
    return torch.compile(function, dynamic=False)
