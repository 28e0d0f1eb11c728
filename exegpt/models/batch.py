"""Batch: the tensors of one iteration, without padding."""

from dataclasses import dataclass

import torch


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


@dataclass(frozen=True)
class Batch:
    """All tokens of one iteration, prompts' and decoding ones one after the other."""

    tokens: torch.Tensor
    """int64 [tokens]"""
    positions: torch.Tensor
    """int64 [tokens]: place in its sequence"""
    slots: torch.Tensor
    """int64 [tokens]: place in the cache, block · block_size + offset"""
    attention: tuple[AttentionBatch, ...]
    rows: torch.Tensor | None
    """int64 [sequences]: the tokens that are followed by a new one; None where all are"""
