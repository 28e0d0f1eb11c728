"""SamuLLM's baselines: one model at a time on all GPUs, or as many models at once as possible."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from xmulti.stages.greedy_stages import Host, gpus, parallels
from xmulti.stages.stage_progress import Placed, Progress


def max_stage(progress: Progress, host: Host, preempt: bool = True) -> Placed:
    """Return the Max-heuristic's stage: one node on all GPUs, in its fastest configuration.

    It never stops a node, so `preempt` changes nothing.
    """
    del preempt
    name = next(name for name in progress.unfinished if progress.can_run(name))
    ways = parallels(progress, host, name)
    widest = [way for way in ways if way.gpus == ways[-1].gpus]
    return {name: min(widest, key=lambda way: progress.outlook({name: way}).end_s)}


def min_stage(progress: Progress, host: Host, preempt: bool = True) -> Placed:
    """Return the Min-heuristic's stage: as many nodes at once as fit, on as many GPUs as possible, shared evenly.

    Among stages with equal shares, the one with the highest throughput is returned. Without preemption, running nodes
    stay unchanged, and other nodes share the free GPUs.
    """
    locked: Placed = {} if preempt else {name: run.parallel for name, run in progress.runs.items()}
    ways = {
        name: parallels(progress, host, name)
        for name in progress.unfinished
        if name not in locked and progress.can_run(name, progress.unfinished)
    }

    def closed(names: Collection[str]) -> bool:
        return all(progress.can_run(name, {*locked, *names}) for name in names)

    sizes = {name: sorted({way.gpus for way in of_one}) for name, of_one in ways.items()}
    stages = (
        {**locked, **dict(zip(share, chosen, strict=True))}
        for share in _even_shares(sizes, host.devices - gpus(locked), closed)
        for chosen in itertools.product(*([w for w in ways[name] if w.gpus == size] for name, size in share.items()))
    )
    return max(stages, key=lambda stage: progress.outlook(stage).throughput)


def _even_shares(
    sizes: Mapping[str, Sequence[int]], room: int, closed: Callable[[Collection[str]], bool]
) -> Sequence[dict[str, int]]:
    """Return ways to share GPUs among the largest number of nodes that fit together with their sources.

    Of these ways, only those that leave the fewest GPUs free are returned, the most even ones first.
    """
    for count in range(len(sizes), -1, -1):
        found: dict[tuple[int, int], list[dict[str, int]]] = {}
        for names in itertools.combinations(sizes, count):
            for share in _shares([(name, sizes[name]) for name in names], room) if closed(names) else ():
                key = (-sum(share.values()), sum(size * size for size in share.values()))
                found.setdefault(key, []).append(share)
        if found:
            return found[min(found)]
    raise AssertionError("no node at all has room for itself")


def _shares(sizes: Sequence[tuple[str, Sequence[int]]], room: int) -> Iterator[dict[str, int]]:
    """Yield all ways to give nodes GPUs."""
    if not sizes:
        yield {}
        return
    (name, known), rest = sizes[0], sizes[1:]
    least = sum(of_one[0] for _, of_one in rest)
    for size in known:
        if size + least <= room:
            for share in _shares(rest, room - size):
                yield {name: size, **share}
