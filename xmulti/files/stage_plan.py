"""StagePlan: when the models of an application run, how, and on which GPUs."""

from dataclasses import dataclass

from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cost_table import ModelCosts
from xcore.specs.schedule import Schedule


@dataclass(frozen=True)
class StagedNode(Spec):
    """A node in a stage."""

    name: str
    dp: int
    """Number of replicas."""
    tp: int
    """GPUs of each replica."""
    devices: tuple[int, ...]
    """Devices of the host: the first tp of them are the first replica's."""

    def __post_init__(self) -> None:
        if len(self.devices) != self.dp * self.tp:
            raise InputError(f"Node '{self.name}' has {len(self.devices)} devices for {self.dp} x {self.tp}.")


@dataclass(frozen=True)
class ExecutionStage(Spec):
    """Nodes that run at the same time."""

    start_s: float
    end_s: float
    nodes: tuple[StagedNode, ...]

    def __post_init__(self) -> None:
        taken = [device for node in self.nodes for device in node.devices]
        if len(set(taken)) < len(taken):
            raise InputError(f"A stage assigns the devices {sorted(taken)}: each device may be assigned only once.")


@dataclass(frozen=True)
class StagedModel(Spec):
    """What a node's engines need; each node is loaded separately, even if two nodes have the same model."""

    name: str
    """The node's name."""
    directory: str | None
    """Directory of its weights; None if it was planned by a built-in name."""
    schedules: tuple[Schedule, ...]
    """Schedules of one replica, for each tensor-parallel degree that the stages have."""
    costs: ModelCosts
    """The costs with which it was planned, at the same degrees."""

    def schedule(self, tp: int) -> Schedule:
        """Return the schedule of a replica on `tp` GPUs.

        Raises:
            InputError: There is none.
        """
        for schedule in self.schedules:
            if schedule.stages[0].tp == tp:
                return schedule
        raise InputError(f"The plan has no schedule of node '{self.name}' on {tp} devices: run `exegpt plan` again.")


@dataclass(frozen=True)
class StagePlan(Spec):
    """The stages of an application, with their planned seconds."""

    version: int
    method: str
    devices: int
    linked: int
    """Number of devices that are linked directly: no tensor-parallel group is larger."""
    stages: tuple[ExecutionStage, ...]
    search_s: float
    cluster: ClusterSpec | None = None
    """None, and no models: stages from another source, which can't be run."""
    models: tuple[StagedModel, ...] = ()
    """Models of all nodes of the stages."""

    VERSION = 1

    def __post_init__(self) -> None:
        if self.version != StagePlan.VERSION:
            raise InputError(
                f"This plan of stages has version {self.version}, but this version of exegpt reads version "
                f"{StagePlan.VERSION}: run `exegpt plan` again."
            )
        if any(device >= self.devices for stage in self.stages for node in stage.nodes for device in node.devices):
            raise InputError(f"The plan's stages use devices beyond the {self.devices} devices of the host.")
        names = [model.name for model in self.models]
        if self.models and sorted(names) != sorted(self.nodes):
            raise InputError(
                f"The plan has the models {', '.join(names)}, but its stages have the nodes "
                f"{', '.join(self.nodes)}: run `exegpt plan` again."
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of all stages, each once."""
        return tuple(dict.fromkeys(node.name for stage in self.stages for node in stage.nodes))

    @property
    def seconds(self) -> float:
        """Seconds until the last stage ends."""
        return max((stage.end_s for stage in self.stages), default=0.0)

    @property
    def free(self) -> int:
        """Number of devices that no stage uses."""
        return self.devices - len({device for stage in self.stages for node in stage.nodes for device in node.devices})

    @property
    def gpu_hours(self) -> float:
        """GPU hours of the devices of each stage until it ends."""
        taken = [(stage.end_s - stage.start_s) * sum(len(n.devices) for n in stage.nodes) for stage in self.stages]
        return sum(taken) / 3600
