"""Schedule: a policy, its control variables and the placement of layers on devices. The runner follows it alone."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from xcore.batching.admission import Admission
from xcore.batching.step import StagePhase
from xcore.errors import InputError
from xcore.policies import Traits, traits_of
from xcore.policies.control import Control
from xcore.spec import Spec
from xcore.specs.bound import BoundMeaning, BoundName
from xcore.specs.cluster import ClusterSpec
from xcore.specs.device_spec import MAX_DEVICES
from xcore.specs.model import BYTES, KV_DTYPES, ModelSpec
from xcore.specs.schedule_versions import (
    DEGREES,
    VERSIONS,
    AnyRecord,
    check_degrees,
    check_version,
    read_control,
)
from xcore.specs.speculation import Speculation, check_drafting
from xcore.specs.workload import Workload

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema
    from pydantic_core.core_schema import SerializerFunctionWrapHandler, ValidatorFunctionWrapHandler

BLOCK_SIZE = 16
"""Default number of tokens per KV block."""


@dataclass(frozen=True)
class Stage(Spec):
    """One pipeline stage: `tp` devices that hold a range of layers. Ranges are zero-based and half-open."""

    devices: tuple[int, ...]
    """Global ranks in replica 0."""
    tp: int
    phase: StagePhase
    encoder_layers: tuple[int, int] | None
    decoder_layers: tuple[int, int] | None


@dataclass(frozen=True)
class ProfileReference(Spec):
    """The profile for which a schedule was tuned."""

    source: str
    fingerprint: str


@dataclass(frozen=True)
class ModelReference(Spec):
    """The model that a schedule is for: its whole spec and `ModelSpec.fingerprint`."""

    spec: ModelSpec
    fingerprint: str


@dataclass(frozen=True)
class Schedule(Spec):
    """The result of the scheduler, which the runner follows."""

    version: int
    """Version of its file format; a file of an older version is converted to this one."""
    policy: str
    control: Annotated[Control, AnyRecord()]
    """The policy's variables."""
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
    ttft_bound_s: float | None = None
    tpot_bound_s: float | None = None
    bound: BoundName = "p99-length"
    """Meaning of the bound; the default is that of files without this field."""
    percentile: float = 99.0
    """Percentage of the requests that meets the bounds."""
    block_size: int = BLOCK_SIZE
    replicas: int = 1
    admission: Admission = "reserve"
    """When a sequence gets its blocks.

    `reserve`: it waits until the blocks for all its tokens are free. `grow`: it gets blocks when it needs them, and may
    be preempted.
    """
    prefix_caching: bool = False
    """Whether blocks stay in the cache after their sequences end or are preempted, until other sequences need them.

    Sequences that begin with the same tokens share them.
    """

    adjust: float | None = None
    """Share of B_E by which batches may deviate, if they are adjusted to the lengths of waiting requests; None: not.

    Files of policies without a target leave it out.
    """
    speculation: Speculation | None = None
    """Speculative decoding in decode iterations; None: no draft tokens, and files leave the field out."""

    VERSION = VERSIONS[-1]

    def __post_init__(self) -> None:
        check_version(self.version, (Schedule.VERSION,))
        record = self.traits.control
        if type(self.control) is not record:
            raise InputError(
                f"A schedule of policy {self.policy} can't have a {type(self.control).__name__} as its control "
                f"variables: it needs a {record.__name__}."
            )
        if self.kv_blocks < 1 or self.block_size < 1 or self.replicas < 1 or not self.stages:
            raise InputError("A schedule needs at least one stage, replica, KV block and token per block.")
        if self.replicas % self.model.spec.attention_dp:
            raise InputError(
                f"A schedule can't have {self.replicas:,} replicas that share experts in groups of "
                f"{self.model.spec.attention_dp}: use a multiple of the group."
            )
        if self.replicas > MAX_DEVICES:
            raise InputError(f"A schedule can't have {self.replicas:,} replicas: the maximum is {MAX_DEVICES:,}.")
        for name, dtype, known in (("dtype", self.dtype, tuple(BYTES)), ("kv_dtype", self.kv_dtype, KV_DTYPES)):
            if dtype not in known:
                raise InputError(f"A schedule can't have {name} '{dtype}': use one of {', '.join(known)}.")
        for bound_s in (self.latency_bound_s, self.ttft_bound_s, self.tpot_bound_s):
            if bound_s is not None and not bound_s > 0:
                raise InputError(f"A schedule can't have the bound of {bound_s} s: it must be above 0.")
        if self.adjust is not None and not 0 <= self.adjust <= 1:
            raise InputError(f"A schedule can't have adjust {self.adjust}: it must be a share between 0 and 1.")
        BoundMeaning(self.bound, self.percentile)
        if self.speculation:
            check_drafting(self.model.spec)

    @property
    def meaning(self) -> BoundMeaning:
        """Return the meaning of the schedule's bounds."""
        return BoundMeaning(self.bound, self.percentile)

    @property
    def idle(self) -> int:
        """Return the number of devices of the cluster that no replica uses."""
        return max(0, self.cluster.devices - self.replicas * sum(stage.tp for stage in self.stages))

    @property
    def traits(self) -> Traits:
        """Return the traits of the schedule's policy; InputError for an unknown policy."""
        return traits_of(self.policy)

    @property
    def tensor_parallelism(self) -> dict[str, int | None]:
        """Return T_P of the stages by the names in files.

        For the decoding side, these are the widest group's degree and the number of devices in groups; likewise for
        encoding stages, or None without them.
        """
        by_name: dict[str, int | None] = {}
        for prefix, phases in (("", ("both", "decode")), ("encode_", ("encode",))):
            degrees = [stage.tp for stage in self.stages if stage.phase in phases]
            grouped = [tp for tp in degrees if tp > 1]
            by_name[f"{prefix}tp_degree"] = (grouped[0] if grouped else 1) if degrees else None
            by_name[f"{prefix}tp_gpus"] = sum(grouped) if degrees else None
        return by_name

    def check_stages(self) -> None:
        """Raise InputError for impossible stages: a device or a layer in two of them, or in none."""
        devices = sorted(device for stage in self.stages for device in stage.devices)
        if devices != list(range(len(devices))):
            raise InputError(
                f"The schedule's stages use the devices {devices}: they must be numbered from 0, each in exactly "
                "one stage; run `exegpt tune` again."
            )
        for stage in self.stages:
            if len(stage.devices) != stage.tp or stage.tp < 1:
                raise InputError(
                    f"A stage with tensor-parallel degree {stage.tp} has the devices {list(stage.devices)}: it "
                    f"needs {stage.tp} devices; run `exegpt tune` again."
                )
        for phase in sorted({stage.phase for stage in self.stages}):
            self._check_layers(phase)

    def _check_layers(self, phase: str) -> None:
        """Raise InputError unless the stages of a phase hold each of its layers once, in order, and no others."""
        model, line = self.model.spec, [stage for stage in self.stages if stage.phase == phase]
        encodes, decodes = phase != "decode", phase != "encode" or not model.encoder_layers
        stacks = (
            ("encoder layers", [stage.encoder_layers for stage in line], model.encoder_layers * encodes),
            ("layers", [stage.decoder_layers for stage in line], model.layers * decodes),
        )
        for name, held, count in stacks:
            if not _whole(held, count):
                ranges = ", ".join("none" if layers is None else "{}:{}".format(*layers) for layers in held)
                raise InputError(
                    f"The stages of phase {phase} hold the {name} {ranges} of the {count} of model '{model.name}': "
                    "each must be in exactly one stage, in order; run `exegpt tune` again."
                )

    def check_model(self, spec: ModelSpec) -> None:
        """Raise InputError unless this schedule is for a model of these sizes (its name may differ)."""
        if spec.sizes != self.model.spec.sizes:
            raise InputError(
                f"This schedule is for model '{self.model.spec.name}' ({self.model.fingerprint}), not for "
                f"'{spec.name}': run `exegpt tune` for this model."
            )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        """Read both versions; write the stages' tensor parallelism next to the control variables."""
        from pydantic_core import core_schema  # only what reads or writes documents calls this

        def read(data: object, validate: "ValidatorFunctionWrapHandler") -> Schedule:
            schedule: Schedule = validate(read_control(data) if isinstance(data, dict) else data)
            if isinstance(data, dict):
                check_degrees(data, schedule.tensor_parallelism)
            return schedule

        def write(schedule: Schedule, serialize: "SerializerFunctionWrapHandler") -> dict[str, object]:
            written: dict[str, object] = {}
            for name, value in serialize(schedule).items():
                if name not in ("adjust", "speculation") or value is not None:
                    written[name] = value
                if name == "control":
                    written |= schedule.tensor_parallelism
            return written

        plain = core_schema.wrap_serializer_function_ser_schema(write)
        return core_schema.no_info_wrap_validator_function(read, handler(source), serialization=plain)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: "CoreSchema", handler: "GetJsonSchemaHandler") -> dict[str, object]:
        """Describe the tensor parallelism of the stages too."""
        described = handler(schema)
        properties: dict[str, object] = handler.resolve_ref_schema(described)["properties"]
        properties |= {name: {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None} for name in DEGREES}
        return described


def _whole(held: Sequence[tuple[int, int] | None], layers: int) -> bool:
    """Return whether stages hold `layers` layers, each at least one; with 0 layers, none may hold any."""
    if not layers:
        return not any(held)
    parts = [part for part in held if part is not None]
    edges = [0, *(stop for _, stop in parts)]
    covered = len(parts) == len(held) and edges[-1] == layers and all(a < b for a, b in parts)
    return covered and parts == list(itertools.pairwise(edges))


def devices(schedule: Schedule) -> int:
    """Count the devices of one replica."""
    return sum(len(stage.devices) for stage in schedule.stages)


def ranks_needed(schedule: Schedule) -> int:
    """Return the number of ranks of the schedule's job."""
    return devices(schedule) * schedule.replicas
