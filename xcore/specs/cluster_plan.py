"""Plan: several models on one cluster, each with its devices and its schedule.

A model may have several replicas: entries of one name, on other devices each. A dispatcher sends each of its requests
to the replica with the fewest requests (SeaLLM).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.cluster import ClusterSpec
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule


@dataclass(frozen=True)
class Share(Spec):
    """The way in which models share devices."""

    by: Literal["space", "time", "priority"]
    """How the models' jobs share the devices.

    `space`: jobs of several models run at the same time, each on some of the multiprocessors. `time`: one after the
    other. `priority`: the job of the request with the smallest key of all (SeaLLM).
    """
    decode: float = 1.0
    """Share of the multiprocessors while it decodes; prompts may have all."""
    pool: Literal["quotas", "merged"] = "quotas"
    """How the models share KV blocks.

    `quotas`: each model has its own blocks, as many as its schedule has. `merged`: all models take merged blocks of the
    memory of these blocks together.
    """

    def __post_init__(self) -> None:
        if not 0 < self.decode <= 1:
            raise InputError(
                f"A model's share of devices for decoding is {self.decode:g}: it must be above 0 and at most 1."
            )


@dataclass(frozen=True)
class PlannedModel(Spec):
    """One model of a plan, or one of its replicas.

    Rate, goodput, attainment, estimate and number of requests are those of the model: equal in all its replicas.
    """

    name: str
    """Name by which requests ask for it; its replicas have the same name."""
    devices: tuple[int, ...]
    """Devices of the cluster, numbered node by node: its schedule's rank r is the r-th of them."""
    schedule: Schedule
    estimate: Estimate
    """Estimate at its rate, with latencies from arrival; without a rate, of a replay of its requests."""
    rate_seq_s: float | None = None
    """Rate of arrival; None: its requests all arrive at the start."""
    goodput_seq_s: float | None = None
    """The highest rate within its bound; None without a rate."""
    requests: int | None = None
    seconds: float | None = None
    """Seconds until its requests are done; None with a rate."""
    share: Share | None = None
    """None: its devices are its own. Models that share any device share all of their devices, in one way."""
    attainment: float | None = None
    """Share of its requests within its bound, replayed at its rate; None if that wasn't replayed."""
    directory: str | None = None
    """Directory of its weights; None if it was planned by a built-in name, or by sizes alone."""
    normalised_latency: float | None = None
    """Mean latency of the replayed requests over their mean time alone, on the fewest devices that hold the model."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError(f"Model '{self.name}' of the plan has no devices: run `exegpt plan` again.")
        if self.schedule.speculation:
            raise InputError(
                f"Model '{self.name}' of the plan drafts tokens, which plans don't predict: tune it without "
                "--draft-acceptance."
            )
        if self.rate_seq_s is not None and self.rate_seq_s <= 0:
            raise InputError(
                f"Model '{self.name}' of the plan has a rate of {self.rate_seq_s:g}/s: it must be above 0."
            )
        if self.requests is not None and self.requests < 1:
            raise InputError(f"Model '{self.name}' of the plan has {self.requests} requests: it needs at least 1.")
        if self.rate_seq_s is not None and self.requests is not None:
            raise InputError(
                f"Model '{self.name}' of the plan has both a rate and a number of requests: run `exegpt plan` again."
            )
        if self.attainment is not None and not 0 <= self.attainment <= 1:
            raise InputError(
                f"Model '{self.name}' of the plan has an attainment of {self.attainment:g}: it must be from 0 to 1."
            )
        for key in ("goodput_seq_s", "seconds", "normalised_latency"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"Model '{self.name}' of the plan has {key} of {value:g}: it must be at least 0.")

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Return the model's name and its devices, which no other entry of a plan has together."""
        return self.name, self.devices

    @property
    def headroom(self) -> float | None:
        """Return goodput over rate; None without a rate."""
        if self.rate_seq_s is None or self.goodput_seq_s is None:
            return None
        return self.goodput_seq_s / self.rate_seq_s


