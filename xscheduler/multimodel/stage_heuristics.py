"""What SamuLLM is compared with: one model at a time on all GPUs, or as many models at once as there are GPUs for."""

import itertools

from xscheduler.multimodel.stages import Host, gpus, parallels
from xsimulator.multimodel.progress import Parallel, Placed, Progress


def max_stage(progress: Progress, host: Host, preempt: bool = True) -> Placed:
    """Max-heuristic: one node, on all GPUs, in the way that is done first. It never stops a node, so `preempt` changes
    nothing.
    """
    del preempt
    name = next(name for name in progress.unfinished if progress.can_run(name))
    ways = parallels(progress, host, name)
    widest = [way for way in ways if way.gpus == ways[-1].gpus]
    return {name: min(widest, key=lambda way: progress.outlook({name: way}).end_s)}


def min_stage(progress: Progress, host: Host, preempt: bool = True) -> Placed:
    """Min-heuristic: as many nodes at once as fit, with GPUs shared evenly; of equal shares the way that computes most.

    GPUs that are left over go one by one to the first nodes that can use them. Without preemption nodes that run
    stay as they are, and the others share the GPUs that are free.
    """
    locked = {} if preempt else {name: run.parallel for name, run in progress.runs.items()}
    stage: dict[str, Parallel] = dict(locked)
    names: list[str] = []
    room = host.devices - gpus(locked)
    for name in progress.unfinished:  # in order: sources come first
        least = parallels(progress, host, name)[0].gpus
        fits = sum(parallels(progress, host, other)[0].gpus for other in names) + least <= room
        if name not in locked and fits and progress.can_run(name, (*locked, *names)):
            names.append(name)
    shares = _even_shares(progress, host, names, room)
    for name in names:
        stage[name] = _most_computed(progress, host, name, shares[name], stage)
    return stage


def _even_shares(progress: Progress, host: Host, names: list[str], room: int) -> dict[str, int]:
    """GPUs of each node: numbers that it can run on, one more in turn while there are any."""
    sizes = {name: sorted({way.gpus for way in parallels(progress, host, name)}) for name in names}
    shares = {name: sizes[name][0] for name in names}
    for name in itertools.cycle(names):

        def more(name: str) -> int | None:
            spare = room - sum(shares.values())
            return next((size for size in sizes[name] if shares[name] < size <= shares[name] + spare), None)

        least = min((shares[n] for n in names if more(n) is not None), default=None)
        if least is None:
            break
        size = more(name)
        if size is not None and shares[name] == least:
            shares[name] = size
    return shares


def _most_computed(progress: Progress, host: Host, name: str, share: int, stage: Placed) -> Parallel:
    """The way to use a share that gives the stage so far the highest throughput."""
    ways = [way for way in parallels(progress, host, name) if way.gpus == share]
    return max(ways, key=lambda way: progress.outlook({**stage, name: way}).throughput)
