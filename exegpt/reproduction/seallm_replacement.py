"""SeaLLM's services with changing popularities: a fixed placement, and one that is replaced adaptively."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
PAST_S = 60.0
"""Maximum past time that is simulated for the next placement, in seconds."""


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


def first_placement() -> Placed:
    """Return the placement for the popularities of the first phase."""
    of_phase = popularities()[0]
    past = traffic_of(Traffic(RATE_SEQ_S, VARIATION, PAST_S, 99), of_phase)
    return _placed(History(of_phase, past, NODES, RATE_SEQ_S))


def _placed(history: History) -> Placed:
    placed = two_stage(history, RULES[OURS])
    assert placed, "32 devices have room for all services"
    return placed


def fixed() -> Replacements:
    """Run with the first placement throughout."""
    asked = changing_traffic()
    cluster = _cluster(first_placement().groups, asked)
    cluster.run()
    return Replacements(_figures(asked, cluster), (), (), 0)


def adaptive(restart: bool = False) -> Replacements:
    """Run with placements that are replaced after adaptive intervals.

    Weights are loaded while engines run, and requests then move to the new engines. With `restart`, engines that change
    stop during the loading.
    """
    asked, placed = changing_traffic(), first_placement()
    cluster, groups = _cluster(placed.groups, asked), placed.groups
    now, seconds, moved = 0.0, FIRST_S, 0
    intervals, errors = [], []
    while now + seconds < PHASES * PHASE_S:
        now += seconds
        cluster.run(now)
        error = Performance(placed.in_time, placed.normalised).error(_real(cluster, asked, now - seconds, now))
        intervals.append(seconds)
        errors.append(error)
        placed = _placed(_history(asked, now, seconds))
        seconds = next_interval(seconds, error)
        wanted = matched(placed.groups, groups)
        pull_s = _pull_s(groups, wanted)
        moved += len(set(wanted) - set(groups))
        kept = {running.engine.key: running.engine for running in cluster.running}
        engines = [kept.get(engine.key, engine) for engine in merged_engines(wanted, _by_name(), RULES[OURS])]
        at_s, stopped_s = (now, pull_s) if restart else (now + min(pull_s, 0.9 * seconds), 0.0)
        cluster.replace(engines, at_s, stopped_s)
        groups = wanted
    cluster.run()
    return Replacements(_figures(asked, cluster), tuple(intervals), tuple(errors), moved)


def _by_name() -> dict[str, SeaService]:
    return {service.name: service for service in services()}


def _cluster(groups: Sequence[ServiceGroup], asked: Mapping[str, ServiceArrays]) -> SimulatedCluster:
    engines = merged_engines(groups, _by_name(), RULES[OURS])
    return SimulatedCluster(engines, {name: own.requests for name, own in asked.items()})


def _figures(asked: Mapping[str, ServiceArrays], cluster: SimulatedCluster) -> Figures:
    return figures_of(asked, cluster.result(), [running.engine for running in cluster.running])


def _history(asked: Mapping[str, ServiceArrays], now: float, seconds: float) -> History:
    """Return the requests of the past interval; of a long interval, only the requests of its end."""
    start_s = max(now - seconds, now - PAST_S)
    past = {
        name: own.only((own.arrival_s >= start_s) & (own.arrival_s < now)).later(-start_s)
        for name, own in asked.items()
    }
    count = max(1, sum(len(own.inputs) for own in past.values()))
    seen = tuple(replace(service, popularity=len(past[service.name].inputs) / count) for service in services())
    return History(seen, past, NODES, count / (now - start_s))


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


def _pull_s(before: Sequence[ServiceGroup], after: Sequence[ServiceGroup]) -> float:
    """Return the seconds until every device has loaded its missing weights."""
    known = {(group.devices, name) for group in before for name in group.services}
    llms = {service.name: service.llm for service in services()}
    seconds = []
    for group in after:
        found = [
            on_devices(llms[name], len(group.devices)) for name in group.services if (group.devices, name) not in known
        ]
        seconds.append(sum(on.memory.weights for on in found if on) / PULL_BYTES_S)
    return max(seconds, default=0.0)
