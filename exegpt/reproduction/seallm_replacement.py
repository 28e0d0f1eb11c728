"""Services whose popularities change: a fixed placement, and one that is replaced adaptively (SeaLLM 4.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exegpt.reproduction.seallm_systems import OURS, RULES, Figures, History, figures_of, merged_engines, two_stage
from exegpt.reproduction.seallm_workload import (
    NODES,
    SLO,
    SeaService,
    ServiceArrays,
    Traffic,
    joined,
    on_devices,
    services,
    traffic_of,
)
from xmulti.sharing.cluster_replay import SimulatedCluster
from xmulti.sharing.replacement import FIRST_S, Performance, next_interval
from xmulti.stages.two_stage import Placed, ServiceGroup

RATE_SEQ_S, VARIATION = 10.0, 4.0
PHASES, PHASE_S = 3, 600.0
"""Number and length of the phases; popularities move to other services after each phase.

A phase is as long as two first intervals, because a placement based on the past only helps if popularity lasts.
"""
STEP = 3
"""Number of places by which popularities move."""
PULL_BYTES_S = 0.87e9
"""Rate at which a device loads weights: that of SamuLLM's host."""
PAST_S, PAST = 60.0, 1000
"""Seconds of the drift before the first placement, and the most past requests simulated for a next one."""


@dataclass(frozen=True, eq=False)
class DriftingTraffic:
    """Requests over time, and the requests before them, for which the first placement is made."""

    past: History
    asked: dict[str, ServiceArrays]
    seconds: float
    """When the last request arrives, or later."""
    first_s: float = FIRST_S
    """The first interval between two placements."""

    @property
    def services(self) -> tuple[SeaService, ...]:
        """The services, with their popularities before the first request."""
        return self.past.services


@dataclass(frozen=True)
class Replacements:
    """A run, and the times at which placements were replaced."""

    figures: Figures
    intervals_s: tuple[float, ...]
    errors: tuple[float, ...]
    moved: int
    """Total number of changed engines."""


def popularities() -> list[tuple[SeaService, ...]]:
    """Return the services with their popularities, for each phase."""
    shares = [service.popularity for service in services()]
    return [
        tuple(
            replace(service, popularity=shares[(place + STEP * phase) % len(shares)])
            for place, service in enumerate(services())
        )
        for phase in range(PHASES)
    ]


def changing_traffic() -> dict[str, ServiceArrays]:
    """Return every service's requests over all phases."""
    phases = [
        traffic_of(Traffic(RATE_SEQ_S, VARIATION, PHASE_S, 100 + phase), of_phase)
        for phase, of_phase in enumerate(popularities())
    ]
    names = [service.name for service in services()]
    return {name: joined([asked[name].later(n * PHASE_S) for n, asked in enumerate(phases)]) for name in names}


def drift() -> DriftingTraffic:
    """Return the synthetic drift; its past has the popularities of the first phase."""
    of_phase = popularities()[0]
    past = traffic_of(Traffic(RATE_SEQ_S, VARIATION, PAST_S, 99), of_phase)
    return DriftingTraffic(History(of_phase, past, NODES, RATE_SEQ_S), changing_traffic(), PHASES * PHASE_S, FIRST_S)


def _placed(history: History) -> Placed:
    placed = two_stage(history, RULES[OURS])
    assert placed, "32 devices have room for all services"
    return placed


def fixed(traffic: DriftingTraffic) -> Replacements:
    """Run with the first placement throughout."""
    cluster = _cluster(_placed(traffic.past).groups, traffic)
    cluster.run()
    return Replacements(_figures(traffic, cluster), (), (), 0)


def adaptive(traffic: DriftingTraffic, restart: bool = False) -> Replacements:
    """Run with placements that are replaced after adaptive intervals.

    Weights are loaded while engines run, and requests then move to the new engines. With `restart`, engines that change
    stop during the loading.
    """
    placed = _placed(traffic.past)
    cluster, groups = _cluster(placed.groups, traffic), placed.groups
    now, seconds, moved = 0.0, traffic.first_s, 0
    intervals, errors = [], []
    while now + seconds < traffic.seconds:
        now += seconds
        cluster.run(now)
        error = Performance(placed.in_time, placed.normalised).error(_real(cluster, traffic.asked, now - seconds, now))
        intervals.append(seconds)
        errors.append(error)
        history = _history(traffic, now, seconds)
        seconds = next_interval(seconds, error)
        if history is None:
            continue
        placed = _placed(history)
        wanted = matched(placed.groups, groups)
        pull_s = _pull_s(groups, wanted, {service.name: service.llm for service in traffic.services})
        moved += len(set(wanted) - set(groups))
        kept = {running.engine.key: running.engine for running in cluster.running}
        engines = [kept.get(engine.key, engine) for engine in merged_engines(wanted, traffic.past.by_name, RULES[OURS])]
        at_s, stopped_s = (now, pull_s) if restart else (now + min(pull_s, 0.9 * seconds), 0.0)
        cluster.replace(engines, at_s, stopped_s)
        groups = wanted
    cluster.run()
    return Replacements(_figures(traffic, cluster), tuple(intervals), tuple(errors), moved)


