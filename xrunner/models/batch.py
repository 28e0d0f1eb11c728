"""Batch: the tensors of one iteration, its prompts unpadded one after the other."""

from dataclasses import dataclass
from typing import Any

import torch

from exegpt.kernels.attention import attention
from exegpt.kernels.attention_flashinfer import FlashInfer
from exegpt.kernels.log_probs import LogProbs, PromptLogProbs
from exegpt.kernels.sampling import Sampling
from exegpt.kernels.work_list import WorkList

_EXACT_ROWS = 128
_ROWS_STEP = 8


def computed_rows(tokens: int) -> int:
    """Rows that an iteration on so many tokens computes.

    The CPU's matrix products are generated anew for every number of rows, for milliseconds: beyond 128, rows of
    zeros fill up to a multiple of eight, so that there are few numbers and a warm-up has seen them.
    """
    return tokens if tokens <= _EXACT_ROWS else -(-tokens // _ROWS_STEP) * _ROWS_STEP


@dataclass(frozen=True)
class AttentionBatch:
    """A run of tokens that one call of the attention kernel takes; see `kernels/attention.py`."""

    begin: int
    end: int
    """Its tokens are `begin` to `end` of the batch's."""
    tables: torch.Tensor
    """int32 [sequences, most blocks]"""
    offsets: torch.Tensor
    """int32 [sequences + 1], counted from `begin`"""
    contexts: torch.Tensor
    """int32 [sequences]"""
    starts: torch.Tensor | None = None
    """int32 [sequences]: of an encoder-decoder's decoding sequences, where their own tokens begin in the cache, after
    their input's; None for prompts, and in a decoder-only model."""
    work: WorkList | FlashInfer | None = None
    """Where every sequence has one token, how a GPU's programs share the keys; or FlashInfer's plan of this part; None:
    see `kernels/attention.py`."""


@dataclass(frozen=True)
class Batch:
    """All tokens of one iteration, prompts' and decoding ones one after the other, then rows that only fill up."""

    tokens: torch.Tensor
    """int64 [rows]"""
    positions: torch.Tensor
    """int64 [rows]: place in its sequence"""
    slots: torch.Tensor
    """int64 [tokens]: place in the cache, block · block_size + offset"""
    attention: tuple[AttentionBatch, ...]
    rows: torch.Tensor | None
    """int64 [sequences]: the rows that are followed by a new token; None where all are"""
    sampling: Sampling | None = None
    """How these tokens are chosen; None: greedily."""
    logprobs: LogProbs | None = None
    """Of which of these tokens log-probabilities are asked for; None: of none."""
    prompt_logprobs: PromptLogProbs | None = None
    """The same of tokens of prompts."""


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, parts: tuple[AttentionBatch, ...], **options: Any
) -> torch.Tensor:
    """The attention of q [rows, heads, head_size] part by part, with the kernel's options: [rows, heads, head_size].

    The batch's keys and values are in the cache. Rows after the last part, which only fill up, give zeros.
    """
    attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for part in parts:
        own = slice(part.begin, part.end)
        arrays = part.tables, part.offsets, part.contexts
        attention(q[own], keys, values, *arrays, attended[own], starts=part.starts, work=part.work, **options)
    attended[parts[-1].end :].zero_()  # `= 0` would launch a kernel for the zero, even where there is no such row
    return attended
