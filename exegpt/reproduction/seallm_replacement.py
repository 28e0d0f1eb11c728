"""SeaLLM's services while their popularities change: a placement that stays, and one that is replaced adaptively."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from exegpt.reproduction.seallm_systems import (
    Figures,
    History,
    Rule,
    figures_of,
    merged_engine,
    two_stage,
)
from exegpt.reproduction.seallm_workload import (
    SLO,
    Asked,
    SeaService,
    Traffic,
    on_devices,
    services,
    traffic_of,
)
from xscheduler.multimodel.replacement import FIRST_S, Performance, next_interval
from xscheduler.multimodel.two_stage import Group, Placed
from xsimulator.multimodel.cluster import Cluster, ServiceRequests

PULL_BYTES_S = 0.87e9
"""At which a device gets weights: SamuLLM's host."""
FORGET_S = 120.0
"""Of the past, at most so much is simulated for the next placement."""


@dataclass(frozen=True)
class Changing:
    """Popularities that move from service to service."""

    rate_seq_s: float
    variation: float
    phases: int
    phase_s: float
    nodes: int = 4


@dataclass(frozen=True)
class Replacements:
    """A run, and when placements were replaced."""

    figures: Figures
    intervals_s: tuple[float, ...]
    errors: tuple[float, ...]
    moved: int
    """Engines that changed, in all."""


def popularities(changing: Changing) -> list[tuple[SeaService, ...]]:
    """Of each phase: every popularity moves on to the next service but two."""
    shares = [service.popularity for service in services()]
    return [
        tuple(
            replace(service, popularity=shares[(place + 3 * phase) % len(shares)])
            for place, service in enumerate(services())
        )
        for phase in range(changing.phases)
    ]


def changing_traffic(changing: Changing) -> dict[str, Asked]:
    """Every service's requests over all phases."""
    parts: dict[str, list[Asked]] = {service.name: [] for service in services()}
    for phase, of_phase in enumerate(popularities(changing)):
        traffic = Traffic(changing.rate_seq_s, changing.variation, changing.phase_s, 100 + phase)
        for name, asked in traffic_of(traffic, of_phase).items():
            parts[name].append(_later(asked, phase * changing.phase_s))
    return {name: _joined(of_service) for name, of_service in parts.items()}


def _later(asked: Asked, seconds: float) -> Asked:
    requests = asked.requests
    moved = tuple(replace(request, arrival_s=request.arrival_s + seconds) for request in requests.lengths)
    return Asked(ServiceRequests(moved, requests.hints), asked.alone_s)


def _joined(parts: list[Asked]) -> Asked:
    lengths = tuple(request for part in parts for request in part.requests.lengths)
    hints = tuple(known for part in parts for known in part.requests.hints)
    return Asked(ServiceRequests(lengths, hints), np.concatenate([part.alone_s for part in parts]))


def _between(asked: Mapping[str, Asked], start_s: float, end_s: float) -> dict[str, Asked]:
    """The requests that arrive in between, counted from its start."""
    found = {}
    for name, own in asked.items():
        places = [n for n, request in enumerate(own.requests.lengths) if start_s <= request.arrival_s < end_s]
        lengths = tuple(own.requests.lengths[n] for n in places)
        hints = tuple(own.requests.hints[n] for n in places)
        found[name] = _later(Asked(ServiceRequests(lengths, hints), own.alone_s[places]), -start_s)
    return found


def first_placement(changing: Changing, rule: Rule) -> Placed:
    """By the popularities of the first phase."""
    of_phase = popularities(changing)[0]
    traffic = Traffic(changing.rate_seq_s, changing.variation, FORGET_S, 99)
    return two_stage(History(of_phase, traffic_of(traffic, of_phase), changing.nodes, changing.rate_seq_s), rule)


def fixed(changing: Changing, rule: Rule, placed: Placed) -> Replacements:
    """The first placement stays."""
    asked = changing_traffic(changing)
    cluster = _cluster(placed.groups, asked, rule)
    cluster.run()
    return Replacements(figures_of(services(), asked, cluster.result()), (), (), 0)


