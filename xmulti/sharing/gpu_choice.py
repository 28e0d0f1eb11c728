"""The GPUs of a stage's nodes: running nodes keep their GPUs, unless others need linked GPUs."""

import itertools
from collections.abc import Iterator, Mapping

from xmulti.stages.greedy_stages import Host
from xmulti.stages.stage_progress import Parallel, Placed

Devices = Mapping[str, tuple[int, ...]]
"""By node: the first tp devices are the first replica's."""


def choose_gpus(
    stage: Placed, running: Devices, reload_s: Mapping[str, float], host: Host
) -> dict[str, tuple[int, ...]]:
    """Return devices of all nodes of a stage, which fits the host.

    Nodes of `running` keep theirs, except for the cheapest set of nodes whose reloading makes room for tensor-parallel
    groups on linked GPUs.
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
    """Return all sets of nodes by their total reloading time; of equal ones the smaller set first."""
    sets = itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1))
    return iter(sorted(sets, key=lambda moved: (sum(reload_s[name] for name in moved), len(moved))))


def _fill(nodes: Mapping[str, Parallel], fixed: Devices, host: Host) -> dict[str, tuple[int, ...]] | None:
    """Return devices for more nodes; None if one doesn't fit.

    The largest groups come first; each goes to the place with the fewest free linked GPUs.
    """
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
    """Return the number of free GPUs that are linked with a GPU."""
    first = device // host.linked * host.linked
    return len(free & set(range(first, first + host.linked)))
