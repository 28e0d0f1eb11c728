"""Plans in which some models share devices and others have their own: which, and how many, searched jointly.

Seeded with the plans of other methods, whose units count as known. Others are replayed by the yardstick of all methods:
groups that share by space and by time, and models alone under a quick policy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from exegpt.app.model_frontier import ModelFrontier, served_on
from exegpt.app.models_file import Demand
from exegpt.app.plan_evaluation import KEEPS_UP, Drawn, Trial, at_rates, drawn
from exegpt.app.processes import Processes
from exegpt.app.shared_devices import can_share, most_of_unit, share_unit
from exegpt.cluster import ClusterSpec
from exegpt.plan import Plan, PlannedModel

if TYPE_CHECKING:
    from xscheduler.multimodel.groups import Group, Grouping, Part

MOST_MODELS = 7
"""With more there are too many partitions to go through (877 of 7 models, 116 thousand of 10)."""
MOST = 80
"""Measurements of groups on numbers of devices."""
SCALES = 1.1
"""A model alone does no better on more devices than in proportion, and so much."""
LENIENT = 1.5
"""Nor does the yardstick, which has the whole bound, find more than so many times what a search finds within the bound
less its margin.
"""
_WAYS: tuple[Literal["space", "time"], ...] = ("space", "time")


class Mixture:
    """What groups of a plan's models do on numbers of devices, and the plan of the best ones."""

    def __init__(
        self,
        demands: tuple[Demand, ...],
        cluster: ClusterSpec,
        frontiers: Sequence[ModelFrontier],
        policies: tuple[str, ...],
    ):
        """With the models' frontiers, of which some may be known, and the policies of those that are alone at last."""
        self._demands, self._cluster, self._policies = demands, cluster, policies
        self._frontiers = frontiers
        self._planned: dict[Part, tuple[PlannedModel, ...]] = {}
        self._most: dict[Part, float] = {}
        """Of groups of several."""
        self._processes = Processes()
        self.seconds = math.inf
        """Until which the requests of models without a rate must be done."""

    @cached_property
    def _drawn(self) -> dict[str, Drawn]:
        return drawn({demand.name: demand for demand in self._demands})

    def improve(self, plans: Sequence[Plan], progress: Callable[[int, int], None]) -> Plan | None:
        """The best mixture, where it is better than all these plans."""
        from xscheduler.multimodel.groups import Cluster, GroupSearch

        known = self._seeds(plans)
        floor = max((_headroom(plan.models) for plan in plans), default=0.0)
        where = Cluster(self._cluster.nodes, self._cluster.devices_per_node)
        search = GroupSearch(len(self._demands), where, self, known)
        with self._processes:
            found = search.best(floor, MOST, progress)
            return self._plan(found) if found else None

    def _seeds(self, plans: Sequence[Plan]) -> "dict[Part, float]":
        """What the units of other plans reach."""
        places = {demand.name: place for place, demand in enumerate(self._demands)}
        known: dict[Part, float] = {}
        for plan in plans:
            self.seconds = min(self.seconds, max((model.seconds or 0.0 for model in plan.models), default=0.0))
        for unit in (unit for plan in plans for unit in plan.units):
            part = tuple(sorted(places[model.name] for model in unit)), len(unit[0].devices)
            headroom = self._of(unit)
            if headroom > known.get(part, 0.0):
                known[part], self._planned[part] = headroom, unit
        return known

    def _of(self, unit: Sequence[PlannedModel]) -> float:
        """Headroom of models; infinite for those without a rate, where they are done in time."""
        return _headroom(unit) if all((model.seconds or 0.0) <= self.seconds for model in unit) else 0.0

    def at_most(self, group: "Group", devices: int) -> float:
        """As `xscheduler.multimodel.groups.Measure`."""
        if len(group) == 1:
            return self._most_alone(group[0], devices)
        part = group, devices
        if part not in self._most:
            demands = [self._demands[i] for i in group]
            shared = all(map(can_share, demands))
            most = most_of_unit(demands, self._cluster, devices) if shared else 0.0
            self._most[part] = KEEPS_UP * most  # so much more than it sustains for ever passes for sustained
        return self._most[part]

    def _most_alone(self, model: int, devices: int) -> float:
        limit = math.inf
        for other, served in self._frontiers[model].searched:
            headroom = served.budget(self._demands[model]).headroom if served else 0.0
            if other >= devices:
                limit = min(limit, LENIENT * headroom)
            elif headroom:
                limit = min(limit, LENIENT * headroom * SCALES * devices / other)
        return limit

    def reached(self, parts: "Sequence[Part]", level: float) -> list[float | None]:
        """As `xscheduler.multimodel.groups.Measure`."""
        alone = [(group[0], devices) for group, devices in parts if len(group) == 1]
        ModelFrontier.search([(self._frontiers[i], devices) for i, devices in alone], self._processes)
        asked, of_part = [], []
        for part in parts:
            for way in self._ways(part, level):
                asked.append(way)
                of_part.append(part)
        best: dict[Part, float] = {}
        for part, unit in zip(of_part, self._processes.each(measured, asked), strict=True):
            if unit and self._of(unit) > best.get(part, 0.0):
                best[part], self._planned[part] = self._of(unit), tuple(unit)
        return [best.get(part, 0.0 if len(part[0]) == 1 else None) for part in parts]

    def _ways(self, part: "Part", level: float) -> list[tuple[object, ...]]:
        """Arguments of `measured` for a group on a number of devices."""
        group, devices = part
        demands = [self._demands[i] for i in group]
        asked = [self._drawn.get(demand.name) for demand in demands]
        if len(group) > 1:
            return [(demands, asked, self._cluster, devices, way, level) for way in _WAYS]
        (demand,), served = demands, self._frontiers[group[0]].on(devices)
        return [(demands, asked, self._cluster, devices, served.planned(demand), 0.0)] if served else []

    def _plan(self, found: "Grouping") -> Plan:
        """The plan of a grouping; models alone are searched with all policies, and keep what is better."""
        alone = [part for part in found.parts if len(part[0]) == 1]
        asked = [
            (self._demands[group[0]], self._planned[group, n][0], self._policies, self._drawn) for group, n in alone
        ]
        better = dict(zip(alone, self._processes.each(searched_again, asked), strict=True))
        models: dict[str, PlannedModel] = {}
        for part, devices in zip(found.parts, found.devices, strict=True):
            for model in [better[part]] if part in better else self._planned[part]:
                models[model.name] = replace(model, devices=devices[: len(model.devices)])
        return Plan(Plan.VERSION, "exegpt", self._cluster, tuple(models[demand.name] for demand in self._demands))