def adaptive(changing: Changing, rule: Rule, placed: Placed, restart: bool = False) -> Replacements:
    """Placements are replaced after adaptive intervals. Weights are pulled while engines run, which then hand their
    requests over; with `restart` those that change stand still meanwhile.
    """
    asked = changing_traffic(changing)
    cluster = _cluster(placed.groups, asked, rule)
    expected = Performance(placed.in_time, placed.normalised)
    end_s, now, seconds = changing.phases * changing.phase_s, 0.0, FIRST_S
    intervals, errors, moved = [], [], 0
    groups = placed.groups
    while now + seconds < end_s:
        now += seconds
        cluster.run_until(now)
        error = expected.error(_real(cluster, asked, now - seconds, now))
        intervals.append(seconds)
        errors.append(error)
        seconds = next_interval(seconds, error)
        history = _history(changing, asked, now, intervals[-1])
        placed = two_stage(history, rule)
        expected = Performance(placed.in_time, placed.normalised)
        placed = replace(placed, groups=tuple(_matched(placed.groups, groups)))
        pull_s = _pull_s(groups, placed.groups)
        moved += len(set(placed.groups) - set(groups))
        by_name = {service.name: service for service in services()}
        kept = {running.engine.key: running.engine for running in cluster.running}
        engines = [merged_engine(group, by_name, rule) for group in placed.groups if group.services]
        engines = [kept.get(engine.key, engine) for engine in engines]
        cluster.replace(engines, now if restart else now + min(pull_s, 0.9 * seconds), pull_s if restart else 0.0)
        groups = placed.groups
    cluster.run()
    return Replacements(figures_of(services(), asked, cluster.result()), tuple(intervals), tuple(errors), moved)


def _cluster(groups: tuple[Group, ...], asked: Mapping[str, Asked], rule: Rule) -> Cluster:
    by_name = {service.name: service for service in services()}
    engines = [merged_engine(group, by_name, rule) for group in groups if group.services]
    return Cluster(engines, {name: own.requests for name, own in asked.items()})


def _history(changing: Changing, asked: Mapping[str, Asked], now: float, seconds: float) -> History:
    """Of the interval that has passed, or of the end of a long one."""
    start_s = max(now - seconds, now - FORGET_S)
    past = _between(asked, start_s, now)
    count = max(1, sum(len(own.alone_s) for own in past.values()))
    seen = tuple(replace(s, popularity=len(past[s.name].alone_s) / count) for s in services())
    return History(seen, past, changing.nodes, count / (now - start_s))


def _real(cluster: Cluster, asked: Mapping[str, Asked], start_s: float, now: float) -> Performance:
    """Of the requests that were done in an interval."""
    late, normalised, count = 0, 0.0, 0
    means = {service.name: service.mean_s for service in services()}
    for name, served in cluster.result().served.items():
        for one in served:
            if start_s <= one.finish_s < now:
                latency = one.finish_s - one.arrival_s
                late += latency > SLO * asked[name].alone_s[one.index]
                normalised += latency / means[name]
                count += 1
    return Performance(1 - late / max(1, count), normalised / max(1, count))


def _matched(wanted: tuple[Group, ...], before: tuple[Group, ...]) -> Iterator[Group]:
    """The wanted groups, on the devices of groups before that had the same services wherever sizes are as they were:
    what needn't move doesn't.
    """
    if [group.devices for group in wanted] != [group.devices for group in before]:
        yield from wanted
        return
    free = list(before)
    chosen: dict[int, tuple[int, ...]] = {}
    for alike in (2, 1, 0):  # services in common
        for place, group in enumerate(wanted):
            if place in chosen:
                continue
            for old in free:
                common = len(set(old.services) & set(group.services))
                if len(old.devices) == len(group.devices) and common >= min(alike, len(group.services)):
                    chosen[place] = old.devices
                    free.remove(old)
                    break
    yield from (replace(group, devices=chosen[place]) for place, group in enumerate(wanted))


def _pull_s(before: tuple[Group, ...], after: tuple[Group, ...]) -> float:
    """Seconds until every device has the weights that it lacks."""
    by_name = {service.name: service for service in services()}
    known = {
        (device, len(group.devices), name) for group in before for device in group.devices for name in group.services
    }
    longest = 0.0
    for group in after:
        size, lacking = len(group.devices), 0.0
        for name in group.services:
            if (group.devices[0], size, name) not in known:
                on = on_devices(by_name[name].llm, size)
                assert on, "it has room"
                lacking += on.memory.weights
        longest = max(longest, lacking / PULL_BYTES_S)
    return longest