def _cluster(groups: Sequence[ServiceGroup], traffic: DriftingTraffic) -> SimulatedCluster:
    engines = merged_engines(groups, traffic.past.by_name, RULES[OURS])
    return SimulatedCluster(engines, {name: own.requests for name, own in traffic.asked.items()})


def _figures(traffic: DriftingTraffic, cluster: SimulatedCluster) -> Figures:
    return figures_of(traffic.asked, cluster.result(), [running.engine for running in cluster.running])


def _history(traffic: DriftingTraffic, now: float, seconds: float) -> History | None:
    """Return the last requests of the past interval, at most `PAST`; None if there were none."""
    arrivals = np.sort(np.concatenate([own.arrival_s for own in traffic.asked.values()]))
    of_interval = arrivals[(arrivals >= now - seconds) & (arrivals < now)]
    if not len(of_interval):
        return None
    start_s = float(of_interval[-PAST]) if len(of_interval) > PAST else now - seconds
    past = {
        name: own.only((own.arrival_s >= start_s) & (own.arrival_s < now)).later(-start_s)
        for name, own in traffic.asked.items()
    }
    return history_of(traffic.services, past, now - start_s)


def history_of(of: Sequence[SeaService], past: dict[str, ServiceArrays], seconds: float) -> History:
    """Return the requests of some seconds, and the services with their popularities: at least one request counts."""
    counts = [max(1, len(past[service.name].inputs)) for service in of]
    seen = tuple(replace(service, popularity=count / sum(counts)) for service, count in zip(of, counts, strict=True))
    return History(seen, past, NODES, sum(counts) / seconds)


def _real(cluster: SimulatedCluster, asked: Mapping[str, ServiceArrays], start_s: float, now: float) -> Performance:
    """Return the performance of the requests that ended in an interval."""
    rows = [
        (served.finish_s - served.arrival_s, asked[name].alone_s[served.index], asked[name].service.mean_s)
        for name, of_service in cluster.result().served.items()
        for served in of_service
        if start_s <= served.finish_s < now
    ]
    late = sum(latency > SLO * alone_s for latency, alone_s, _ in rows)
    count = max(1, len(rows))
    return Performance(1 - late / count, sum(latency / mean_s for latency, _, mean_s in rows) / count)


def matched(wanted: Sequence[ServiceGroup], before: Sequence[ServiceGroup]) -> tuple[ServiceGroup, ...]:
    """Return the wanted groups, placed so that as few as possible move.

    Where possible, they get the devices of previous groups with the same services and sizes.
    """
    if [group.devices for group in wanted] != [group.devices for group in before]:
        return tuple(wanted)
    free, chosen = list(before), dict[int, tuple[int, ...]]()
    for alike in (2, 1, 0):  # minimum number of common services
        for place, group in enumerate(wanted):
            least = min(alike, len(group.services))
            fitting = [
                old
                for old in free
                if len(old.devices) == len(group.devices) and len({*old.services} & {*group.services}) >= least
            ]
            if place not in chosen and fitting:
                chosen[place] = fitting[0].devices
                free.remove(fitting[0])
    return tuple(replace(group, devices=chosen[place]) for place, group in enumerate(wanted))


def _pull_s(before: Sequence[ServiceGroup], after: Sequence[ServiceGroup], llms: Mapping[str, str]) -> float:
    """Return the seconds until every device has loaded its missing weights; `llms` are the services' LLMs."""
    known = {(group.devices, name) for group in before for name in group.services}
    seconds = []
    for group in after:
        found = [
            on_devices(llms[name], len(group.devices)) for name in group.services if (group.devices, name) not in known
        ]
        seconds.append(sum(on.memory.weights for on in found if on) / PULL_BYTES_S)
    return max(seconds, default=0.0)
