"""Dealing: how the programs of one device share a batch's decoding attention."""

from dataclasses import dataclass

import numpy as np

from exegpt.kernels.attention import programs_of_decoding
from exegpt.kernels.work_list import deal
from xrunner.models.cache import KVCache
from xrunner.models.decoder import Model


@dataclass(frozen=True)
class Dealing:
    """The inputs of work lists other than the sequences: the device, its shard of the heads, and the layers' window."""

    programs: int
    """Programs for each KV head"""
    kv_heads: int
    window: int | None

    @staticmethod
    def of(model: Model, cache: KVCache) -> "Dealing | None":
        """Return the dealing of a model; None where work lists are not used.

        These are the CPU, FlashInfer's attention, and an encoder-decoder, whose two attentions see different parts of a
        sequence. Where layers' windows differ, lists are balanced for layers that see everything.
        """
        values = cache.values[0]
        programs = programs_of_decoding(model.share.heads, values)
        if programs is None or model.spec.encoder_layers or model.attention != "triton":
            return None
        windows = {layer.window for layer in model.layers}
        return Dealing(programs, values.shape[1], windows.pop() if len(windows) == 1 else None)

    def deal(self, seq_lens: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the arrays of a `WorkList` for one new token of each of these sequences, int32 [sequences]."""
        return deal(seq_lens, self.programs, self.kv_heads, self.window)
