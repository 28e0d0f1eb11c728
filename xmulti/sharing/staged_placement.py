"""SeaLLM's placement of models on shared devices: models to groups of one degree, for the degree with the best replays.

Models share merged blocks and run by their requests' priorities, or in order of arrival as in the AlpaServe with which
SeaLLM is compared. A model may be in several groups, each with a replica of it. In the replays of a placement, the
replicas of a model take its requests in turn. So the results of a group depend on its own models alone.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from xcore.batching.shared_pool import block_of, least_memory
from xcore.errors import Infeasible
from xcore.quantity import counted
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import PlannedModel, Share
from xcore.specs.schedule import BLOCK_SIZE
from xmulti.plans.demands import ModelDemand
from xmulti.plans.plan_evaluation import Trial, drawn
from xmulti.sharing.shared_devices import no_room_together, other_bytes, planned_on, popular_of, usable_bytes

if TYPE_CHECKING:
    from xmulti.sharing.placement import Mesh
    from xmulti.stages.two_stage import ServiceGroup, ServiceOutcome

Rule = Literal["priority", "time"]
"""As `Share.by`."""
SLO = 5.0
"""The bound of a model without one, as a multiple of its mean time alone."""


def place_in_groups(
    demands: Sequence[ModelDemand],
    cluster: ClusterSpec,
    by: Rule,
    progress: Callable[[int, int], None],
    level: float = 0.0,
    most_replicas: int | None = None,
) -> list[list[PlannedModel]]:
    """Return models with rates, placed by SeaLLM's placement with replays under a rule of sharing.

    In groups that don't sustain their rates times `level`, all requests count as late. `most_replicas`: the most
    groups that a model may be in; None: no limit.

    Returns:
        The best placement with each model in one group, then the best with replicas, if its replays are better.

    Raises:
        InputError: A model has no rate, or can't share.
        Infeasible: No placement has room for all.
    """
    from xmulti.stages.two_stage import MOST, Service, placements

    groups = Groups(demands, cluster, by, level)
    if len(demands) > MOST * cluster.devices:
        raise Infeasible(
            f"{len(demands)} models don't fit on {cluster.name}: at most {MOST} can share a group of devices, and "
            f"it has {counted(cluster.devices, 'device')}. Use more devices, fewer models, or --method temporal.",
            None,
        )
    requests = drawn(groups.demands)
    services = [Service(d.name, d.rate_seq_s or 0.0, requests[d.name].count(1.0)) for d in demands]
    nodes = (cluster.nodes, cluster.devices_per_node)
    of_degrees = placements(services, *nodes, groups.have_room, groups.outcomes, most_replicas, progress)
    if not of_degrees:
        raise no_room_together(demands, cluster)
    alone = min((of_degree[0] for of_degree in of_degrees), key=lambda placed: placed.order)
    best = min((placed for of_degree in of_degrees for placed in of_degree), key=lambda placed: placed.order)
    return [groups.models(placed.groups) for placed in ([alone, best] if best.order < alone.order else [alone])]


class Groups:
    """The performance of models that share devices; results are kept."""

    def __init__(self, demands: Sequence[ModelDemand], cluster: ClusterSpec, by: Rule, level: float = 0.0):
        from xmulti.sharing.placement import Placer

        self.demands, self._cluster, self._by = {demand.name: demand for demand in demands}, cluster, by
        self._level = level
        self.popular = {demand.name: popular_of(demand, cluster) for demand in demands}
        self._placer = Placer(usable_bytes(demands, cluster), other_bytes(demands, cluster))
        self._requests = drawn(self.demands)
        self._replayed = functools.cache(self._replay)
        self._cost = functools.cache(lambda name, devices: self.popular[name].cost(devices))

    def have_room(self, devices: int, names: tuple[str, ...]) -> bool:
        """Return whether models can run on `devices` devices.

        They need merged blocks for the longest sequence of each at once.
        """
        mesh = self._mesh(tuple(range(devices)), names)
        if mesh is None:
            return False
        settings = [self.demands[name].setting for name in names]
        sizes = [block_of(setting.model, BLOCK_SIZE, setting.kv_dtype) for setting in settings]
        longest = [math.ceil(self.popular[name].longest / BLOCK_SIZE) for name in names]
        return self._placer.kv_bytes(mesh) >= least_memory(sizes, longest)

    def planned(self, devices: tuple[int, ...], names: tuple[str, ...]) -> list[PlannedModel]:
        """Return models on devices that have room for them."""
        mesh = self._mesh(devices, names)
        assert mesh is not None, "they have room"
        return planned_on(
            mesh, self._placer.kv_bytes(mesh), self.demands, self._cluster, Share(self._by, 1.0, "merged")
        )

    def models(self, groups: "Sequence[ServiceGroup]") -> list[PlannedModel]:
        """Return the models of groups that have room for them, in the order of the demands."""
        planned = [model for group in groups if group.services for model in self.planned(group.devices, group.services)]
        return [model for name in self.demands for model in planned if model.name == name]

    def outcomes(self, groups: "tuple[ServiceGroup, ...]") -> "dict[str, ServiceOutcome]":
        """Return the simulated results of the models of some groups."""
        from xmulti.stages.two_stage import ServiceOutcome

        hosts: dict[str, list[ServiceGroup]] = {}
        for group in groups:
            for name in group.services:
                hosts.setdefault(name, []).append(group)
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in hosts}
        for group in groups:
            if group.services:
                turns = tuple((name, hosts[name].index(group), len(hosts[name])) for name in group.services)
                for name, result in self._replayed(len(group.devices), turns).items():
                    results[name].append(result)
        counts = {name: self._requests[name].count(1.0) for name in hosts}  # the same whatever shares the devices
        means = {name: np.mean(of_replicas, axis=0).tolist() for name, of_replicas in results.items()}
        return {
            name: ServiceOutcome(round(counts[name] * late), normalised, counts[name])
            for name, (late, normalised) in means.items()
        }

    def _replay(self, devices: int, turns: tuple[tuple[str, int, int], ...]) -> dict[str, tuple[float, float]]:
        """Return the results of replaying the requests with which plans are measured.

        `turns` are the group's models, each with its replica's index and the number of its replicas. The results are
        the share of late requests, and the mean latency relative to the mean time alone. A request is late beyond its
        model's bound, or without one beyond `SLO` times the mean time alone.
        """
        from xmulti.sharing.unit_loads import service_times
        from xsimulator.cost.cost_model import ReplicaCost

        unit, found = self.planned(tuple(range(devices)), tuple(name for name, _, _ in turns)), {}
        parts = {name: (turn, replicas) for name, turn, replicas in turns}
        trial = Trial(unit, self.demands, self._requests, parts)
        if self._level and not trial.sustained(self._level):
            return dict.fromkeys(parts, (1.0, math.inf))
        served = trial.replayed(1.0)
        for model in unit:
            demand = self.demands[model.name]
            replica = ReplicaCost.of(model.schedule, demand.setting.profile)
            mean_s = float(service_times(model.schedule, replica).mean())
            latency = served[model.name].latencies("arrival")["latency"]
            late = float(np.mean(latency > (demand.bound_s or SLO * mean_s)))
            found[model.name] = late, float(latency.mean()) / mean_s
        return found

    def _mesh(self, devices: tuple[int, ...], names: tuple[str, ...]) -> "Mesh | None":
        """Return the models on these devices; None if one can't run on that number."""
        from xmulti.sharing.placement import Mesh, Occupant

        occupants = []
        for name in names:
            cost = self._cost(name, len(devices))
            if cost is None:
                return None
            occupants.append(Occupant(self.popular[name], len(devices), 1.0, cost))
        return Mesh(devices, tuple(occupants))
