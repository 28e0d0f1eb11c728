"""SeaLLM's two-stage placement: groups of one tensor-parallel degree, then services to groups, the most unserved first.

The caller gives a scorer, which simulates a placement. For every degree that is a power of two:

1. The nodes are cut into groups of that many devices. If a service fits none, or not all find room, two neighbours
   are merged.
2. Services go to groups, the group with the lowest rate first, the service with the highest unserved index first,

       UI_s = #(requests later than their bounds) + α · mean(latency / L̂_s),

   until no group takes another. Requests of services that have no group yet all count as late, and those services come
   first. A service may be in several groups, once in each; its requests are distributed over them.

Of the placements that have every service, the one with the most requests in time wins, then the least mean latency.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

ALPHA = 1e-4
"""SeaLLM's weight of latencies in the unserved index; with 0, only requests in time count (AlpaServe)."""
IMPROVES, PATIENCE = 0.01, 3
"""Least share by which replicas must lower latencies, and how many in a row may fail to, where a search may give up."""
MOST = 2
"""Maximum number of services in a group (SeaLLM: limited by memory)."""


@dataclass(frozen=True)
class ServiceGroup:
    """Devices of one node and the services on them; each service runs on all devices."""

    devices: tuple[int, ...]
    services: tuple[str, ...] = ()
    """In order of their names."""

    def with_service(self, name: str) -> "ServiceGroup":
        """Return the same group with one more service."""
        return replace(self, services=tuple(sorted((*self.services, name))))


@dataclass(frozen=True)
class Service:
    """A service's data for the placement."""

    name: str
    rate_seq_s: float
    """Its part of a group's rate; groups with lower rates get further services first."""
    requests: int
    """Requests of the simulation: all are late while the service has no group."""


@dataclass(frozen=True)
class ServiceOutcome:
    """The simulated result of one service."""

    late: int
    """Requests later than their bounds."""
    normalised: float
    """Mean over its requests of latency over L̂."""
    requests: int

    def unserved(self, alpha: float) -> float:
        """Return SeaLLM's unserved index."""
        return self.late + alpha * self.normalised


Scorer = Callable[[tuple[ServiceGroup, ...]], Mapping[str, ServiceOutcome]]
"""Simulated results of the services that have groups."""
Fits = Callable[[int, tuple[str, ...]], bool]
"""Whether services fit on a number of devices."""


@dataclass(frozen=True)
class Placed:
    """A placement with every service, and its simulated results."""

    tp: int
    """The initial tensor-parallel degree."""
    groups: tuple[ServiceGroup, ...]
    in_time: float
    """Share of requests within their bounds."""
    normalised: float
    """Mean over all requests."""

    @property
    def order(self) -> tuple[float, float]:
        """The sort key of placements; lower is better."""
        return -self.in_time, self.normalised

    def improves(self, other: "Placed") -> bool:
        """Return whether more requests are in time than in another placement, or as many, clearly sooner."""
        if self.in_time != other.in_time:
            return self.in_time > other.in_time
        return self.normalised < (1 - IMPROVES) * other.normalised


def place_in_stages(
    services: Sequence[Service],
    nodes: int,
    devices_per_node: int,
    fits: Fits,
    score: Scorer,
    most_replicas: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    alpha: float = ALPHA,
) -> Placed | None:
    """Return the best of the placements that Algorithm 1 reaches, over all degrees; None if none has every service.

    `most_replicas`: the most groups that a service may be in; None: no limit. With an `alpha` of 0, placements are
    compared by their requests in time alone; of equal ones, the lowest degree is the best.
    """
    of_degrees = placements(services, nodes, devices_per_node, fits, score, most_replicas, progress, False, alpha)
    reached = [of_degree[-1] for of_degree in of_degrees]
    return min(reached, key=lambda placed: placed.order if alpha else (-placed.in_time, 0.0), default=None)


def placements(
    services: Sequence[Service],
    nodes: int,
    devices_per_node: int,
    fits: Fits,
    score: Scorer,
    most_replicas: int | None,
    progress: Callable[[int, int], None],
    gives_up: bool = True,
    alpha: float = ALPHA,
) -> list[list[Placed]]:
    """Return, for each degree that has room, the placements with every service on the way of Algorithm 1.

    The first has each service in one group; each other has one replica more than the one before it. Algorithm 1 takes
    the last one. With `gives_up`, a degree ends after `PATIENCE` replicas in a row that don't improve on the best.
    """
    degrees = [1 << k for k in range(devices_per_node.bit_length())]
    found = []
    for number, tp in enumerate(degrees):
        progress(number, len(degrees))
        groups = partition(services, nodes, devices_per_node, tp, fits)
        of_degree: list[Placed] = []
        for allocated in _allocations(services, groups, fits, score, most_replicas, alpha) if groups else ():
            of_degree.append(summary(tp, allocated, score(allocated)))
            latest = of_degree[-PATIENCE:]
            if gives_up and len(of_degree) > PATIENCE:
                best = min(of_degree[:-PATIENCE], key=lambda placed: placed.order)
                if not any(placed.improves(best) for placed in latest):
                    break
        if of_degree:
            found.append(of_degree)
    return found


