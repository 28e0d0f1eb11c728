"""Stages of an application on one host: SamuLLM's greedy search (Alg. 1).

A stage is a set of nodes, each with a number of replicas and a tensor-parallel degree. It ends when a leading node
ends.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xcore.errors import InputError
from xmulti.stages.application import Application
from xmulti.stages.stage_progress import Parallel, Placed, Progress

Choose = Callable[[Progress, "Host", bool], Placed]
"""Returns the next stage of a state; the flag says whether running nodes may be stopped."""


@dataclass(frozen=True)
class Host:
    """The GPUs of one machine."""

    devices: int
    linked: int
    """Size of aligned groups of directly linked GPUs; 2: pairs. No tensor-parallel group is larger."""

    def __post_init__(self) -> None:
        if self.devices < 1 or self.linked < 1 or self.devices % self.linked:
            raise InputError(f"A host of {self.devices} devices can't be linked in groups of {self.linked}.")


@dataclass(frozen=True)
class PlannedStage:
    """A stage with its planned time."""

    start_s: float
    end_s: float
    placed: Placed


def parallels(progress: Progress, host: Host, name: str) -> list[Parallel]:
    """Return the ways to run a node on a host, by rising number of GPUs."""
    degrees = progress.application.replicas[progress.application.nodes[name].model]
    groups = [tp for tp in degrees if tp <= host.linked and host.linked % tp == 0]
    ways = [Parallel(dp, tp) for tp in groups for dp in range(1, host.devices // tp + 1)]
    if not ways:
        raise InputError(
            f"Node '{name}' can't run on a group of {host.linked} or fewer linked GPUs: all its degrees are larger."
        )
    return sorted(ways, key=lambda way: (way.gpus, way.tp))


def gpus(stage: Placed) -> int:
    """Return the number of GPUs of a stage."""
    return sum(way.gpus for way in stage.values())


def candidates(progress: Progress, host: Host, stage: Placed, locked: Placed) -> Iterator[Placed]:
    """Yield stages with one more node, or with one of their nodes on more GPUs; nodes of `locked` stay unchanged."""
    used = gpus(stage)
    for name in progress.unfinished:
        if name in locked or not progress.can_run(name, stage):
            continue
        for way in parallels(progress, host, name):
            candidate = {**stage, name: way}
            if used < gpus(candidate) <= host.devices:
                yield candidate


def greedy_stage(progress: Progress, host: Host, preempt: bool = True) -> Placed:
    """Return the next stage by the greedy rule.

    It repeatedly takes the GPUs with the largest gain of throughput per GPU, while there is a gain.
    """
    locked = {} if preempt else {name: run.parallel for name, run in progress.runs.items()}
    stage: Placed = dict(locked)
    throughput = progress.outlook(stage).throughput if stage else 0.0
    while True:
        best, best_rate, most = None, -math.inf, -math.inf
        for candidate in candidates(progress, host, stage, locked):
            gain = progress.outlook(candidate).throughput - throughput
            rate = gain / (gpus(candidate) - gpus(stage))
            most = max(most, gain)
            if rate > best_rate:
                best, best_rate = candidate, rate
        if best is None or (stage and most <= 0):
            return stage
        stage, throughput = best, progress.outlook(best).throughput


def plan_stages(
    application: Application, host: Host, choose: Choose = greedy_stage, preempt: bool = True
) -> tuple[PlannedStage, ...]:
    """Return all stages until every node is finished, each chosen from the state after those before it."""
    return go_on(Progress.beginning(application), host, choose, preempt)


def go_on(progress: Progress, host: Host, choose: Choose, preempt: bool) -> tuple[PlannedStage, ...]:
    """Return all stages from a state to the end."""
    stages = []
    while progress.unfinished:
        planned, progress = follow(progress, choose(progress, host, preempt))
        stages.append(planned)
    return tuple(stages)


def follow(progress: Progress, stage: Placed) -> tuple[PlannedStage, Progress]:
    """Return a stage with its time, and the state after it."""
    outlook = progress.outlook(stage)
    after = progress.stopped(stage).advance(outlook, outlook.end_s)
    return PlannedStage(progress.now, outlook.end_s, stage), after


def makespan(stages: tuple[PlannedStage, ...]) -> float:
    """Return seconds until the last stage ends."""
    return stages[-1].end_s if stages else 0.0
