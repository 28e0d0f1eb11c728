"""Memory of one device of a stage: weights, activations, the engine's own, and the KV blocks that fit."""

from dataclasses import dataclass, replace

from xcore.specs.cluster import ClusterSpec
from xcore.specs.engine_memory import DATA_SHEET, EngineMemory
from xcore.specs.model import ModelSpec, activation_bytes
from xcore.specs.schedule import BLOCK_SIZE, Stage
from xcore.specs.speculation import Speculation


@dataclass(frozen=True)
class StageMemory:
    """Memory use of one device of a stage, in bytes."""

    weights: float
    workspace: float
    """Activations of the largest step."""
    block: float
    """One KV block, over all of the stage's layers."""
    usable: float
    """Memory that may be used."""
    held: float = DATA_SHEET.base_bytes
    """Memory that the engine holds, whatever a step computes."""
    kv_share: float = 1.0
    """The largest share of the remaining memory that keys and values may take."""

    @property
    def free(self) -> float:
        """Return the bytes left for keys and values; negative if everything else alone doesn't fit."""
        return (self.usable - self.weights - self.workspace - self.held) * self.kv_share

    @property
    def blocks(self) -> int:
        """Return the KV blocks that fit; 0 or less if everything else alone doesn't fit."""
        return int(self.free // self.block) if self.block else (2**62 if self.free >= 0 else -1)

    def bytes(self, kv_blocks: int) -> float:
        """Return the bytes in use with a pool of `kv_blocks` blocks."""
        return self.weights + self.workspace + self.held + kv_blocks * self.block

    def share(self, kv_blocks: int) -> float:
        """Return the used share of the usable memory with a pool of `kv_blocks` blocks; above 1 if they don't fit."""
        return (self.weights + self.workspace + self.held + kv_blocks * self.block / self.kv_share) / self.usable


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device of a stage, as a function of the largest step."""

    idle: StageMemory
    """The memory without activations."""
    token: float
    """Bytes per token at the widest point of a layer."""
    kept: float
    """Bytes per token while the sampler runs."""
    sequence: float
    """Bytes per sequence in the sampler."""

    def at(self, tokens: float, sequences: float) -> StageMemory:
        """Return the memory for steps of up to `tokens` tokens that sample for up to `sequences` sequences."""
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
    kept: float = 1.0,
) -> DeviceMemory:
    """Return the memory of one device of a stage under an engine.

    `ends`: whether the stage holds the embedding, and whether it holds the head. `kept` is the share of a request's
    tokens that the cache keeps, the mean over the layers.
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
    value = activation_bytes(dtype)
    weights += (outer * value - last * model.head_saving(dtype)) / stage.tp
    idle = StageMemory(
        weights,
        0.0,
        BLOCK_SIZE * (stop - start) * model.kv_bytes(stage.tp, kv_dtype) * kept,
        engine.usable_bytes(cluster),
        engine.held_bytes(stage.tp, stop - start + encoder_stop - encoder_start, cluster),
        cluster.memory_fraction if engine.of_rest else 1.0,
    )
    # The widest point of a layer holds its input, the feed-forward's inner product, and the result.
    if engine.weights_alone:
        return DeviceMemory(idle, 0.0, 0.0, 0.0)
    width = 2 * model.hidden + (3 if model.gated else 2) * model.ffn / stage.tp
    if model.experts:  # each token's rows for its experts, and their inner products
        routed = model.experts.per_token * (2 * model.hidden + 3 * model.experts.ffn / stage.tp)
        width = max(width, 2 * model.hidden + routed)
    # Every rank of a group samples from the whole vocabulary.
    sampled = model.vocab * (value + engine.logit_bytes) if last and engine.logit_bytes else 0.0
    return DeviceMemory(idle, width * value, model.hidden * value if sampled else 0.0, sampled)


def with_drafts(
    memory: DeviceMemory, model: ModelSpec, speculation: Speculation, tp: int, dtype: str, kv_dtype: str
) -> DeviceMemory:
    """Add the drafting layers' weights, keys and values to the memory of a device of the last stage."""
    draft, idle = speculation.draft, memory.idle
    if draft is None:
        weights = speculation.layers * model.layer_bytes(tp, dtype)
        token = speculation.layers * model.kv_bytes(tp, kv_dtype)
    else:
        tp = max(degree for degree in draft.tp_degrees(tp) if degree <= tp)
        own = draft.dtype or dtype
        outer = (draft.embedding_parameters + draft.head_parameters) * activation_bytes(own)
        weights = draft.layers * draft.layer_bytes(tp, own) + outer / tp
        token = float(draft.layers * draft.kv_bytes(tp, kv_dtype))
    return replace(memory, idle=replace(idle, weights=idle.weights + weights, block=idle.block + BLOCK_SIZE * token))
