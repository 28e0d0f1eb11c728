"""`run --plan`: requests or an application's calls on the engines of a plan, compared with the prediction."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypedDict

from xcore.columns import parse_columns
from xcore.console import output
from xcore.document import fingerprint, to_dict
from xcore.errors import InputError
from xcore.files import check_distinct, check_output
from xcore.requests.request import Request, Result
from xcore.specs.cluster_plan import Plan, PlannedModel
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes, latencies, percentiles
from xcore.specs.workload import RequestLengths
from xmulti.applications.application_calls import ApplicationCalls
from xmulti.applications.planned_application import plan_application
from xmulti.plans.engine_client import EngineClient, together
from xmulti.plans.plan_requests import read_plan_requests
from xmulti.serving.planned_units import planned_units, read_plan
from xmulti.serving.ranked_order import RankedOrder, order_flags, ranked_order
from xmulti.serving.replica_links import replica_links
from xmulti.serving.started import started
from xmulti.sharing.call_replay import replay_calls
from xmulti.sharing.plan_replay import replay_plan
from xrunner.core.results import ResultFile, check_left


@dataclass(frozen=True)
class PlanRunOptions:
    """The options of `exegpt run --plan`."""

    plan: Path
    directories: Mapping[str, str]
    """Directories of models, in addition to the plan's."""
    requests: str | None
    application: Path | None
    """Exactly one of `requests` and `application` is given."""
    out: Path | None
    resume: bool
    seed: int
    device: str | None
    attention: str | None
    threads: int | None
    in_turn: bool = False
    """Whether an application's models run one after the other, for comparison."""
    columns: str | None = None
    """Column names of a trace, as typed."""
    scale_to_context: bool = False
    """Whether a trace's lengths are scaled to the models' contexts."""
    order: str | None = None
    """The order of requests, one of `plan_order.RUN`; None: that of the plan's method."""
    rankers: Mapping[str, Path] = field(default_factory=dict)
    """The files of the models' rankers, for the learned order."""

    @property
    def flags(self) -> list[str]:
        """Flags of `exegpt engine`."""
        given = {"--device": self.device, "--attention": self.attention}
        return [*(word for option, value in given.items() if value for word in (option, value)), "--pinned"]


@dataclass(frozen=True)
class PlannedModelRun:
    """One model's served requests, measured and predicted."""

    name: str
    measured: tuple[RequestTimes, ...]
    predicted: tuple[RequestTimes, ...]


@dataclass(frozen=True)
class PlanRun:
    """The result of a run of a plan."""

    plan: Plan
    models: tuple[PlannedModelRun, ...]
    """The models that have run requests."""
    resumed: int
    """Requests that were done before; if there are any, nothing is predicted."""

    @property
    def seconds(self) -> float:
        """Seconds until the last request was done."""
        return _end_s([model.measured for model in self.models])

    @property
    def predicted_seconds(self) -> float | None:
        """Seconds until the last request was done in the replay; None for a resumed run."""
        return None if self.resumed else _end_s([model.predicted for model in self.models])


def _end_s(of_models: Sequence[Sequence[RequestTimes]]) -> float:
    return max((served.finish_s for of_model in of_models for served in of_model), default=0.0)


def run_plan(options: PlanRunOptions) -> PlanRun:
    """Start the plan's engines, run all requests or calls, and predict the run with its actual outputs.

    Raises:
        InputError: A file can't be read or run.
    """
    check_distinct((options.out,), (options.plan, options.requests, options.application, *options.rankers.values()))
    check_output(options.out)
    if options.out:
        check_left(options.out, options.resume)
    plan = read_plan(options.plan, options.directories)
    work = _work(options, plan)
    of_unit = partial(order_flags, options.order, options.rankers)
    units = planned_units(plan, [*options.flags, "--report-speed"], options.threads, None, of_unit)
    starts = 1 if plan.cluster.is_cpu else len(units)  # engines that measure a machine do so one after the other
    with ExitStack() as stack:
        file = None
        if options.out:
            mark = fingerprint([to_dict(plan), work.mark])
            file = stack.enter_context(ResultFile(options.out, mark, options.resume))
        progress = stack.enter_context(output.progress("running requests"))

        async def all_of_it() -> tuple[EngineClient, dict[int, Profile]]:
            async with started(units, starts, options.in_turn) as links:
                profiles = {place: link.opened.profile for place, link in links.items() if link.opened}
                directories = {model.name: Path(str(model.directory)) for model in plan.models}
                of_models = replica_links(units, links)
                asking = EngineClient(of_models, directories, file, lambda done: progress(done, work.total))
                await work.run(asking)
            return asking, profiles | {place: link.speed.profile for place, link in links.items() if link.speed}

        asking, profiles = asyncio.run(all_of_it())
    by_key = {plan.models[place].key: profile for place, profile in profiles.items()}
    predicted = {} if asking.resumed else work.predict(asking.results, lambda model: by_key[model.key])
    models = [
        PlannedModelRun(name, tuple(asking.served[name]), predicted.get(name, ()))
        for name in plan.replicas
        if asking.served[name]
    ]
    return PlanRun(plan, tuple(models), asking.resumed)


