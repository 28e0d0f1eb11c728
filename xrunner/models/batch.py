"""Batch: the tensors of one iteration; its prompts follow each other without padding."""

from dataclasses import dataclass

import torch

from exegpt.kernels.attention import attention
from exegpt.kernels.attention_flashinfer import FlashInfer
from exegpt.kernels.log_probs import LogProbs, PromptLogProbs
from exegpt.kernels.sampling import Sampling
from exegpt.kernels.work_list import WorkList
from xcore.arrays import Integers32

_EXACT_ROWS = 128
_ROWS_STEP = 8


def computed_rows(tokens: int) -> int:
    """Return the number of rows that an iteration on `tokens` tokens computes.

    The CPU compiles its matrix product for every new number of rows, which takes milliseconds. Beyond 128, rows are
    therefore padded to a multiple of eight: a warm-up runs these few numbers.
    """
    return tokens if tokens <= _EXACT_ROWS else -(-tokens // _ROWS_STEP) * _ROWS_STEP


@dataclass(frozen=True)
class AttentionBatch:
    """A range of tokens for one call of the attention kernel; see `kernels/attention.py`."""

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
    """int32 [sequences]: the cache position where a sequence's output tokens begin, after its input's.

    Only for an encoder-decoder's decoding sequences; None for prompts, and in a decoder-only model.
    """
    work: WorkList | FlashInfer | None = None
    """The division of the work, or None: see `kernels/attention.py`.

    If every sequence has one token: how a GPU's programs share the keys. With FlashInfer: its plan of this part.
    """
    max_query_len: int | None = None
    """How many new tokens a sequence has at most, if the shapes don't tell: in a graph that other prompts will use."""


@dataclass(frozen=True, eq=False)
class AttentionArrays:
    """The arrays of an `AttentionBatch`, on the host."""

    begin: int
    end: int
    tables: Integers32
    offsets: Integers32
    contexts: Integers32
    starts: Integers32 | None = None

    @property
    def arrays(self) -> list[Integers32]:
        """Return the arrays that there are, in order."""
        return [self.tables, self.offsets, self.contexts, *([] if self.starts is None else [self.starts])]


@dataclass(frozen=True)
class Batch:
    """All tokens of one iteration: tokens of prompts, then decoding tokens, then padding rows."""

    tokens: torch.Tensor
    """int64 [rows]"""
    positions: torch.Tensor
    """int64 [rows]: position in its sequence"""
    slots: torch.Tensor
    """int64 [tokens], in a graph [rows]: slot in the cache, block · block_size + offset"""
    attention: tuple[AttentionBatch, ...]
    rows: torch.Tensor | None
    """int64 [sequences]: the rows after which a token is sampled; None: all rows"""
    sampling: Sampling | None = None
    """How the tokens are sampled; None: greedily."""
    logprobs: LogProbs | None = None
    """The sampled tokens whose log-probabilities are asked for; None: no token's."""
    prompt_logprobs: PromptLogProbs | None = None
    """The prompt tokens whose log-probabilities are asked for; None: no token's."""


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    parts: tuple[AttentionBatch, ...],
    *,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of q [rows, heads, head_size], part by part: [rows, heads, head_size].

    The further arguments are the kernel's. The batch's keys and values are in the cache. Padding rows after the
    last part give zeros; within a part, in a graph, anything.
    """
    attended = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for part in parts:
        own = slice(part.begin, part.end)
        arrays = part.tables, part.offsets, part.contexts
        attention(
            q[own],
            keys,
            values,
            *arrays,
            attended[own],
            scale=scale,
            window=window,
            causal=causal,
            starts=part.starts,
            bias=bias,
            work=part.work,
            max_query_len=part.max_query_len,
        )
    attended[parts[-1].end :].zero_()  # `= 0` would launch a kernel for the zero, even where there is no such row
    return attended
