"""Sampling: logit edits, temperature, min-p, top-k, top-p, and a random draw that depends only on a row's own seed.

A token is drawn by a race: token t arrives after an exponential time (`philox.arrival_times`) divided by its
probability, and the first one wins. A row's token is therefore the same in every batch and on every device, up to the
rounding of logits that are nearly equal.
"""

import math
from dataclasses import dataclass

import torch

from exegpt.kernels import gpu_device
from exegpt.kernels.argmax import NO_TOKEN
from exegpt.kernels.logit_edits import LogitEdits, edit_logits, edit_logits_reference
from exegpt.kernels.numba_threads import follow_torch
from exegpt.kernels.philox import arrival_times
from exegpt.kernels.sampling_cpu import sample_rows

_NONE = torch.empty(0)


@dataclass(frozen=True)
class Sampling:
    """How each row's token is chosen: tensors of one element per row, except `seen`, on the logits' device."""

    temperature: torch.Tensor
    """float32: divisor of the logits; 0 takes the greatest, the first of equals."""
    top_k: torch.Tensor
    """int32: keeps only this many of the greatest logits, and those equal to the last of them; 0 for all."""
    top_p: torch.Tensor
    """float32: of those, keeps only the likeliest that together have this share of their probability; 1 for all."""
    penalty: torch.Tensor
    """float32: repetition penalty of the tokens that a sequence has; 1 for none.

    It divides positive logits and multiplies negative ones.
    """
    seed: torch.Tensor
    """int64: seed of the row."""
    position: torch.Tensor
    """int64: the next token's position in its sequence, modulo 2^32; other positions give other random numbers."""
    slot: torch.Tensor
    """int64: its sequence's row of `seen`; any row of it if there is no penalty."""
    seen: torch.Tensor
    """uint8 [slots, vocab], at least one slot: whether a token is in a sequence's prompt or output so far."""
    log_min_p: torch.Tensor | None = None
    """float32: logarithm of min-p, -inf for none; None: no row has one.

    Tokens are dropped, before top-k and top-p, if their logit over the temperature is below the greatest by more than
    this.
    """
    edits: LogitEdits | None = None
    """Further changes of logits, which come first; None: nothing."""


def sample(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return every row's next token, or `NO_TOKEN`: logits [rows, vocab] → int64 [rows]."""
    if sampling.edits is not None:
        logits = edit_logits(logits, sampling.edits)
    if gpu_device.on_gpu(logits):
        from exegpt.kernels.sampling_gpu import sample_gpu

        return sample_gpu(logits, sampling)
    out = torch.empty(len(logits), dtype=torch.int64)
    follow_torch()
    s = sampling
    log_min_p = _NONE if s.log_min_p is None else s.log_min_p
    rows = (s.temperature, s.top_k, s.top_p, log_min_p, s.penalty, s.seed, s.position, s.slot, s.seen)
    sample_rows(logits.float().contiguous().numpy(), *(t.contiguous().numpy() for t in rows), out.numpy())
    return out


def sample_reference(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Compute `sample` in plain PyTorch, by sorting."""
    vocab = logits.shape[1]
    x = logits.float() if sampling.edits is None else edit_logits_reference(logits, sampling.edits)
    penalty = sampling.penalty.unsqueeze(1)
    repeated = (sampling.seen[sampling.slot] > 0) & (penalty != 1)
    x = torch.where(repeated, torch.where(x < 0, x * penalty, x / penalty), x)
    greedy = sampling.temperature == 0
    x = x / sampling.temperature.where(~greedy, 1).unsqueeze(1)

    best = x.sort(dim=1, descending=True).values
    k = sampling.top_k.long().where((sampling.top_k > 0) & (sampling.top_k < vocab), vocab)
    kept = best >= best.gather(1, k.unsqueeze(1) - 1)
    if sampling.log_min_p is not None:
        kept &= best >= best[:, :1] + sampling.log_min_p.unsqueeze(1)
    mass = (best - best[:, :1]).exp() * kept
    before = mass.cumsum(1) - mass
    wanted = sampling.top_p.unsqueeze(1) * mass.sum(1, keepdim=True)
    kept &= (before < wanted) | (sampling.top_p >= 1).unsqueeze(1)
    kept[:, 0] = True
    least = best.where(kept, math.inf).amin(1, keepdim=True)

    times = arrival_times(sampling.seed, sampling.position, vocab)
    drawn = (x - times.log()).where(x >= least, -math.inf)
    return x.where(greedy.unsqueeze(1), drawn).argmax(1).where(best[:, 0].isfinite(), NO_TOKEN)
