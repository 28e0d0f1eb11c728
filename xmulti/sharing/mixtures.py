"""Plans in which some models share devices and others have separate ones, searched jointly with the numbers of devices.

The search starts from the plans of other methods, whose units count as known. Other groups are replayed with the same
measure as all methods: groups that share by space and by time, and models alone under a quick policy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

from xcore.processes import Processes
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import Plan, PlannedModel
from xmulti.plans.demands import ModelDemand
from xmulti.plans.model_frontier import ModelFrontier
from xmulti.plans.plan_evaluation import KEEPS_UP, PRECISION, Drawn, Trial, at_rates, drawn, evaluated
from xmulti.sharing.shared_devices import can_share, most_of_unit, share_unit

if TYPE_CHECKING:
    from xmulti.sharing.groups import Group, Grouping, Part

    Asked = tuple[list[ModelDemand], list[Drawn | None], ClusterSpec, int, PlannedModel | None, float]

MOST_MODELS = 7
"""With more models there are too many partitions to enumerate (877 of 7 models, 116 thousand of 10)."""
MOST = 80
"""Most measurements of groups on numbers of devices."""
SCALES = 1.1
"""On more devices, a model alone does at most this factor better than in proportion."""
LENIENT = 1.5
"""A replay finds at most this factor more than a search.

The replay has the complete bound, the search the bound less its margin.
"""
_WAYS: tuple[Literal["space", "time"], ...] = ("space", "time")


class SharedGroups:
    """The performance of groups of a plan's models on numbers of devices, and the plan of the best ones."""

    def __init__(
        self,
        demands: tuple[ModelDemand, ...],
        cluster: ClusterSpec,
        frontiers: Sequence[ModelFrontier],
        processes: Processes,
        level: float,
    ):
        """Set up the mixture with the models' frontiers, some of which may be known.

        `level`: the headroom below which other methods' units needn't be measured.
        """
        self._demands, self._cluster, self._frontiers, self._level = demands, cluster, frontiers, level
        self._planned: dict[Part, tuple[PlannedModel, ...]] = {}
        self._most: dict[Part, float] = {}
        """Upper bounds of groups of several models."""
        self._processes = processes
        self.seconds = math.inf
        """Seconds within which the requests of models without a rate must be done."""

    @cached_property
    def _drawn(self) -> dict[str, Drawn]:
        return drawn({demand.name: demand for demand in self._demands})

    def improve(self, plans: Sequence[Plan], progress: Callable[[int, int], None]) -> Plan | None:
        """Return the best mixture, if it is better than all these plans; else None."""
        from xmulti.sharing.groups import GroupSearch, IdenticalNodes

        units = self._seeds(plans)
        known = {part: self._best(part, of_part) for part, of_part in units.items() if all(map(_measured, of_part))}
        later = {part: partial(self._best, part, units[part]) for part in units.keys() - known.keys()}
        floor = max((_headroom(plan.models) for plan in plans), default=0.0)
        spans = not self._demands[0].one_node
        where = IdenticalNodes(self._cluster.nodes, self._cluster.devices_per_node, spans)
        search = GroupSearch(len(self._demands), where, self, known, later)
        grouping = search.best(floor, MOST, progress)
        return self._plan(grouping) if grouping else None

    def _seeds(self, plans: Sequence[Plan]) -> "dict[Part, list[tuple[PlannedModel, ...]]]":
        """Return the units of other plans, by their group and number of devices."""
        places = {demand.name: place for place, demand in enumerate(self._demands)}
        seeds: dict[Part, list[tuple[PlannedModel, ...]]] = {}
        for plan in plans:
            self.seconds = min(self.seconds, max((model.seconds or 0.0 for model in plan.models), default=0.0))
        single = [plan for plan in plans if len(plan.replicas) == len(plan.models)]  # a model is in one group
        for unit in (unit for plan in single for unit in plan.units):
            part = tuple(sorted(places[model.name] for model in unit)), len(unit[0].devices)
            seeds.setdefault(part, []).append(unit)
        return seeds

    def _best(self, part: "Part", units: "list[tuple[PlannedModel, ...]]") -> float:
        """Keep the best of the units, and return the headroom that it reaches; replay those that are unmeasured."""
        by_name = {demand.name: demand for demand in self._demands}
        new = [unit for unit in units if not _measured(unit)]
        replays = iter(self._processes.each(evaluated, [(unit, by_name, None, self._level) for unit in new]))
        best = 0.0
        for unit in units:
            replayed = unit if _measured(unit) else tuple(next(replays))
            if self._of(replayed) > best:
                best, self._planned[part] = self._of(replayed), replayed
        return best

    def _of(self, unit: Sequence[PlannedModel]) -> float:
        """Return the headroom of models; infinite for models without a rate that are done in time."""
        return _headroom(unit) if all((model.seconds or 0.0) <= self.seconds for model in unit) else 0.0

    def at_most(self, group: "Group", devices: int) -> float:
        """Implement `xmulti.sharing.groups.Measure`."""
        if len(group) == 1:
            return self._most_alone(group[0], devices)
        part = group, devices
        if part not in self._most:
            demands = [self._demands[i] for i in group]
            shared = all(map(can_share, demands))
            most = most_of_unit(demands, self._cluster, devices) if shared else 0.0
            self._most[part] = (
                KEEPS_UP * most
            )  # a rate above the sustainable one by this factor still counts as sustained
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
        """Implement `xmulti.sharing.groups.Measure`."""
        alone = [(group[0], devices) for group, devices in parts if len(group) == 1]
        ModelFrontier.search([(self._frontiers[i], devices) for i, devices in alone], self._processes)
        does = [part for part in parts if len(part[0]) > 1 or self._frontiers[part[0][0]].on(part[1])]
        units = self._processes.each(measured, [self._asked(part, level) for part in does])
        reached = dict.fromkeys((part for part in parts if len(part[0]) == 1), 0.0)
        for part, unit in zip(does, units, strict=True):
            if unit and self._of(unit) > reached.get(part, 0.0):
                reached[part], self._planned[part] = self._of(unit), tuple(unit)
        return [reached.get(part) for part in parts]

    def _asked(self, part: "Part", level: float) -> "Asked":
        """Arguments of `measured` for a group on a number of devices."""
        group, devices = part
        demands = [self._demands[i] for i in group]
        asked = [self._drawn.get(demand.name) for demand in demands]
        served = self._frontiers[group[0]].on(devices) if len(group) == 1 else None
        return demands, asked, self._cluster, devices, served.planned(demands[0]) if served else None, level

    def _plan(self, found: "Grouping") -> Plan:
        """Return the plan of a grouping."""
        better = self._with_all_policies([part for part in found.parts if len(part[0]) == 1])
        models: dict[str, PlannedModel] = {}
        for part, devices in zip(found.parts, found.devices, strict=True):
            for model in [better[part]] if part in better else self._planned[part]:
                models[model.name] = replace(model, devices=devices[: len(model.devices)])
        return Plan(Plan.VERSION, "exegpt", self._cluster, tuple(models[demand.name] for demand in self._demands))

    def _with_all_policies(self, alone: "list[Part]") -> "dict[Part, PlannedModel]":
        """Return models with separate devices under the best of all policies, or as planned if that is better."""
        wanted = {part: (self._frontiers[part[0][0]], part[1]) for part in alone}
        ModelFrontier.search(list(wanted.values()), self._processes)
        does = [part for part, (frontier, devices) in wanted.items() if frontier.on(devices)]
        served = ModelFrontier.with_all_policies([wanted[part] for part in does], self._processes)
        asked = []
        for part, of_part in zip(does, served, strict=True):
            demand, (planned,) = self._demands[part[0][0]], self._planned[part]
            asked.append((planned, of_part.planned(demand), demand, self._drawn.get(demand.name)))
        better = dict(zip(does, self._processes.each(better_alone, asked), strict=True))
        return {part: better.get(part, self._planned[part][0]) for part in alone}


