"""`run --plan` with a plan of stages: engines start and stop with the stages' turns; compared with the prediction."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xcore.console import output
from xcore.document import fingerprint, to_dict
from xcore.errors import InputError
from xcore.files import check_distinct, check_output
from xcore.requests.engine_protocol import Opened
from xcore.specs.profile import Profile
from xcore.usable_cpus import usable_cpus
from xmulti.applications.application_calls import ApplicationCalls
from xmulti.applications.planned_application import application_on
from xmulti.files.stage_plan import ExecutionStage, StagedNode, StagePlan
from xmulti.files.stage_plan_file import check_application, planned_node, read_stage_plan
from xmulti.plans.engine_client import EngineClient
from xmulti.plans.plan_run import PlannedModelRun, PlanRunOptions
from xmulti.serving.planned_units import unit_alone
from xmulti.serving.stage_engines import StageEngines
from xmulti.stages.running_phase import Executed
from xmulti.stages.stage_prediction import host_of, placed_of, predict_stages
from xmulti.stages.stage_progress import Parallel
from xmulti.stages.stage_turns import StageTurns, Turn
from xrunner.core.results import ResultFile, check_left


@dataclass(frozen=True)
class Loading:
    """A node's engine from its start until it has opened."""

    name: str
    tp: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StageRun:
    """The result of a run of a plan of stages."""

    plan: StagePlan
    models: tuple[PlannedModelRun, ...]
    """Nodes that have run any calls, without predictions."""
    resumed: int
    """Calls that were done before; if there are any, nothing is predicted."""
    stages: tuple[ExecutionStage, ...]
    """The stages as they have run."""
    loadings: tuple[Loading, ...]
    predicted: Executed | None
    """The plan's simulation with the actual outputs; None for a resumed run, or one that can't be simulated."""

    @property
    def seconds(self) -> float:
        """Seconds from the first engine's start until the last call was done."""
        return max((served.finish_s for model in self.models for served in model.measured), default=0.0)

    def stops(self, name: str) -> int:
        """Return how often a node was stopped before its end."""
        runs = [{node.name: (node.dp, node.devices) for node in stage.nodes}.get(name) for stage in self.stages]
        ran = [way for at, way in enumerate(runs) if way and (at == 0 or runs[at - 1] != way)]
        return max(0, len(ran) - 1)


def run_stages(options: PlanRunOptions) -> StageRun:
    """Run an application in a plan's stages, and predict the run with its actual outputs.

    Raises:
        InputError: A file can't be read or run.
    """
    if options.requests is not None or options.application is None:
        raise InputError(
            f"'{options.plan}' is a plan of stages for the calls of an application: pass --application instead of "
            "--requests."
        )
    if options.in_turn:
        raise InputError(f"--in-turn is not for plans of stages like '{options.plan}': leave one of them out.")
    check_distinct((options.out,), (options.plan, options.application))
    check_output(options.out)
    if options.out:
        check_left(options.out, options.resume)
    plan = read_stage_plan(options.plan, options.directories)
    calls = _calls(options.application, plan, options.seed)
    with ExitStack() as stack:
        file = None
        if options.out:
            mark = fingerprint([to_dict(plan), calls.mark])
            file = stack.enter_context(ResultFile(options.out, mark, options.resume))
        progress = stack.enter_context(output.progress("running calls"))
        asking, following = asyncio.run(_run(options, plan, calls, file, lambda done: progress(done, calls.total)))
    predicted = None if asking.resumed else _predicted(plan, calls, asking, following.profiles)
    models = [PlannedModelRun(name, tuple(served), ()) for name, served in asking.served.items() if served]
    ran = tuple(following.stages), tuple(following.loadings)
    return StageRun(plan, tuple(models), asking.resumed, *ran, predicted)


def _calls(path: Path, plan: StagePlan, seed: int) -> ApplicationCalls:
    nodes = {node.name: node for stage in reversed(plan.stages) for node in stage.nodes}
    by_name = {name: planned_node(plan, nodes[name]) for name in plan.nodes}
    application = application_on(path, by_name, seed)
    check_application(plan, application.graph, f"'{path}'")
    calls = ApplicationCalls(application, in_turn=False)
    calls.check()
    return calls


def _predicted(
    plan: StagePlan, calls: ApplicationCalls, asking: EngineClient, profiles: Mapping[tuple[str, int], Profile]
) -> Executed | None:
    try:
        return predict_stages(plan, calls.application, asking.results, profiles)
    except InputError as error:  # the results of the run are kept
        output.note(f"there is no prediction: {error}")
        return None


