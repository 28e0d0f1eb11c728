"""Memory of one device of a stage: weights, activations, a reserve, and the KV blocks that fit beside them."""

from dataclasses import dataclass

from exegpt.cluster import ClusterSpec
from exegpt.model import ModelSpec, activation_bytes
from exegpt.schedule import BLOCK_SIZE, Stage

RESERVE_BYTES = 2**28
"""The allocator's fragments, the runtime's own buffers."""


@dataclass(frozen=True)
class StageMemory:
    """What one device of a stage holds, in bytes."""

    weights: float
    workspace: float
    block: float
    """One KV block, all of the stage's layers."""
    usable: float
    """What may be used."""

    @property
    def blocks(self) -> int:
        """KV blocks that fit beside the rest; 0 or less where the weights alone don't fit."""
        free = self.usable - self.weights - self.workspace - RESERVE_BYTES
        return int(free // self.block) if self.block else (2**62 if free >= 0 else -1)

    def at_once(self, tokens: float) -> "StageMemory":
        """Of a device that computes so many tokens at once, made of one that computes a single one."""
        return StageMemory(self.weights, self.workspace * int(tokens), self.block, self.usable)

    def bytes(self, kv_blocks: int) -> float:
        """Bytes in use with a pool of so many blocks."""
        return self.weights + self.workspace + RESERVE_BYTES + kv_blocks * self.block


def stage_memory(
    model: ModelSpec,
    cluster: ClusterSpec,
    stage: Stage,
    dtype: str,
    kv_dtype: str,
    tokens: int,
    ends: tuple[bool, bool],
) -> StageMemory:
    """Memory of one device of a stage that computes up to `tokens` tokens at once; `ends`: whether it holds the
    embedding and the head.
    """
    start, stop = stage.decoder_layers or (0, 0)
    encoder_start, encoder_stop = stage.encoder_layers or (0, 0)
    first, last = ends
    weights = (stop - start) * model.layer_bytes(stage.tp, dtype)
    weights += (encoder_stop - encoder_start) * model.layer_bytes(stage.tp, dtype, encoder=True)
    shared = first and last and model.tied_embeddings
    outer = first * model.embedding_parameters + last * (
        model.head_parameters + model.tied_embeddings * model.vocab * model.hidden
    )
    outer -= shared * model.vocab * model.hidden
    weights += outer * activation_bytes(dtype) / stage.tp
    # The widest moment of a layer: its input, the feed-forward's inner product, and the result.
    width = 2 * model.hidden + (3 if model.gated else 2) * model.ffn / stage.tp
    workspace = tokens * width * activation_bytes(dtype)
    block = BLOCK_SIZE * (stop - start) * model.kv_bytes(stage.tp, kv_dtype)
    return StageMemory(weights, workspace, block, cluster.device.memory_bytes * cluster.memory_fraction)