@dataclass(frozen=True)
class Plan(Spec):
    """The plan of several models that run on one cluster at once."""

    version: int
    method: str
    cluster: ClusterSpec
    models: tuple[PlannedModel, ...]

    VERSION = 1

    def __post_init__(self) -> None:
        if self.version != Plan.VERSION:
            raise InputError(
                f"This plan has version {self.version}, but this version of exegpt reads version {Plan.VERSION}: "
                "run `exegpt plan` again."
            )
        taken = sorted(device for unit in self.units for device in unit[0].devices)
        if len(set(taken)) < len(taken) or not set(taken) <= set(range(self.cluster.devices)):
            raise InputError(
                f"The plan's models use the devices {taken} of {self.cluster.devices}: a device may belong to only "
                "one model, or to models that share all their devices in the same way; run `exegpt plan` again."
            )
        for unit in self.units:
            if len({model.name for model in unit}) < len(unit):
                raise InputError(
                    f"The plan has model '{unit[0].name}' twice on the devices {list(unit[0].devices)}: each of its "
                    "replicas needs devices of its own; run `exegpt plan` again."
                )
        for replicas in self.replicas.values():
            if len({_of_model(replica) for replica in replicas}) > 1:
                raise InputError(
                    f"The replicas of model '{replicas[0].name}' differ in the model, the latency bound, the rate or "
                    "the number of requests, which all of them must have in common: run `exegpt plan` again."
                )

    @property
    def units(self) -> "tuple[Unit, ...]":
        """Return the models grouped by the devices that they share; a model with its own devices is alone."""
        return units_of(self.models)

    def nodes_of(self, *models: PlannedModel) -> tuple[int, ...]:
        """Return the nodes of models' devices, from 0."""
        each = self.cluster.devices_per_node
        return tuple(sorted({device // each for model in models for device in model.devices}))

    @property
    def replicas(self) -> dict[str, tuple[PlannedModel, ...]]:
        """Return the replicas of each model, by name, in the order of the plan."""
        by_name: dict[str, list[PlannedModel]] = {}
        for model in self.models:
            by_name.setdefault(model.name, []).append(model)
        return {name: tuple(replicas) for name, replicas in by_name.items()}

    @property
    def headroom(self) -> float | None:
        """Return the least headroom of all models with a rate; None without one."""
        return min((model.headroom for model in self.models if model.headroom is not None), default=None)

    @property
    def gpu_hours(self) -> float | None:
        """Return the hours of all devices until their requests are done; None with a rate, which has no end."""
        if any(model.seconds is None for model in self.models):
            return None
        return sum(len(unit[0].devices) * max(model.seconds or 0.0 for model in unit) for unit in self.units) / 3600

    @property
    def free(self) -> int:
        """Return the number of devices that no model uses."""
        return self.cluster.devices - sum(len(unit[0].devices) for unit in self.units)


Unit = tuple[PlannedModel, ...]
"""Models that share devices, or one model alone."""


def units_of(models: Iterable[PlannedModel]) -> tuple[Unit, ...]:
    """Return models grouped by the devices that they share; a model with its own devices is alone."""
    units: dict[object, list[PlannedModel]] = {}
    for model in models:
        key = model.share.by if model.share else model.name
        units.setdefault((model.devices, key, model.share is None), []).append(model)
    return tuple(map(tuple, units.values()))


def joined(units: Sequence[Unit]) -> tuple[tuple[Unit, ...], ...]:
    """Return units grouped so that all replicas of a model are in one group: its requests may go to each of them."""
    groups: list[list[Unit]] = []
    for unit in units:
        names = {model.name for model in unit}
        meets = [group for group in groups if any(model.name in names for other in group for model in other)]
        groups = [group for group in groups if group not in meets]
        groups.append([*(other for group in meets for other in group), unit])
    place = {id(unit): number for number, unit in enumerate(units)}
    ordered = [sorted(group, key=lambda unit: place[id(unit)]) for group in groups]
    return tuple(map(tuple, sorted(ordered, key=lambda group: place[id(group[0])])))


def _of_model(replica: PlannedModel) -> tuple[object, ...]:
    """Return what all replicas of a model have in common."""
    schedule = replica.schedule
    return (
        schedule.model.spec.fingerprint,
        schedule.latency_bound_s,
        replica.rate_seq_s,
        replica.goodput_seq_s,
        replica.requests,
        replica.seconds,
        replica.attainment,
    )
