"""Schedule: a policy, its control variables and the layer-to-device allocation. The one thing the runner obeys."""

from dataclasses import dataclass
from typing import Literal

from exegpt.cluster import MAX_DEVICES, ClusterSpec
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.noun import Noun
from exegpt.workload import Workload

PolicyName = Literal["static", "hybrid", "orca", "chunked", "rra", "waa-c", "waa-m"]
Bound = Literal["p99-length", "p99-queries"]

BLOCK_SIZE = 16
"""Tokens per KV block, unless a schedule says otherwise."""


@dataclass(frozen=True)
class Stage(Noun):
    """One pipeline stage: `tp` devices that hold a range of layers. Ranges are zero-based and half-open."""

    devices: tuple[int, ...]
    """Global ranks in replica 0."""
    tp: int
    phase: Literal["both", "encode", "decode"]
    encoder_layers: tuple[int, int] | None
    decoder_layers: tuple[int, int] | None


@dataclass(frozen=True)
class ProfileReference(Noun):
    """Which profile a schedule stands on."""

    source: str
    fingerprint: str


@dataclass(frozen=True)
class ModelReference(Noun):
    """The model that a schedule is for: its whole spec and `ModelSpec.fingerprint`."""

    spec: ModelSpec
    fingerprint: str


@dataclass(frozen=True)
class Schedule(Noun):
    """What the scheduler found and the runner enforces. A variable that a policy doesn't have is None."""

    version: int
    policy: PolicyName
    model: ModelReference
    cluster: ClusterSpec
    workload: Workload
    profile: ProfileReference
    stages: tuple[Stage, ...]
    kv_blocks: int
    """Blocks in every stage's pool."""
    dtype: str
    kv_dtype: str
    latency_bound_s: float | None = None
    """L_B; None: unbounded."""
    bound: Bound = "p99-length"
    encode_batch: int | None = None
    """B_E: sequences encoded in one encoding phase."""
    decode_batch: int | None = None
    """B_D: sequences being decoded at the start of a decoding phase; derived."""
    decode_iterations: int | None = None
    """N_D: decoding iterations between two encoding phases."""
    micro_batches: int | None = None
    """B_m: micro-batches of a decoding batch."""
    encode_micro_batches: int | None = None
    tp_degree: int | None = None
    tp_gpus: int | None = None
    encode_tp_degree: int | None = None
    encode_tp_gpus: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefills_per_step: int | None = None
    """Prompts encoded in one iteration; 1 is the paper's Orca."""
    block_size: int = BLOCK_SIZE
    replicas: int = 1

    VERSION = 1

    def __post_init__(self) -> None:
        if self.version != Schedule.VERSION:
            raise InputError(
                f"This schedule has version {self.version}, this exegpt reads version {Schedule.VERSION}: tune again."
            )
        for name in _REQUIRED[self.policy]:
            if (getattr(self, name) or 0) < 1:
                raise InputError(
                    f"A schedule of policy {self.policy} needs {name} of at least 1 (got {getattr(self, name)})."
                )
        if self.kv_blocks < 1 or self.block_size < 1 or self.replicas < 1 or not self.stages:
            raise InputError("A schedule needs at least one stage, replica, KV block and token per block.")
        if self.replicas > MAX_DEVICES:
            raise InputError(f"A schedule can't have {self.replicas:,} replicas: at most {MAX_DEVICES:,} can be.")
        phases = {stage.phase for stage in self.stages}
        if phases != ({"encode", "decode"} if self.policy in ("waa-c", "waa-m") else {"both"}):
            raise InputError(
                f"A schedule of policy {self.policy} can't have stages of phase {', '.join(sorted(phases))}: WAA parts "
                "encode and decode, every other policy does both on each."
            )

    def check_model(self, spec: ModelSpec) -> None:
        """InputError unless this schedule is for a model of these sizes (its name may differ)."""
        from dataclasses import replace

        if replace(spec, name="") != replace(self.model.spec, name=""):
            raise InputError(
                f"This schedule is for model '{self.model.spec.name}' ({self.model.fingerprint}), not for "
                f"'{spec.name}': tune for this model."
            )


_REQUIRED: dict[str, tuple[str, ...]] = {
    "static": ("encode_batch",),
    "hybrid": ("encode_batch", "micro_batches"),
    "orca": ("max_num_seqs", "prefills_per_step"),
    "chunked": ("max_num_seqs", "max_num_batched_tokens"),
    "rra": ("encode_batch", "decode_batch", "decode_iterations"),
    "waa-c": ("encode_batch", "decode_batch", "micro_batches"),
    "waa-m": ("encode_batch", "decode_batch", "micro_batches"),
}
