"""Plan: several models on one cluster, each with its devices and its schedule."""

from dataclasses import dataclass

from exegpt.cluster import ClusterSpec
from exegpt.errors import InputError
from exegpt.estimate import Estimate
from exegpt.noun import Noun
from exegpt.schedule import Schedule


@dataclass(frozen=True)
class PlannedModel(Noun):
    """One model of a plan."""

    name: str
    """By which requests ask for it."""
    devices: tuple[int, ...]
    """Of the cluster, numbered node by node: its schedule's rank r is the r-th of them."""
    schedule: Schedule
    estimate: Estimate
    """At its rate, from arrival; without one of a replay of its requests."""
    rate_seq_s: float | None = None
    """Of arrival; None: its requests are there from the beginning."""
    goodput_seq_s: float | None = None
    """The highest rate within its bound; None without a rate."""
    requests: int | None = None
    seconds: float | None = None
    """Until its requests are done; None with a rate."""

    @property
    def headroom(self) -> float | None:
        """Goodput over rate; None without a rate."""
        if self.rate_seq_s is None or self.goodput_seq_s is None:
            return None
        return self.goodput_seq_s / self.rate_seq_s


@dataclass(frozen=True)
class Plan(Noun):
    """What several models do on one cluster at once."""

    version: int
    method: str
    cluster: ClusterSpec
    models: tuple[PlannedModel, ...]

    VERSION = 1

    def __post_init__(self) -> None:
        if self.version != Plan.VERSION:
            raise InputError(
                f"This plan has version {self.version}, this exegpt reads version {Plan.VERSION}: plan again."
            )
        taken = sorted(device for model in self.models for device in model.devices)
        if len(set(taken)) < len(taken) or not set(taken) <= set(range(self.cluster.devices)):
            raise InputError(
                f"The plan's models have the devices {taken} of {self.cluster.devices}: each may be given once; "
                "plan again."
            )

    @property
    def free(self) -> int:
        """Devices that no model has."""
        return self.cluster.devices - sum(len(model.devices) for model in self.models)
