"""The links to a model's replicas in a run of a plan: each request goes to the engine with the fewest requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xcore.batching.dispatch import fewest_requests
from xcore.requests.request import Request
from xserver.engines.engine_link import EngineLink, Output
from xserver.engines.unit_options import EngineUnitOptions


@dataclass(frozen=True)
class ReplicaLinks:
    """The links to the replicas of a model."""

    links: tuple[EngineLink, ...]
    """One for each replica, in the order of the plan."""
    units: tuple[tuple[EngineLink, ...], ...]
    """For each replica, the links to all models of its engine."""

    def add(self, request: Request) -> Output:
        """Give a request that arrives now to the replica whose engine has the fewest requests, of all its models.

        An engine that has failed for good gets a request only if all have.
        """
        running = [place for place, link in enumerate(self.links) if not link.failed] or range(len(self.links))
        counts = [sum(len(link.outputs) for link in self.units[place]) for place in running]
        return self.links[running[fewest_requests(counts)]].add(request)


def replica_links(units: Sequence[EngineUnitOptions], links: Mapping[int, EngineLink]) -> dict[str, ReplicaLinks]:
    """Return the links to each model's replicas, given the links by place."""
    beside = {model.place: tuple(links[m.place] for m in unit.models) for unit in units for model in unit.models}
    names: dict[str, list[int]] = {}
    for place, name in sorted((model.place, str(model.name)) for unit in units for model in unit.models):
        names.setdefault(name, []).append(place)
    return {
        name: ReplicaLinks(tuple(links[place] for place in places), tuple(beside[place] for place in places))
        for name, places in names.items()
    }
