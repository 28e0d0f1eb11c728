"""Branch and bound over stages, depth first.

The greedy stage comes before all others, so that the first descent is the greedy plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Integers
from xmulti.stages.application import Application
from xmulti.stages.greedy_stages import Host, PlannedStage, candidates, follow, gpus, greedy_stage, makespan, parallels
from xmulti.stages.stage_progress import Parallel, Placed, Progress

TOP_STAGES, MOST_PLANS = 20, 20
"""SamuLLM's limits."""


def best_stages(
    application: Application,
    host: Host,
    top_stages: int | None = TOP_STAGES,
    most_plans: int | None = MOST_PLANS,
    preempt: bool = True,
) -> tuple[PlannedStage, ...]:
    """Return the plan that completes first among `most_plans` complete ones. It is never later than the greedy plan.

    Each stage is one of the `top_stages` best by throughput. With both None, all plans are searched.
    """
    search = _Search(host, top_stages, most_plans, preempt)
    search.descend(Progress.beginning(application), ())
    return search.best


def lower_bound_s(progress: Progress, host: Host) -> float:
    """Return a lower bound on the remaining seconds of any plan.

    Each chain of calls takes an iteration per token. All tokens together take GPU seconds, of which the host has
    `devices` per second.
    """
    longest, gpu_s = 0.0, 0.0
    for name in progress.unfinished:
        calls, runs = progress.remaining(name), name in progress.runs
        begun = int(runs)  # running nodes may have nearly computed one more token of each call
        chain, tokens = _longest_chain(calls.outputs, calls.following), int(calls.outputs.sum())
        each = [_least(progress, name, tp, runs) for tp in {way.tp for way in parallels(progress, host, name)}]
        load_s, iteration_s = min(least.load_s for least in each), min(least.iteration_s for least in each)
        longest = max(longest, load_s + (chain - begun) * iteration_s)
        gpu_s += min(least.load_gpu_s for least in each)
        gpu_s += (tokens - begun * len(calls.outputs)) * min(least.token_gpu_s for least in each)
    return max(longest, gpu_s / host.devices)


@dataclass(frozen=True)
class _Least:
    """Lower bounds of one tensor-parallel degree."""

    load_s: float
    load_gpu_s: float
    iteration_s: float
    token_gpu_s: float


def _least(progress: Progress, name: str, tp: int, runs: bool) -> _Least:
    application = progress.application
    costs = application.replica(name, tp).costs
    load_s = 0.0 if runs else application.load_s[application.nodes[name].model, tp]
    seconds = np.minimum(costs.decode[1:, 0], costs.prefill[1:, 0])
    token_s = float((seconds / np.arange(1, len(seconds) + 1)).min())
    return _Least(load_s, tp * load_s, float(seconds.min()), tp * token_s)


def _longest_chain(outputs: Integers, following: Integers) -> int:
    """Return the most tokens in a chain of calls."""
    total = outputs.copy()
    later = np.flatnonzero(following >= 0)
    for call in later[::-1]:  # a round's call stands after that of the round before
        total[call] += total[following[call]]
    return int(total.max(initial=0))


class _Search:
    """The best plan so far, and the number of complete plans."""

    def __init__(self, host: Host, top_stages: int | None, most_plans: int | None, preempt: bool):
        self.host, self.top_stages, self.most_plans, self.preempt = host, top_stages, most_plans, preempt
        self.best: tuple[PlannedStage, ...] = ()
        self.plans = 0

    def descend(self, progress: Progress, stages: tuple[PlannedStage, ...]) -> None:
        """Search the plans that begin with these stages."""
        if not progress.unfinished:
            self.plans += 1
            if not self.best or makespan(stages) < makespan(self.best):
                self.best = stages
            return
        for stage in next_stages(progress, self.host, self.top_stages, self.preempt):
            if self.most_plans is not None and self.plans >= self.most_plans:
                return
            if self.best and progress.now + lower_bound_s(progress, self.host) >= makespan(self.best):
                return
            planned, after = follow(progress, stage)
            self.descend(after, (*stages, planned))


def next_stages(progress: Progress, host: Host, top_stages: int | None, preempt: bool) -> list[Placed]:
    """Return candidates for the next stage: the greedy one, then others by falling throughput; None: all."""
    first = greedy_stage(progress, host, preempt)
    locked: Placed = {} if preempt else {name: run.parallel for name, run in progress.runs.items()}
    if top_stages is None:
        found = list(every_stage(progress, host, locked))
    else:
        found = _promising(progress, host, locked, top_stages)
    found.sort(key=lambda stage: -progress.outlook(stage).throughput)
    others = [stage for stage in found if stage != first]
    return [first, *others[: None if top_stages is None else top_stages - 1]]


def _promising(progress: Progress, host: Host, locked: Placed, width: int) -> list[Placed]:
    """Return stages built as by the greedy search, but with the `width` best candidates at each step."""
    level, seen = [dict(locked)], dict[tuple[tuple[str, Parallel], ...], Placed]()
    while level:
        rated: dict[tuple[tuple[str, Parallel], ...], tuple[float, Placed]] = {}
        for stage in level:
            for candidate in candidates(progress, host, stage, locked):
                key = tuple(sorted(candidate.items()))
                if key not in seen and key not in rated:
                    rated[key] = (progress.outlook(candidate).throughput / gpus(candidate), candidate)
        best = sorted(rated.items(), key=lambda item: -item[1][0])[:width]
        seen |= {key: stage for key, (_, stage) in best}
        level = [dict(stage) for _, (_, stage) in best]
    return list(seen.values()) or ([dict(locked)] if locked else [])


def every_stage(progress: Progress, host: Host, locked: Placed) -> Iterator[Placed]:
    """Yield all possible stages of a state.

    A stage has any nodes whose sources are finished or in the stage, in any way that fits.
    """
    names = [name for name in progress.unfinished if name not in locked]

    def extend(at: int, stage: dict[str, Parallel]) -> Iterator[Placed]:
        if at == len(names):
            if stage:
                yield dict(stage)
            return
        yield from extend(at + 1, stage)
        if progress.can_run(names[at], stage):
            for way in parallels(progress, host, names[at]):
                if gpus(stage) + way.gpus <= host.devices:
                    yield from extend(at + 1, {**stage, names[at]: way})

    yield from extend(0, dict(locked))
