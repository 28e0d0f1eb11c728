"""The progress of an application's nodes, and predictions of a stage."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from xcore.arrays import Array, Integers
from xmulti.stages.application import Application
from xmulti.stages.model_run import ModelRun, RemainingCalls, run_model

_ROUNDING_S = 1e-9
"""An iteration that ends with the stage counts, however its time was summed."""


@dataclass(frozen=True, order=True)
class Parallel:
    """How a model runs: number of replicas, and GPUs of each."""

    dp: int
    tp: int

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.dp * self.tp


Placed = Mapping[str, Parallel]
"""A stage: its nodes, with how each runs."""


@dataclass(frozen=True, eq=False)
class Left:
    """The remaining calls of a node."""

    calls: RemainingCalls
    places: Integers
    """Indices of these calls among the node's calls."""
    done: Array
    """When each of the node's calls ended; infinite for the remaining ones."""


@dataclass(frozen=True, eq=False)
class NodeRun:
    """A running node: its start, how it runs, and the calls that remained then."""

    left: Left
    parallel: Parallel
    start_s: float
    load_s: float


@dataclass(frozen=True, eq=False)
class NodeOutlook:
    """The predicted future of a running node."""

    run: NodeRun
    result: ModelRun
    done: Array
    """Seconds at which each of the node's calls ends; infinite if it doesn't."""

    @property
    def end_s(self) -> float:
        """When the node's last call ends."""
        return self.run.start_s + self.result.seconds

    def work_at(self, now: float) -> float:
        """Multiply-adds since the run began."""
        return self.result.work_at(now - self.run.start_s)


@dataclass(frozen=True, eq=False)
class StageOutlook:
    """The predicted future of a stage's nodes if the stage continues."""

    now: float
    nodes: Mapping[str, NodeOutlook]
    leading: tuple[str, ...]
    """Nodes without a source in the stage.

    A node that runs out of calls while it waits for another one ends no stage.
    """

    @property
    def end_s(self) -> float:
        """When the first leading node ends; a node ends with its slowest replica."""
        return min(self.nodes[name].end_s for name in self.leading)

    @property
    def throughput(self) -> float:
        """Multiply-adds per second until the stage ends, loading included."""
        end = self.end_s
        work = sum(node.work_at(end) - node.work_at(self.now) for node in self.nodes.values())
        return work / (end - self.now) if end > self.now else 0.0