def measured(
    demands: list[ModelDemand],
    asked: list[Drawn | None],
    cluster: ClusterSpec,
    devices: int,
    alone: PlannedModel | None,
    level: float,
) -> list[PlannedModel] | None:
    """Return models on `devices` devices; None if they don't reach the level together.

    A single model keeps its plan. Several models share the devices, in the better of both ways of sharing.
    """
    if alone is not None:
        return _alone(alone, demands[0], asked[0])
    requests = {demand.name: known for demand, known in zip(demands, asked, strict=True) if known}
    best = None
    for way in _WAYS:
        unit = share_unit(demands, cluster, devices, way, max(level, 1.0))
        if unit is None:
            continue
        trial = Trial(unit, {demand.name: demand for demand in demands}, requests)
        if trial.sustained(level):
            factor = trial.highest(level)
            best, level = at_rates(trial, factor), factor * (1 + PRECISION)  # the other way must be better
    return best


def _alone(model: PlannedModel, demand: ModelDemand, asked: Drawn | None) -> list[PlannedModel]:
    if asked is None:
        return [model]
    trial = Trial([model], {demand.name: demand}, {demand.name: asked})
    return at_rates(trial, trial.highest(model.headroom or 1.0))


def better_alone(planned: PlannedModel, other: PlannedModel, demand: ModelDemand, asked: Drawn | None) -> PlannedModel:
    """Return a model as it was planned, or in another way if a replay shows that to be better."""
    (again,) = _alone(other, demand, asked)
    return max(planned, again, key=lambda model: (model.headroom or 0.0, -(model.seconds or 0.0)))


def _headroom(models: Sequence[PlannedModel]) -> float:
    return min((model.headroom for model in models if model.headroom is not None), default=math.inf)


def _measured(unit: Sequence[PlannedModel]) -> bool:
    return all(model.rate_seq_s is None or model.goodput_seq_s is not None for model in unit)
