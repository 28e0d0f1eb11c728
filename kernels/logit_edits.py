"""Logit edits: a request's changes of its model's logits before a token is chosen.

They come in vLLM's order (`vllm.v1.sample.sampler`, 0.22): the mask of allowed tokens, the bias, then the repetition,
frequency and presence penalties. Only rows of requests with an edit are edited. A mask leaves NaN and infinities, which
fail the request wherever they are.
"""

from dataclasses import dataclass

import torch

from exegpt.kernels import gpu_device
from exegpt.kernels.logit_edits_cpu import edit_rows
from exegpt.kernels.numba_threads import follow_torch


@dataclass(frozen=True)
class LogitEdits:
    """The edits of some rows, on the logits' device; each row occurs once."""

    rows: torch.Tensor
    """int64 [edited]: the edited rows of the logits; the following tensors have one element for each."""
    penalty: torch.Tensor
    """float32 [edited]: repetition penalty, as `Sampling.penalty`, which is 1 for these rows."""
    frequency: torch.Tensor
    """float32 [edited]: subtracted for each occurrence of a token in its sequence's output; 0 for none."""
    presence: torch.Tensor
    """float32 [edited]: subtracted once if a token is in its sequence's output; 0 for none."""
    slot: torch.Tensor
    """int64 [edited]: its sequence's row of `seen` and `counts`; any row if there is no penalty."""
    mask: torch.Tensor
    """int64 [edited]: its row of `allowed`; -1 if all tokens are allowed."""
    allowed: torch.Tensor
    """int32 [masks, ceil(vocab / 32)]: token t is allowed if bit t mod 32 of word t // 32 is set."""
    biased: torch.Tensor
    """int64 [2, biases]: rows of the logits and tokens, each pair once."""
    bias: torch.Tensor
    """float32 [biases]: added to the logits of `biased`."""
    seen: torch.Tensor
    """uint8 [slots, vocab]: see `Sampling.seen`."""
    counts: torch.Tensor
    """int32 [slots, vocab]: occurrences of each token in a sequence's output so far."""


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """Return the edited logits as a new tensor: [rows, vocab] → float32 [rows, vocab]."""
    x = _biased(logits, edits)
    if gpu_device.on_gpu(x):
        from exegpt.kernels.logit_edits_gpu import edit_rows_gpu

        edit_rows_gpu(x, edits)
        return x
    follow_torch()
    e = edits
    rows = (e.rows, e.penalty, e.frequency, e.presence, e.slot, e.mask, e.allowed, e.seen, e.counts)
    edit_rows(x.numpy(), *(t.contiguous().numpy() for t in rows))
    return x


def _biased(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """Return a float32 copy with the bias added. The bias is finite, so it may be added before the mask."""
    x = torch.empty(logits.shape, device=logits.device).copy_(logits)
    if edits.bias.shape[0]:
        row, token = edits.biased
        x.view(-1).index_add_(0, row * x.shape[1] + token, edits.bias)
    return x


def edit_logits_reference(logits: torch.Tensor, edits: LogitEdits) -> torch.Tensor:
    """Compute `edit_logits` in plain PyTorch."""
    vocab, out = logits.shape[1], logits.float()
    x = out[edits.rows]
    if len(edits.allowed):
        bits = (edits.allowed.unsqueeze(2) >> torch.arange(32, device=x.device)) & 1
        allowed = bits.flatten(1)[:, :vocab].bool()[edits.mask.clamp(min=0)]
        x = x.where(allowed | (edits.mask < 0).unsqueeze(1) | ~x.isfinite(), -torch.inf)
    out = out.index_copy(0, edits.rows, x)
    row, token = edits.biased
    out[row, token] += edits.bias
    x = out[edits.rows]

    penalty = edits.penalty.unsqueeze(1)
    repeated = (edits.seen[edits.slot.where(edits.penalty != 1, 0)] > 0) & (penalty != 1)
    x = torch.where(repeated, torch.where(x < 0, x * penalty, x / penalty), x)
    counted = (edits.frequency != 0) | (edits.presence != 0)
    counts = edits.counts[edits.slot.where(counted, 0)].where(counted.unsqueeze(1), 0)
    x = x - edits.frequency.unsqueeze(1) * counts
    x = x - edits.presence.unsqueeze(1) * (counts > 0)
    return out.index_copy(0, edits.rows, x)