async def _run(
    options: PlanRunOptions,
    plan: StagePlan,
    calls: ApplicationCalls,
    file: ResultFile | None,
    progress: Callable[[int], None],
) -> "tuple[EngineClient, Following]":
    assert plan.cluster, "a plan that has been read"
    starts = 1 if plan.cluster.is_cpu else plan.devices  # engines that measure a machine do so one after the other
    directories = {model.name: Path(str(model.directory)) for model in plan.models}
    with tempfile.TemporaryDirectory(prefix="exegpt-run-", ignore_cleanup_errors=True) as name:  # 0700
        engines = StageEngines(plan.nodes, Path(name), starts, lambda node, opened: following.opened(node, opened))
        asking = EngineClient(engines.links, directories, file, progress)
        following = Following(plan, calls, engines, asking, _flags(options, plan))
        try:
            await engines.listen()
            await following.to_the_end()
        finally:
            await engines.close()
    return asking, following


def _flags(options: PlanRunOptions, plan: StagePlan) -> list[str]:
    """Return the flags of all engines: a CPU device always has an equal share of the cores."""
    threads = options.threads or max(1, usable_cpus() // plan.devices)
    return [*options.flags, "--threads", str(threads)]


class Following:
    """A plan's stages while its calls run."""

    def __init__(
        self, plan: StagePlan, calls: ApplicationCalls, engines: StageEngines, asking: EngineClient, flags: list[str]
    ):
        self._plan, self._calls, self._engines, self._asking, self._flags = plan, calls, engines, asking, flags
        sources = {
            node.name: tuple(dict.fromkeys(edge.source for edge in calls.application.graph.into(node.name)))
            for node in calls.application.graph.in_order()
        }
        self._turns = StageTurns(host_of(plan), placed_of(plan), sources, self._load_s)
        self._turns.end(calls.ended(asking.results))
        self._ended: set[str] = set()
        """Nodes that have ended since the last check."""
        self._some_ended = asyncio.Event()
        self._starts: dict[str, tuple[int, float]] = {}
        """By node: the degree, and the start time, of engines that haven't opened."""
        self.stages: list[ExecutionStage] = []
        self.loadings: list[Loading] = []
        self.profiles: dict[tuple[str, int], Profile] = {}
        """By node and degree: the profile with which an engine has opened."""

    def opened(self, name: str, opened: Opened) -> None:
        """Record that an engine of a node has opened."""
        tp = opened.schedule.stages[0].tp
        self.profiles.setdefault((name, tp), opened.profile)
        if name in self._starts:  # else it replaces one that was lost
            self.loadings.append(Loading(name, *self._starts.pop(name), self._asking.now_s))

    async def to_the_end(self) -> None:
        """Run all calls."""
        asked = asyncio.ensure_future(self._calls.run(self._asking, self._end))
        try:
            while self._turns.unfinished:
                turn = self._turns.next()
                start_s = self.stages[-1].end_s if self.stages else 0.0
                await self._begin(turn)
                await self._until_some_end(asked)
                nodes = tuple(StagedNode(n, way.dp, way.tp, turn.devices[n]) for n, way in turn.placed.items())
                self.stages.append(ExecutionStage(start_s, self._asking.now_s, nodes))
                ended, self._ended = self._ended, set()
                self._turns.end(ended)
            await asked
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _begin(self, turn: Turn) -> None:
        """Stop the engines that don't continue, and start the others on their devices."""
        assert self._plan.cluster, "a plan that has been read"
        await self._engines.stop([name for name in self._plan.nodes if name not in turn.stays])
        for name, way in turn.placed.items():
            if name not in turn.stays:
                node = planned_node(self._plan, StagedNode(name, way.dp, way.tp, turn.devices[name]))
                place = self._plan.nodes.index(name)
                self._starts[name] = way.tp, self._asking.now_s
                self._engines.start(name, unit_alone(node, place, self._flags, self._plan.cluster))

    async def _until_some_end(self, asked: "asyncio.Future[None]") -> None:
        """Wait until a node has ended.

        Raises:
            InputError: A call or an engine can't be run.
        """
        while not self._ended:
            self._some_ended.clear()
            look = asyncio.ensure_future(self._some_ended.wait())
            try:
                several: set[asyncio.Future[Literal[True]] | asyncio.Future[None] | asyncio.Future[int]] = {
                    look,
                    asked,
                    *self._engines.tasks,
                }
                await asyncio.wait(several, return_when=asyncio.FIRST_COMPLETED)
            finally:
                look.cancel()
            self._engines.check()
            if asked.done():
                asked.result()

    def _end(self, name: str) -> None:
        if name in self._turns.unfinished:  # else it had ended before this run
            self._ended.add(name)
            self._some_ended.set()

    def _load_s(self, name: str, way: Parallel) -> float:
        model = next(model for model in self._plan.models if model.name == name)
        return model.costs.degree(way.tp).load_s or 0.0
