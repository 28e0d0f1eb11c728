"""Plans of a batch's attention on one device: FlashInfer's, Triton's work lists, and the choice between the two."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from exegpt.kernels import attention_flashinfer
from exegpt.kernels.attention import programs_of_decoding
from exegpt.kernels.attention_flashinfer import FlashInfer
from exegpt.kernels.work_list import deal
from xcore.arrays import Integers32
from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xrunner.models.batch import AttentionArrays, AttentionBatch, Batch
from xrunner.models.cache import KVCache
from xrunner.models.decoder import Model
from xrunner.models.weights import torch_dtype

CHOICES = ("triton", "flashinfer", "auto")


def choose_attention(
    asked: str | None, spec: ModelSpec, dtype: str, device: torch.device
) -> tuple[str, tuple[str, ...]]:
    """Return the library that computes a model's attention on a device: `triton` (the default) or `flashinfer`.

    For `auto`, a sentence that names it is returned too.

    Raises:
        InputError: The name is unknown, or FlashInfer was chosen and can't compute it.
    """
    if asked not in (None, *CHOICES):
        raise InputError(f"Attention '{asked}' is not known: use one of {', '.join(CHOICES)}.")
    if asked in (None, "triton"):
        return "triton", ()
    reason = _why_not(spec, dtype, device)
    if asked == "auto":
        fallback = "triton" if device.type == "cuda" else "the CPU's"
        chosen = f"{fallback}, since {reason}" if reason else described("flashinfer", device)
        return ("triton" if reason else "flashinfer"), (f"attention: {chosen}",)
    check_attention("flashinfer", spec, dtype, device)
    return "flashinfer", ()


def check_attention(attention: str, spec: ModelSpec, dtype: str, device: torch.device) -> None:
    """Raise InputError if FlashInfer was chosen but can't compute the model's attention."""
    if attention == "flashinfer" and (reason := _why_not(spec, dtype, device)):
        raise InputError(f"--attention flashinfer can't compute '{spec.name}' here: {reason}. Pass --attention triton.")


def described(attention: str, device: torch.device) -> str | None:
    """Return the library that computes attention, with FlashInfer's version; None on the CPU, which has no choice."""
    if device.type != "cuda":
        return None
    return attention if attention == "triton" else f"flashinfer {attention_flashinfer.flashinfer().__version__}"


def _why_not(spec: ModelSpec, dtype: str, device: torch.device) -> str | None:
    if spec.encoder_layers:
        return "FlashInfer has no position bias, which an encoder-decoder's attention adds"
    return attention_flashinfer.why_not(device, torch_dtype(dtype), spec.head_size)


class Planning:
    """FlashInfer's plans for one device's batches over its cache.

    `graph`: the sequences and the most blocks of a CUDA graph's batch, for plans that a graph uses.
    """

    def __init__(self, model: Model, cache: KVCache, workspace: torch.Tensor, graph: tuple[int, int] | None = None):
        self._model, self._cache, self._workspace, self._graph = model, cache, workspace, graph
        self._parts: list[FlashInfer] = []
        """One for each part of a batch: all parts are planned before the first is computed."""

    @staticmethod
    def of(model: Model, cache: KVCache) -> "Planning | None":
        """Return the planning of a model over its cache; None unless FlashInfer computes its attention."""
        if model.attention != "flashinfer":
            return None
        return Planning(model, cache, FlashInfer.new_workspace(model.device))

    def for_graph(self, sequences: int, blocks: int) -> "Planning":
        """Return the planning of a CUDA graph's batches, in the same workspace."""
        return Planning(self._model, self._cache, self._workspace, (sequences, blocks))

    def plan(self, attention: Sequence[AttentionArrays | AttentionBatch]) -> list[FlashInfer]:
        """Plan the parts of a batch.

        The plans are valid until the next batch is planned.
        """
        while len(self._parts) < len(attention):
            windows = {layer.window for layer in self._model.layers}
            heads, values = self._model.share.heads, self._cache.values[0]
            self._parts.append(FlashInfer(heads, values, windows, self._workspace, graph=self._graph))
        parts = zip(self._parts, attention, strict=False)
        return [part.plan(own.tables, own.offsets, own.contexts) for part, own in parts]

    def planned(self, batch: Batch, attention: Sequence[AttentionArrays | AttentionBatch]) -> Batch:
        """Return the batch with the plans of its parts."""
        parts = zip(batch.attention, self.plan(attention), strict=True)
        return replace(batch, attention=tuple(replace(part, work=plan) for part, plan in parts))


@dataclass(frozen=True)
class Dealing:
    """The inputs of work lists other than the sequences: the device, its shard of the heads, and the layers' window."""

    programs: int
    """Programs for each KV head"""
    kv_heads: int
    window: int | None

    @staticmethod
    def of(model: Model, cache: KVCache) -> "Dealing | None":
        """Return the dealing of a model; None if work lists are not used.

        They are not used on the CPU, with FlashInfer's attention, and for an encoder-decoder, whose two attentions see
        different parts of a sequence. If layers' windows differ, lists are balanced for layers that see everything.
        """
        values = cache.values[0]
        programs = programs_of_decoding(model.share.heads, values)
        if programs is None or model.spec.encoder_layers or model.attention != "triton":
            return None
        windows = {layer.window for layer in model.layers}
        return Dealing(programs, values.shape[1], windows.pop() if len(windows) == 1 else None)

    def deal(self, seq_lens: Integers32) -> tuple[Integers32, ...]:
        """Return the arrays of a `WorkList` for one new token of each of these sequences, int32 [sequences]."""
        return deal(seq_lens, self.programs, self.kv_heads, self.window)
