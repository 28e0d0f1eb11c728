"""A plan of stages as it runs, on outputs that are other than it was planned for (SamuLLM, section 4.3).

When a leading node ends, the next stage's turn has come: what runs in both goes on; a node that no later stage has
keeps running; then the next stage's other nodes are placed, and nodes that later stages have if GPUs remain. No stage
begins while one before it has nodes that are neither placed nor finished.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from exegpt.stage_plan import ExecutionStage, StagedNode
from xscheduler.multimodel.gpu_choice import choose_gpus
from xscheduler.multimodel.stages import Host, PlannedStage, gpus
from xsimulator.multimodel.stages.application import Application
from xsimulator.multimodel.stages.progress import NodeOutlook, Parallel, Placed, Progress


@dataclass(frozen=True)
class Executed:
    """What a plan came to."""

    seconds: float
    stages: tuple[ExecutionStage, ...]
    busy_gpu_s: float
    """GPU seconds of replicas that compute."""
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
    """Run a plan's stages on an application, whose outputs may be others than the plan's."""
    return _Running(application, host, [dict(stage.placed) for stage in stages]).to_the_end()


class _Running:
    """The state of a plan that runs."""

    def __init__(self, application: Application, host: Host, stages: list[dict[str, Parallel]]):
        self.host, self.stages, self.at = host, stages, 0
        self.progress = Progress.beginning(application)
        self.devices: dict[str, tuple[int, ...]] = {}
        self.done: list[ExecutionStage] = []
        self.busy = self.loading = 0.0
        self.ends: dict[str, float] = {}
        self.work: dict[str, float] = {}
        self.moves = 0

    def to_the_end(self) -> Executed:
        while self.progress.unfinished:
            placed = self._placed()
            placed = self._on_devices(placed)
            outlook = self.progress.outlook(placed)
            end = min(node.end_s for node in outlook.nodes.values())  # any end frees GPUs
            leading = {name for name in outlook.leading if outlook.nodes[name].end_s <= end}
            nodes = tuple(StagedNode(name, way.dp, way.tp, self.devices[name]) for name, way in placed.items())
            self.done.append(ExecutionStage(self.progress.now, end, nodes))
            self.progress = self.progress.stopped(placed).advance(outlook, end)
            for name, node in outlook.nodes.items():
                if name not in self.progress.left:
                    self._count(name, node, end)
                    self.ends[name] = node.end_s
                    del self.devices[name]
            if leading and not self._pending():
                self.at += 1
        seconds = max(self.ends.values(), default=0.0)
        totals = (self.busy, self.loading, self.host.devices, self.ends, self.work, self.moves)
        return Executed(seconds, tuple(self.done), *totals)

    def _stage(self, at: int) -> dict[str, Parallel]:
        """The unfinished nodes of a planned stage."""
        stage = self.stages[at] if at < len(self.stages) else {}
        return {name: way for name, way in stage.items() if name in self.progress.left}

    def _pending(self) -> bool:
        """Whether the stage whose turn it is has nodes that don't run as it says."""
        return any(self._runs(name) != way for name, way in self._stage(self.at).items())

    def _runs(self, name: str) -> Parallel | None:
        run = self.progress.runs.get(name)
        return run.parallel if run else None

    def _placed(self) -> dict[str, Parallel]:
        """What runs from now on."""
        while self.at < len(self.stages) and not self._stage(self.at):
            self.at += 1
        stage = self._stage(self.at)
        later = {name for at in range(self.at + 1, len(self.stages)) for name in self._stage(at)}
        running = {name: run.parallel for name, run in self.progress.runs.items()}
        placed = {name: way for name, way in running.items() if stage.get(name) == way}
        placed.update({name: way for name, way in running.items() if name not in stage and name not in later})
        for _ in range(2):  # again with the GPUs of what would only wait for sources that don't run
            for name in self.progress.unfinished:  # the stage's others, sources first
                if name in stage and name not in placed:
                    self._add(placed, name, stage[name])
            for name in self.progress.unfinished:  # then leftovers
                if name in running and name not in placed and (name in later or name in stage):
                    self._add(placed, name, running[name])
            placed = self._with_sources(placed)
        if not placed:
            raise AssertionError("the first stage with unfinished nodes fits on a host with nothing else on it")
        return placed

    def _with_sources(self, placed: dict[str, Parallel]) -> dict[str, Parallel]:
        """The nodes of which all sources are finished or run beside them."""
        kept: dict[str, Parallel] = {}
        for name in self.progress.unfinished:
            if name in placed and self.progress.can_run(name, kept):
                kept[name] = placed[name]
        return kept

    def _add(self, placed: dict[str, Parallel], name: str, way: Parallel) -> None:
        """Place a node where GPUs and its sources allow it."""
        if gpus(placed) + way.gpus <= self.host.devices and self.progress.can_run(name, placed):
            placed[name] = way

    def _on_devices(self, placed: Placed) -> dict[str, Parallel]:
        """Stop what doesn't go on, and give all of `placed` devices; nodes that have to move are stopped too."""
        goes_on = {name: way for name, way in placed.items() if self._runs(name) == way}
        reload_s = {name: self._load_s(name, way) for name, way in goes_on.items()}
        chosen = choose_gpus(placed, {name: self.devices[name] for name in goes_on}, reload_s, self.host)
        moved = [name for name in goes_on if chosen[name] != self.devices[name]]
        self.moves += len(moved)
        stays = {name: way for name, way in goes_on.items() if name not in moved}
        before = self.progress.outlook({name: run.parallel for name, run in self.progress.runs.items()})
        for name, node in before.nodes.items():
            if name not in stays:
                self._count(name, node, self.progress.now)
        self.progress = self.progress.stopped(stays)
        self.devices = chosen
        return dict(placed)

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
