"""Memory of one device of a stage: weights, activations, the engine's own, and the KV blocks that fit beside them."""

from dataclasses import dataclass

from xcore.specs.cluster import ClusterSpec
from xcore.specs.engine_memory import DATA_SHEET, EngineMemory
from xcore.specs.model import ModelSpec, activation_bytes
from xcore.specs.schedule import BLOCK_SIZE, Stage


@dataclass(frozen=True)
class StageMemory:
    """What one device of a stage holds, in bytes."""

    weights: float
    workspace: float
    """Activations of the largest step."""
    block: float
    """One KV block, all of the stage's layers."""
    usable: float
    """What may be used."""
    held: float = DATA_SHEET.base_bytes
    """The engine's, whatever a step computes."""
    kv_share: float = 1.0
    """The most that keys and values get of what all else leaves."""

    @property
    def free(self) -> float:
        """What is left for keys and values; negative where the rest alone doesn't fit."""
        return (self.usable - self.weights - self.workspace - self.held) * self.kv_share

    @property
    def blocks(self) -> int:
        """KV blocks that fit beside the rest; 0 or less where the weights alone don't fit."""
        return int(self.free // self.block) if self.block else (2**62 if self.free >= 0 else -1)

    def bytes(self, kv_blocks: int) -> float:
        """Bytes in use with a pool of so many blocks."""
        return self.weights + self.workspace + self.held + kv_blocks * self.block

    def share(self, kv_blocks: int) -> float:
        """The use of what may be used, with a pool of so many blocks; above 1 for more than fit."""
        return (self.weights + self.workspace + self.held + kv_blocks * self.block / self.kv_share) / self.usable


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device of a stage, by what the largest step computes."""

    idle: StageMemory
    """Without any activations."""
    token: float
    """Bytes of a token at the widest moment of a layer."""
    kept: float
    """Bytes of a token while the sampler runs."""
    sequence: float
    """Bytes of a sequence in the sampler."""

    def at(self, tokens: float, sequences: float) -> StageMemory:
        """With steps of up to `tokens` tokens, of which up to `sequences` sequences are sampled."""
        idle = self.idle
        workspace = max(self.token * int(tokens), self.kept * int(tokens) + self.sequence * int(sequences))
        return StageMemory(idle.weights, workspace, idle.block, idle.usable, idle.held, idle.kv_share)


def device_memory(
    model: ModelSpec,
    cluster: ClusterSpec,
    stage: Stage,
    dtype: str,
    kv_dtype: str,
    ends: tuple[bool, bool],
    engine: EngineMemory = DATA_SHEET,
) -> DeviceMemory:
    """Memory of one device of a stage under an engine; `ends`: whether it holds the embedding and the head."""
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
    value = activation_bytes(dtype)
    weights += outer * value / stage.tp
    idle = StageMemory(
        weights,
        0.0,
        BLOCK_SIZE * (stop - start) * model.kv_bytes(stage.tp, kv_dtype),
        engine.usable_bytes(cluster),
        engine.held_bytes(stage.tp, stop - start + encoder_stop - encoder_start, cluster),
        cluster.memory_fraction if engine.of_rest else 1.0,
    )
    # The widest moment of a layer: its input, the feed-forward's inner product, and the result.
    if engine.weights_alone:
        return DeviceMemory(idle, 0.0, 0.0, 0.0)
    width = 2 * model.hidden + (3 if model.gated else 2) * model.ffn / stage.tp
    # Every rank of a group samples from the whole vocabulary.
    sampled = model.vocab * (value + engine.logit_bytes) if last and engine.logit_bytes else 0.0
    return DeviceMemory(idle, width * value, model.hidden * value if sampled else 0.0, sampled)