def partition(
    services: Sequence[Service], nodes: int, devices_per_node: int, tp: int, fits: Fits
) -> tuple[ServiceGroup, ...] | None:
    """Return groups of `tp` devices, with neighbours merged until all services fit; None if they never do."""
    sizes = [[tp] * (devices_per_node // tp) for _ in range(nodes)]
    while not _has_room(services, [size for node in sizes for size in node], fits):
        if not _merge(services, sizes, fits):
            return None
    groups = []
    for node, of_node in enumerate(sizes):
        first = node * devices_per_node
        for size in of_node:
            groups.append(ServiceGroup(tuple(range(first, first + size))))
            first += size
    return tuple(groups)


def _merge(services: Sequence[Service], sizes: list[list[int]], fits: Fits) -> bool:
    """Merge two neighbouring groups of one size. Return whether there were any.

    The size is the largest that is still too small for the most demanding service, in the first node that has such a
    pair. If no size is too small, it is the smallest pair.
    """
    most = max([size for node in sizes for size in node])
    needs = max([_least(service.name, fits, most) for service in services])
    pairs = [
        (size >= needs, size if size >= needs else -size, node, place)
        for node, of_node in enumerate(sizes)
        for place, size in enumerate(of_node[:-1])
        if of_node[place + 1] == size
    ]
    if not pairs:
        return False
    _, _, node, place = min(pairs)
    sizes[node][place : place + 2] = [2 * sizes[node][place]]
    return True


def _least(name: str, fits: Fits, most: int) -> int:
    """Return the fewest devices, of powers of two, on which a service fits alone; twice `most` if it fits on none."""
    size = 1
    while size <= most and not fits(size, (name,)):
        size *= 2
    return size


def _has_room(
    services: Sequence[Service], sizes: Sequence[int], fits: Fits, inside: Sequence[tuple[str, ...]] | None = None
) -> bool:
    """Return whether each service fits into a group, in addition to those already `inside`.

    The most demanding service comes first. It goes into the smallest group that has room; among equal sizes, into the
    emptiest.
    """
    inside = [*inside] if inside else [()] * len(sizes)
    most = max(sizes)
    for service in sorted(services, key=lambda s: -_least(s.name, fits, most)):
        room = [
            (size, len(inside[place]), place)
            for place, size in enumerate(sizes)
            if len(inside[place]) < MOST and fits(size, (*inside[place], service.name))
        ]
        if not room:
            return False
        place = min(room)[2]
        inside[place] = (*inside[place], service.name)
    return True


def _allocations(
    services: Sequence[Service],
    groups: tuple[ServiceGroup, ...],
    fits: Fits,
    score: Scorer,
    most_replicas: int | None,
    alpha: float,
) -> Iterator[tuple[ServiceGroup, ...]]:
    """Yield the allocations of the second stage in which every service has a group, each with one replica more."""
    rates = {service.name: service.rate_seq_s for service in services}
    found: tuple[ServiceGroup, ...] | None = groups
    while found is not None:
        groups, places = found, _places(found)
        order = [service for service in services if service.name not in places]
        outcomes: Mapping[str, ServiceOutcome] = {}  # missing services are ordered by their numbers of requests
        if not order:
            yield groups
            order = [s for s in services if most_replicas is None or places[s.name] < most_replicas]
            outcomes = score(groups) if order else {}
        by_urgency = sorted(order, key=lambda service: _urgency(service, outcomes, alpha))
        found = next(_choices(groups, by_urgency, places, rates, fits), None)


def _places(groups: Sequence[ServiceGroup]) -> dict[str, int]:
    """Return the number of groups of each service."""
    counts: dict[str, int] = {}
    for group in groups:
        for name in group.services:
            counts[name] = counts.get(name, 0) + 1
    return counts


def _urgency(service: Service, outcomes: Mapping[str, ServiceOutcome], alpha: float) -> tuple[float, str]:
    """Return a sort key; lower is more urgent.

    The key is the unserved index, which counts all requests of a service without a group as late.
    """
    index = outcomes[service.name].unserved(alpha) if service.name in outcomes else float(service.requests)
    return -index, service.name


def _choices(
    groups: tuple[ServiceGroup, ...],
    order: Sequence[Service],
    places: Mapping[str, int],
    rates: Mapping[str, float],
    fits: Fits,
) -> Iterator[tuple[ServiceGroup, ...]]:
    """Yield allocations of one more service, in the order of Algorithm 1.

    Groups are ordered by their rates, then services by urgency. While some services have no group, only those are
    tried, first in allocations that leave room for the others.
    """
    missing = [service for service in order if not places.get(service.name)]
    sizes = [len(group.devices) for group in groups]
    blocking = []

    def rate(place: int) -> tuple[float, int]:
        return sum(rates[name] / places[name] for name in groups[place].services), place

    for place in sorted(range(len(groups)), key=rate):
        group = groups[place]
        for service in missing or order:
            if service.name in group.services or len(group.services) >= MOST:
                continue
            if not fits(len(group.devices), (*group.services, service.name)):
                continue
            chosen = (*groups[:place], group.with_service(service.name), *groups[place + 1 :])
            rest = [other for other in missing if other is not service]
            if _has_room(rest, sizes, fits, [each.services for each in chosen]):
                yield chosen
            else:
                blocking.append(chosen)
    yield from blocking


def summary(tp: int, groups: tuple[ServiceGroup, ...], outcomes: Mapping[str, ServiceOutcome]) -> Placed:
    """Return a placement with every service, with its results summed over all requests."""
    requests = sum(outcome.requests for outcome in outcomes.values())
    late = sum(outcome.late for outcome in outcomes.values())
    normalised = sum(outcome.normalised * outcome.requests for outcome in outcomes.values()) / requests
    return Placed(tp, groups, 1 - late / requests, normalised)
