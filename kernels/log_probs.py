"""Log-probabilities of sampled tokens and of the likeliest ones: the model's own, from unedited logits."""

from dataclasses import dataclass

import torch

from exegpt.kernels import gpu_device
from exegpt.kernels.log_probs_cpu import log_probs_rows
from exegpt.kernels.numba_threads import follow_torch


@dataclass(frozen=True)
class LogProbs:
    """The rows whose log-probabilities are requested."""

    rows: torch.Tensor
    """int64 [n], on the logits' device."""
    most: int
    """Number of likeliest tokens for each row."""


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, asked: LogProbs) -> torch.Tensor:
    """Return log-probabilities of logits [rows, vocab] with the token of each row, int64 [rows].

    Returns:
        float64 [n, 1 + 2·most], for each requested row: its token's log-probability, the greatest log-probabilities,
        and their tokens; of equals the lower token comes first. A row without a token has no meaningful values.
    """
    tokens = tokens.clamp(min=0)
    if gpu_device.on_gpu(logits):  # no kernel of its own: requests are rare, and each row is read only a few times
        return log_probs_reference(logits, tokens, asked)
    out = torch.empty(len(asked.rows), 1 + 2 * asked.most, dtype=torch.float64)
    follow_torch()
    log_probs_rows(logits.float().contiguous().numpy(), asked.rows.numpy(), tokens.numpy(), out.numpy())
    return out


def log_probs_reference(logits: torch.Tensor, tokens: torch.Tensor, asked: LogProbs) -> torch.Tensor:
    """Compute `log_probs` in plain PyTorch."""
    # Not `logsumexp`: it may add one large row in another order than several rows.
    chosen = logits.index_select(0, asked.rows).float()
    x = torch.log_softmax(chosen, dim=1)
    own = x.gather(1, tokens.index_select(0, asked.rows).unsqueeze(1))
    bits = (chosen + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    places = torch.arange(logits.shape[1] - 1, -1, -1, device=x.device)
    keys = (ordered.long() << 32) | places
    best = keys.topk(asked.most, dim=1).indices
    return torch.cat([column.double() for column in (own, x.gather(1, best), best)], dim=1)


@dataclass(frozen=True)
class PromptLogProbs:
    """Tokens of prompts whose log-probabilities are requested."""

    rows: torch.Tensor
    """int64 [n]: rows of the batch's states; a token follows after each."""
    tokens: torch.Tensor
    """int64 [n]: these tokens."""
    most: int
    """As in `LogProbs`."""
