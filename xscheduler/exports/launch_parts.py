"""Parts of the launch commands of all engines: names, dtypes, and the nodes of the replicas."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from xcore.errors import InputError
from xcore.specs.builtin_models import HUB_IDS
from xcore.specs.model import BYTES, ModelSpec
from xcore.specs.model_names import same_name
from xcore.specs.schedule import Schedule

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
NODE0 = "$NODE0"
"""The variable with the address of the first node."""


@dataclass(frozen=True)
class Command:
    """One command line, with its environment variables."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def text(self) -> str:
        """Return the line for a shell."""
        words = (shlex.quote(word) if "{" in word else word for word in self.words)
        return " ".join((*(f"{name}={value}" for name, value in self.environment.items()), *words))


@dataclass(frozen=True)
class Start:
    """The start of one group of replicas: a command on each of its nodes."""

    commands: tuple[Command, ...]
    group: "ReplicaGroup"
    notes: tuple[str, ...] = ()
    """Sentences that say where the commands run."""
    files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Files that the commands read, by name."""


class EngineLaunch(Protocol):
    """How one engine is started."""

    engine: str
    drafts: bool
    """Whether the export has flags for speculative decoding."""
    length_flag: str
    """The name of the setting with the longest accepted request."""

    def check(self, model: ModelSpec, dtype: str, kv_dtype: str) -> None:
        """Raise InputError for dtypes in which the engine can't run the model."""

    def followed(self, schedule: Schedule) -> Schedule:
        """Return the schedule with the page size, the budgets, the admission and the caching of the engine."""

    def together(self, schedule: Schedule) -> int:
        """Return how many replicas one command starts where it may start several."""

    def start(self, schedule: Schedule, model: str, longest: int, together: int) -> Start:
        """Return what starts `together` replicas; `model` is the name or the directory of the checkpoint."""


@dataclass(frozen=True)
class ReplicaGroup:
    """The replicas that one start of an engine runs, and where their devices are."""

    together: int
    """Replicas of one start."""
    copies: int
    """Starts that run all replicas, apart from `rest`."""
    rest: int
    """Replicas that remain on another node."""
    nodes: int
    """Nodes that one start spans."""
    devices: int
    """Devices of one start on each of its nodes."""
    on_node: int
    """Starts that fit on one node."""

    @staticmethod
    def of(schedule: Schedule, together: int) -> "ReplicaGroup":
        """Return the group of a schedule if one start runs `together` of its replicas."""
        per_node, devices = schedule.cluster.devices_per_node, replica_devices(schedule) * together
        nodes = -(-devices // per_node)
        copies, rest = divmod(schedule.replicas, together)
        return ReplicaGroup(together, copies, rest, nodes, devices // nodes, max(1, per_node // devices))

    def where(self, replicas_flag: str) -> tuple[str, ...]:
        """Return sentences that say on which nodes to run the commands; `replicas_flag` sets the replicas of one."""
        if self.nodes > 1:
            each = f"for each of the {self.copies} groups of replicas " if self.together > 1 else ""
            each = f"for each of the {self.copies} replicas " if self.together == 1 else each
            each = each if self.copies > 1 else ""
            return (f"{each}run one command on each of {self.nodes} nodes; $NODE0 is the address of the first node",)
        if self.copies == 1 and not self.rest:
            return ()
        if self.on_node > 1:
            return (
                f"start {self.copies} of it, at most {self.on_node} on a node and each with {self.devices} of its GPUs "
                "(CUDA_VISIBLE_DEVICES) and a port of its own, behind a load balancer",
            )
        each = f"each of {self.copies} nodes" if self.copies > 1 else "one node"
        other = f" and, with {replicas_flag} {self.rest}, on another node," if self.rest else ""
        return (f"run it on {each}{other} behind a load balancer",)


def replica_devices(schedule: Schedule) -> int:
    """Return the number of devices of one replica."""
    return sum(stage.tp for stage in schedule.stages)


def replicas_of_node(schedule: Schedule) -> int:
    """Return how many of the replicas fit on one node; 1 if a replica spans nodes."""
    return min(schedule.replicas, max(1, schedule.cluster.devices_per_node // replica_devices(schedule)))


def stage_layers(schedule: Schedule) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage."""
    return tuple(stop - start for start, stop in (stage.decoder_layers or (0, 0) for stage in schedule.stages))


def partition(schedule: Schedule, variable: str) -> Mapping[str, str]:
    """Return the environment variable with the layers of each pipeline stage; none if all have equally many."""
    counts = stage_layers(schedule)
    return {variable: ",".join(map(str, counts))} if len(set(counts)) > 1 else {}


def hub_name(name: str) -> str:
    """Return the name under which an engine finds a model.

    This is the Hugging Face id of a built-in model. Other names stay as the user typed them: a model with the same
    sizes is another one.
    """
    if "/" in name:
        return name
    return next((hub for builtin, hub in HUB_IDS.items() if hub and same_name(name, builtin)), name)


def flags(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the words of flags with a value."""
    return tuple(word for name, value in values.items() for word in (f"--{name}", str(value)))


def converts(engine: str, model: ModelSpec, dtype: str, able: tuple[str, ...]) -> bool:
    """Return whether the engine has to convert the weights when it loads them.

    Raises InputError for weights of less than 16 bits that neither the checkpoint has nor the engine makes (`able`).
    """
    if BYTES[dtype] >= 2 or model.dtype == dtype:
        return False
    if dtype not in able:
        raise InputError(
            f"{engine} doesn't convert weights to {dtype} when it loads them: pass the name or directory of a "
            f"checkpoint in {dtype} as --model, or leave --export out."
        )
    return True


def dtype_flags(
    engine: str, model: ModelSpec, dtype: str, kv_dtype: str, kv_names: Mapping[str, str]
) -> dict[str, str]:
    """Return the flags of vLLM and SGLang for the dtypes of weights and of keys and values; both convert to fp8."""
    converted = {"quantization": dtype} if converts(engine, model, dtype, ("fp8",)) else {}
    held = kv_name(engine, model, dtype, kv_dtype, kv_names)
    return {"dtype": DTYPES.get(dtype, "auto"), **converted, "kv-cache-dtype": held}


def computed(model: ModelSpec, dtype: str) -> str:
    """Return the dtype of activations with weights in `dtype`."""
    if BYTES[dtype] >= 2:
        return dtype
    return model.dtype if model.dtype in DTYPES else "bf16"


def kv_name(engine: str, model: ModelSpec, dtype: str, kv_dtype: str, known: Mapping[str, str]) -> str:
    """Return the engine's name for the dtype of keys and values; InputError for one that it lacks."""
    if kv_dtype == computed(model, dtype):
        return "auto"
    if kv_dtype not in known:
        raise InputError(
            f"{engine} stores keys and values in the model's dtype or in {' or '.join(known)}, not in {kv_dtype}: "
            f"leave out --kv-dtype {kv_dtype} or --export."
        )
    return known[kv_dtype]
