"""Simulated runs of a plan of stages with outputs other than the planned ones, by the rule of `StageTurns`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xmulti.files.stage_plan import ExecutionStage, StagedNode
from xmulti.stages.application import Application
from xmulti.stages.greedy_stages import Host, PlannedStage
from xmulti.stages.stage_progress import NodeOutlook, Parallel, Progress
from xmulti.stages.stage_turns import StageTurns, Turn


@dataclass(frozen=True)
class Executed:
    """The result of executing a plan."""

    seconds: float
    stages: tuple[ExecutionStage, ...]
    busy_gpu_s: float
    """GPU seconds of computing replicas."""
    loading_gpu_s: float
    devices: int
    ends: dict[str, float]
    """By node: when its last call ended."""
    work: dict[str, float]
    """By node: multiply-adds of all its calls."""
    moves: int
    """Nodes that were reloaded only because others needed their GPUs."""

    @property
    def idle(self) -> float:
        """Share of all GPU seconds in which a GPU neither computes nor loads."""
        return 1.0 - (self.busy_gpu_s + self.loading_gpu_s) / (self.devices * self.seconds)

    @property
    def not_computing(self) -> float:
        """Share of all GPU seconds in which a GPU doesn't compute."""
        return 1.0 - self.busy_gpu_s / (self.devices * self.seconds)


def execute(application: Application, host: Host, stages: Sequence[PlannedStage]) -> Executed:
    """Simulate a plan's stages on an application whose outputs may differ from the planned ones."""
    return _Running(application, host, stages).to_the_end()


class _Running:
    """The state of a running plan."""

    def __init__(self, application: Application, host: Host, stages: Sequence[PlannedStage]):
        self.host = host
        self.progress = Progress.beginning(application)
        sources = {name: node.sources for name, node in application.nodes.items()}
        self.turns = StageTurns(host, [stage.placed for stage in stages], sources, self._load_s)
        self.done: list[ExecutionStage] = []
        self.busy = self.loading = 0.0
        self.ends: dict[str, float] = {}
        self.work: dict[str, float] = {}
        self.moves = 0

    def to_the_end(self) -> Executed:
        while self.progress.unfinished:
            turn = self.turns.next()
            self._stop(turn)
            outlook = self.progress.outlook(turn.placed)
            end = min(node.end_s for node in outlook.nodes.values())  # any end frees GPUs
            nodes = tuple(StagedNode(name, way.dp, way.tp, turn.devices[name]) for name, way in turn.placed.items())
            self.done.append(ExecutionStage(self.progress.now, end, nodes))
            self.progress = self.progress.stopped(turn.placed).advance(outlook, end)
            ended = [name for name in outlook.nodes if name not in self.progress.left]
            for name in ended:
                self._count(name, outlook.nodes[name], end)
                self.ends[name] = outlook.nodes[name].end_s
            self.turns.end(ended)
        seconds = max(self.ends.values(), default=0.0)
        totals = (self.busy, self.loading, self.host.devices, self.ends, self.work, self.moves)
        return Executed(seconds, tuple(self.done), *totals)

    def _stop(self, turn: Turn) -> None:
        """Stop nodes that don't continue, and nodes that have to move."""
        self.moves += turn.moved
        before = self.progress.outlook({name: run.parallel for name, run in self.progress.runs.items()})
        for name, node in before.nodes.items():
            if name not in turn.stays:
                self._count(name, node, self.progress.now)
        self.progress = self.progress.stopped({name: turn.placed[name] for name in turn.stays})

    def _load_s(self, name: str, way: Parallel) -> float:
        application = self.progress.application
        return application.load_s[application.nodes[name].model, way.tp]

    def _count(self, name: str, node: NodeOutlook, now: float) -> None:
        """Add up a run that ends or is stopped."""
        run, result = node.run, node.result
        if not math.isclose(now, node.end_s):
            result = self.progress.until_now(name, run)
        self.busy += result.busy_s * run.parallel.tp
        self.loading += min(run.load_s, now - run.start_s) * run.parallel.gpus
        self.work[name] = self.work.get(name, 0.0) + result.work