def _work(options: PlanRunOptions, plan: Plan) -> "IndependentRequests | PlannedCalls":
    if (options.requests is None) == (options.application is None):
        raise InputError("A plan runs either requests or an application: pass one of --requests and --application.")
    if options.application is not None:
        if options.order or options.rankers:
            raise InputError("--order orders requests, not the calls of an application: leave it and --ranker out.")
        calls = PlannedCalls(plan_application(options.application, plan, options.seed), options.in_turn, plan)
        calls.check()
        return calls
    assert options.requests is not None, "one of them is given"
    if options.in_turn:
        raise InputError("--in-turn is only for the calls of an application: leave it out, or pass --application.")
    columns = parse_columns(options.columns) if options.columns else None
    how = (options.seed, columns, output.note, options.scale_to_context)
    directories = {model.name: str(model.directory) for model in plan.models}
    order = ranked_order(options.order, options.rankers, directories)
    requests = read_plan_requests(options.requests, plan, *how)
    return IndependentRequests(plan, requests, order)


@dataclass(frozen=True)
class IndependentRequests:
    """Requests that depend on nothing but their arrival."""

    plan: Plan
    by_model: Mapping[str, list[Request]]
    order: RankedOrder | None = None

    @property
    def total(self) -> int:
        """Number of requests of all models."""
        return sum(map(len, self.by_model.values()))

    @property
    def mark(self) -> object:
        """A value that is equal for the same requests."""
        return {name: [to_dict(request) for request in own] for name, own in self.by_model.items()}

    async def run(self, asking: EngineClient) -> None:
        """Send all requests."""

        async def one(name: str, request: Request) -> None:
            await asking.until(request.arrival_s)
            await asking.ask(name, request)

        await together([one(name, request) for name, own in self.by_model.items() for request in own])

    def predict(
        self, results: Mapping[str, Result], profile_of: Callable[[PlannedModel], Profile]
    ) -> dict[str, tuple[RequestTimes, ...]]:
        """Return, by model, the replay of these requests with their actual outputs."""
        lengths = {
            name: [
                RequestLengths(len(request.prompt_ids), len(results[request.id].output_ids), request.arrival_s)
                for request in own
            ]
            for name, own in self.by_model.items()
        }
        order = self.order.replayed(self.by_model) if self.order else None
        replays = replay_plan(self.plan, profile_of, lengths, order=order)
        return {name: of_model.served for name, of_model in replays.items()}


@dataclass(frozen=True)
class PlannedCalls(ApplicationCalls):
    """An application's calls on a plan."""

    plan: Plan

    def predict(
        self, results: Mapping[str, Result], profile_of: Callable[[PlannedModel], Profile]
    ) -> dict[str, tuple[RequestTimes, ...]]:
        """Return, by model, the replay of these calls with their actual outputs."""
        models = {node: model.name for node, model in self.application.models.items()}
        calls = self.application.lengths(self.in_turn)
        replayed = replay_calls(
            self.plan,
            profile_of,
            calls,
            models,
            lambda chain, prompt: len(results[chain.name].output_ids),
        )
        return replayed.served


class ModelFigures(TypedDict):
    """One model's requests and output tokens per second until its last request, and percentiles of seconds."""

    requests: int
    seconds: float
    throughput_seq_s: float
    throughput_tok_s: float
    ttft: dict[str, float | None]
    tpot: dict[str, float | None]
    latency: dict[str, float | None]


def figures(served: Sequence[RequestTimes]) -> ModelFigures:
    """Return one model's figures."""
    times, seconds = latencies(served, "arrival"), _end_s([served])
    return {
        "requests": len(served),
        "seconds": seconds,
        "throughput_seq_s": len(served) / seconds,
        "throughput_tok_s": sum(s.output_tokens for s in served) / seconds,
        "ttft": percentiles(times["ttft"]),
        "tpot": percentiles(times["tpot"]),
        "latency": percentiles(times["latency"]),
    }