@dataclass(frozen=True, eq=False)
class Progress:
    """The state of an application at a point in time."""

    application: Application
    now: float
    done: Mapping[str, Array]
    """By node, for each call: when it ended; infinite if it hasn't."""
    left: Mapping[str, Left]
    """Remaining calls of each unfinished node; for running nodes, those that remained when they began."""
    runs: Mapping[str, NodeRun]
    memo: dict[tuple[object, ...], ModelRun] = field(default_factory=dict)
    """Simulated runs, by their starting states."""
    cuts: dict[tuple[NodeRun, float], Left] = field(default_factory=dict)
    """Remaining calls of runs that have been stopped."""

    @staticmethod
    def beginning(application: Application) -> "Progress":
        """Return the state before anything has run."""
        done = {name: np.full(len(node.calls.prompts), np.inf) for name, node in application.nodes.items()}
        left = {
            name: Left(node.calls, np.arange(len(node.calls.prompts)), done[name])
            for name, node in application.nodes.items()
        }
        return Progress(application, 0.0, done, left, {})

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Nodes with remaining calls, each after its sources."""
        return tuple(name for name in self.application.nodes if name in self.left)

    def can_run(self, name: str, beside: Collection[str] = ()) -> bool:
        """Return whether all sources of an unfinished node are finished, or are in `beside`."""
        return name in self.left and all(
            source not in self.left or source in beside for source in self.application.nodes[name].sources
        )

    def remaining(self, name: str) -> RemainingCalls:
        """Return the remaining calls of an unfinished node."""
        return (self._cut(name, self.runs[name]) if name in self.runs else self.left[name]).calls

    def outlook(self, stage: Placed) -> StageOutlook:
        """Return the prediction of a stage that begins now.

        Nodes that already run this way continue; others are loaded.
        """
        nodes: dict[str, NodeOutlook] = {}
        done = dict(self.done)
        for name in self.application.nodes:
            if name in stage:
                nodes[name] = self._node(name, self._run(name, stage[name]), done)
                done[name] = nodes[name].done
        leading = tuple(
            name for name in nodes if not any(source in nodes for source in self.application.nodes[name].sources)
        )
        return StageOutlook(self.now, nodes, leading)

    def advance(self, outlook: StageOutlook, until: float) -> "Progress":
        """Return the state at a later time of a stage.

        Its nodes keep running; `stopped` stops those that are not in the next stage.
        """
        done, left, runs = dict(self.done), dict(self.left), {}
        for name, node in outlook.nodes.items():
            if node.end_s <= until:
                done[name] = node.done
                del left[name]
            else:
                done[name] = np.where(node.done <= until, node.done, np.inf)
                runs[name] = node.run
        return replace(self, now=until, done=done, left=left, runs=runs)

    def stopped(self, keep: Placed) -> "Progress":
        """Return the state without running nodes that don't run this way in the next stage.

        Their KV caches are lost, and their generated tokens become part of the prompts.
        """
        done, left, runs = dict(self.done), dict(self.left), dict(self.runs)
        for name, run in self.runs.items():
            if keep.get(name) != run.parallel:
                left[name] = self._cut(name, run)
                done[name] = left[name].done
                del runs[name]
        return replace(self, done=done, left=left, runs=runs)

    def _run(self, name: str, parallel: Parallel) -> NodeRun:
        running = self.runs.get(name)
        if running is not None and running.parallel == parallel:
            return running
        left = self.left[name] if running is None else self._cut(name, running)
        load_s = self.application.load_s[self.application.nodes[name].model, parallel.tp]
        return NodeRun(left, parallel, self.now, load_s)

    def _node(self, name: str, run: NodeRun, done: Mapping[str, Array]) -> NodeOutlook:
        result = self._simulated(name, run, self._ready(name, run, done))
        ends = run.left.done.copy()
        ends[run.left.places] = run.start_s + result.done
        return NodeOutlook(run, result, ends)

    def _ready(self, name: str, run: NodeRun, done: Mapping[str, Array]) -> Array:
        """Return seconds from the run's start until each of its calls can begin."""
        ready = np.zeros(len(run.left.places))
        for source, places in self.application.nodes[name].needs:
            waits = places[run.left.places]
            ready = np.maximum(ready, np.where(waits >= 0, done[source][waits] - run.start_s, 0.0))
        return ready

    def _simulated(self, name: str, run: NodeRun, ready: Array, until_s: float = np.inf) -> ModelRun:
        key = (run.left, run.parallel, run.load_s, ready.tobytes() if ready.any() else b"", until_s)
        if key not in self.memo:
            model = self.application.replica(name, run.parallel.tp)
            self.memo[key] = run_model(model, run.left.calls, ready, run.parallel.dp, run.load_s, until_s)
        return self.memo[key]

    def until_now(self, name: str, run: NodeRun) -> ModelRun:
        """Return the result of a run so far."""
        elapsed = max(run.load_s, self.now - run.start_s)
        return self._simulated(name, run, self._ready(name, run, self.done), elapsed + _ROUNDING_S)

    def _cut(self, name: str, run: NodeRun) -> Left:
        """Return the remaining calls of a run that stops now."""
        elapsed = self.now - run.start_s
        if elapsed <= run.load_s:
            return run.left
        if (run, self.now) in self.cuts:
            return self.cuts[run, self.now]
        result = self.until_now(name, run)
        kept = ~np.isfinite(result.done)
        place = np.full(len(kept) + 1, -1)  # index -1 finds the last entry
        place[:-1][kept] = np.arange(int(kept.sum()))
        calls = run.left.calls
        rest = RemainingCalls(
            (calls.prompts + result.generated)[kept],
            (calls.outputs - result.generated)[kept],
            result.computed[kept],
            place[calls.following[kept]],
        )
        done = run.left.done.copy()
        done[run.left.places] = run.start_s + result.done
        self.cuts[run, self.now] = Left(rest, run.left.places[kept], done)
        return self.cuts[run, self.now]