def measured(
    demands: list[Demand],
    asked: list[Drawn | None],
    cluster: ClusterSpec,
    devices: int,
    how: Literal["space", "time"] | PlannedModel,
    level: float,
) -> list[PlannedModel] | None:
    """Models on so many devices, alone as planned, or sharing them; None where they don't reach a level together."""
    if isinstance(how, PlannedModel):
        return _alone(how, demands[0], asked[0])
    unit = share_unit(demands, cluster, devices, how, max(level, 1.0))
    if unit is None:
        return None
    requests = {demand.name: known for demand, known in zip(demands, asked, strict=True) if known}
    trial = Trial(unit, {demand.name: demand for demand in demands}, requests)
    return at_rates(trial, trial.highest(level)) if trial.sustained(level) else None


def _alone(model: PlannedModel, demand: Demand, asked: Drawn | None) -> list[PlannedModel]:
    if asked is None:
        return [model]
    trial = Trial([model], {demand.name: demand}, {demand.name: asked})
    return at_rates(trial, trial.highest(model.headroom or 1.0))


def searched_again(
    demand: Demand, model: PlannedModel, policies: tuple[str, ...], requests: dict[str, Drawn]
) -> PlannedModel:
    """A model with devices of its own under the best of all policies, or as it was planned where that is better."""
    served = served_on(demand, len(model.devices), policies)
    if served is None:
        return model
    (again,) = _alone(served.planned(demand), demand, requests.get(demand.name))
    return max(model, again, key=lambda m: (m.headroom or 0.0, -(m.seconds or 0.0)))


def _headroom(models: Sequence[PlannedModel]) -> float:
    return min((model.headroom for model in models if model.headroom is not None), default=math.inf)
