"""Model: a decoder-only transformer as its layers and what comes before and after them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from exegpt.kernels.argmax import argmax
from exegpt.kernels.log_probs import LogProbs, PromptLogProbs, log_probs
from exegpt.kernels.sampling import Sampling, sample
from xcore.specs.model import ModelSpec
from xrunner.models.batch import Batch, attend
from xrunner.models.cache import KVCache
from xrunner.models.device import CPU
from xrunner.models.shard import WHOLE, Shard

Between = Callable[[], object]
"""What a rank does between two layers."""

_LOGITS_ROWS = 64
"""Rows whose logits are held at a time, for prompts' log-probabilities: a row of all tokens can take a megabyte."""


class Layer(Protocol):
    """One layer in two halves, between which the attention kernel runs."""

    window: int | None
    """How many tokens a token sees, itself and those before it; None for all."""

    def before_attention(
        self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """x [rows, hidden], positions int64 [rows] → q [rows, heads, head_size]; caches the keys and values of the
        first tokens, as many as there are slots, int64 [tokens]. Rows behind them only fill up.
        """

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden], which is overwritten, attended [rows, heads, head_size] → the layer's output
        [rows, hidden].
        """


class Ends(Protocol):
    """What comes before the first layer and after the last; a stage may hold one of them, or neither."""

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [tokens], int64 [tokens] → [tokens, hidden]."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]."""


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer or a stage of one: some of its layers, whole or a shard of each."""

    spec: ModelSpec
    """The whole model's sizes."""
    dtype: str
    layers: tuple[Layer, ...]
    ends: Ends
    eos: frozenset[int]
    """Tokens that end an output."""
    shard: Shard = WHOLE
    head: bool = True
    """Whether tokens come out; else the states of every row, which the next stage takes."""
    start: tuple[int, ...] = ()
    """What an encoder-decoder's output begins with in its cache, before the first token that it makes."""
    device: torch.device = CPU
    """Where its weights are, and where caches and batches must be."""
    attention: str = "triton"
    """Whose kernels compute attention on a GPU: `triton` or `flashinfer`; see `models/planning.py`."""

    def new_cache(self, blocks: int, block_size: int) -> KVCache:
        """An empty KV cache for this model's layers."""
        return KVCache.allocate(self.share, self.cached_layers, blocks, block_size, self.dtype, self.device)

    @property
    def cached_layers(self) -> int:
        """Layers that its KV cache has tensors for."""
        return len(self.layers)

    @property
    def share(self) -> ModelSpec:
        """The sizes of this device's shard."""
        return self.shard.share(self.spec)

    @torch.inference_mode()
    def sample(
        self, x: torch.Tensor, sampling: Sampling | None = None, logprobs: LogProbs | None = None
    ) -> torch.Tensor:
        """Final norm, head and choice, greedy without a sampling: [rows, hidden] → int64 [rows], then, where asked for,
        the bits of `log_probs`.
        """
        logits = self.ends.logits(x)
        tokens = argmax(logits) if sampling is None else sample(logits, sampling)
        if logprobs is None:
            return tokens
        return torch.cat([tokens, log_probs(logits, tokens, logprobs).view(torch.int64).flatten()])

    @torch.inference_mode()
    def forward(
        self, batch: Batch, cache: KVCache, x: torch.Tensor | None = None, between: Between = lambda: None
    ) -> torch.Tensor:
        """One iteration: caches the batch's tokens and returns the states [rows, hidden] after the last of its layers.

        A stage without the embedding gets `x`, the states [rows, hidden] of the stage before, which are overwritten.
        `between` is called after each layer, when a GPU may still compute it.
        """
        x = self.ends.embed(batch.tokens, batch.positions) if x is None else x
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            q = layer.before_attention(x, batch.positions, keys, values, batch.slots)
            x = layer.after_attention(x, attend(q, keys, values, batch.attention, window=layer.window))
            between()
        return x

    @torch.inference_mode()
    def next_tokens(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The next token of every row that needs one, of the states [rows, hidden] of all, as `sample`; then, where
        asked for, the bits of prompts' `log_probs`.
        """
        prompts = [] if batch.prompt_logprobs is None else [self._prompt_log_probs(x, batch.prompt_logprobs)]
        x = x if batch.rows is None else x[batch.rows]
        if len(x):
            tokens = self.sample(x, batch.sampling, batch.logprobs)
        else:
            tokens = torch.empty(0, dtype=torch.int64, device=x.device)
        return torch.cat([tokens, *prompts]) if prompts else tokens

    def _prompt_log_probs(self, x: torch.Tensor, asked: PromptLogProbs) -> torch.Tensor:
        """The bits of `log_probs` of prompts' tokens, of the states [rows, hidden] of all: int64, flat."""
        made = []
        for rows, tokens in zip(asked.rows.split(_LOGITS_ROWS), asked.tokens.split(_LOGITS_ROWS), strict=True):
            every = LogProbs(torch.arange(len(rows), device=x.device), asked.most)
            made.append(log_probs(self.ends.logits(x[rows]), tokens, every))
        return torch.cat(made).view(torch.int64).flatten()

    @torch.inference_mode()
    def step(self, batch: Batch, cache: KVCache, x: torch.Tensor | None = None) -> torch.Tensor:
        """`forward`, then `next_tokens`."""
        return self.next_tokens(self.forward(batch, cache, x), batch)
