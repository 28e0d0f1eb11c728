"""Model: a decoder-only transformer, as its layers and the modules before and after them."""

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
    """One layer in two halves; the attention kernel runs between them."""

    window: int | None
    """How many tokens a token sees, itself and those before it; None for all."""

    def before_attention(
        self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Compute the queries: x [rows, hidden], positions int64 [rows] → q [rows, heads, head_size].

        Caches the keys and values of the first tokens, as many as there are slots, int64 [tokens]. The rows after them
        are padding.
        """

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output [rows, hidden] from x and the attention's output.

        x [rows, hidden] is overwritten; attended is [rows, heads, head_size].
        """


class Ends(Protocol):
    """The modules before the first layer and after the last; a stage may hold one of them, or neither."""

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed tokens: int64 [tokens], positions int64 [tokens] → [tokens, hidden]."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits: [rows, hidden] → [rows, vocab]."""


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer or a stage of one: some of its layers, each complete or a shard."""

    spec: ModelSpec
    """The whole model's sizes."""
    dtype: str
    """Dtype of the activations, or of quantised weights, which says that of the activations too (`BYTES`)."""
    kv_dtype: str
    """The dtype of keys and values: that of activations, or int8."""
    layers: tuple[Layer, ...]
    ends: Ends
    eos: frozenset[int]
    """Tokens that end an output."""
    shard: Shard = WHOLE
    head: bool = True
    """Whether it outputs tokens; else it outputs the states of every row for the next stage."""
    start: tuple[int, ...] = ()
    """The tokens with which an encoder-decoder's output begins in its cache, before the first sampled token."""
    device: torch.device = CPU
    """Where its weights are, and where caches and batches must be."""
    attention: str = "triton"
    """The kernels that compute attention on a GPU: `triton` or `flashinfer`; see `models/attention_planning.py`."""

    def new_cache(self, blocks: int, block_size: int) -> KVCache:
        """Return an empty KV cache for this model's layers."""
        return KVCache.allocate(self.share, self.cached_layers, blocks, block_size, self.kv_dtype, self.device)

    @property
    def cached_layers(self) -> int:
        """Number of layers in the model's KV cache."""
        return len(self.layers)

    @property
    def share(self) -> ModelSpec:
        """The sizes of this device's shard."""
        return self.shard.share(self.spec)

    @torch.inference_mode()
    def sample(
        self, x: torch.Tensor, sampling: Sampling | None = None, logprobs: LogProbs | None = None
    ) -> torch.Tensor:
        """Apply the final norm and the head, and sample: [rows, hidden] → int64 [rows]; greedily without a sampling.

        With `logprobs`, the bits of `log_probs` follow.
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
        """Run one iteration: cache the batch's tokens, and return the states [rows, hidden] after its last layer.

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
        """Return the next token of every row that needs one, given the states [rows, hidden] of all rows, as `sample`.

        If requested, the bits of the prompts' `log_probs` follow.
        """
        prompts = [] if batch.prompt_logprobs is None else [self._prompt_log_probs(x, batch.prompt_logprobs)]
        x = x if batch.rows is None else x[batch.rows]
        if len(x):
            tokens = self.sample(x, batch.sampling, batch.logprobs)
        else:
            tokens = torch.empty(0, dtype=torch.int64, device=x.device)
        return torch.cat([tokens, *prompts]) if prompts else tokens

    def _prompt_log_probs(self, x: torch.Tensor, asked: PromptLogProbs) -> torch.Tensor:
        """Return the bits of the prompt tokens' `log_probs`, given all rows' states [rows, hidden]: int64, flat."""
        made = []
        for rows, tokens in zip(asked.rows.split(_LOGITS_ROWS), asked.tokens.split(_LOGITS_ROWS), strict=True):
            every = LogProbs(torch.arange(len(rows), device=x.device), asked.most)
            made.append(log_probs(self.ends.logits(x[rows]), tokens, every))
        return torch.cat(made).view(torch.int64).flatten()

    @torch.inference_mode()
    def step(self, batch: Batch, cache: KVCache, x: torch.Tensor | None = None) -> torch.Tensor:
        """Run `forward`, then `next_tokens`."""
        return self.next_tokens(self.forward(batch, cache, x), batch)
