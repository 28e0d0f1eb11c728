"""Which GPUs a stage's nodes get: what runs stays where it is, as far as linked GPUs can be found for the rest."""

import itertools
from collections.abc import Iterator, Mapping

from xscheduler.multimodel.stages import Host
from xsimulator.multimodel.stages.progress import Parallel, Placed

Devices = Mapping[str, tuple[int, ...]]
"""By node: the first tp devices are the first replica's."""


def choose_gpus(
    stage: Placed, running: Devices, reload_s: Mapping[str, float], host: Host
) -> dict[str, tuple[int, ...]]:
    """Devices of all nodes of a stage. Nodes of `running` keep theirs but for those whose reloading, together the
    cheapest, makes room for tensor-parallel groups on linked GPUs; the stage has at most as many as the host.
    """
    keep = [name for name in running if name in stage]
    for moved in _by_cost(keep, reload_s):
        fixed = {name: running[name] for name in keep if name not in moved}
        others = [name for name in stage if name not in fixed]
        placed = _fill({name: stage[name] for name in others}, fixed, host)
        if placed is not None:
            return {**fixed, **placed}
    raise AssertionError("a stage whose nodes all move has room: groups are powers of two, within the host's")


def _by_cost(names: list[str], reload_s: Mapping[str, float]) -> Iterator[tuple[str, ...]]:
    """All sets of nodes by the seconds that reloading them takes, together; of equal ones the smaller."""
    sets = itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1))
    return iter(sorted(sets, key=lambda moved: (sum(reload_s[name] for name in moved), len(moved))))


def _fill(nodes: Mapping[str, Parallel], fixed: Devices, host: Host) -> dict[str, tuple[int, ...]] | None:
    """Devices for more nodes: the largest groups first, each where least is free beside it; None where one has none."""
    free = set(range(host.devices)) - {device for devices in fixed.values() for device in devices}
    placed: dict[str, tuple[int, ...]] = {}
    for name, way in sorted(nodes.items(), key=lambda item: -item[1].tp):
        taken: list[int] = []
        for _ in range(way.dp):
            starts = range(0, host.devices, way.tp)
            groups = [range(start, start + way.tp) for start in starts if free.issuperset(range(start, start + way.tp))]
            if not groups:
                return None
            best = min(groups, key=lambda group: (_free_beside(group[0], free, host), group[0]))
            free -= set(best)
            taken += best
        placed[name] = tuple(taken)
    return placed


def _free_beside(device: int, free: set[int], host: Host) -> int:
    """Free GPUs that are linked with one."""
    first = device // host.linked * host.linked
    return len(free & set(range(first, first + host.linked)))
