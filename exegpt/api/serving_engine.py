"""The engine of a server, on each of its ranks: it searches a schedule if none is given, and serves the frontend."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.options.served import EngineOptions, ServedOptions
from xcore.batching import Hints, Order
from xcore.choices import admission_rule, with_adjustment
from xcore.columns import parse_columns
from xcore.console import output
from xcore.console.schedule_text import schedule_text
from xcore.duration import duration_text
from xcore.errors import Infeasible, InputError
from xcore.files import model_directory, read_schedule
from xcore.frozen_heap import frozen_heap
from xcore.orders.promised import Promised
from xcore.policies import TRAITS
from xcore.requests.engine_protocol import Opened, Speed
from xcore.requests.request import Request
from xcore.requests.starting import say_starting
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xcore.tokenizer import load_tokenizer
from xcore.traces.fit_context import fit_context
from xcore.traces.trace import parse_workload
from xprofiler.present_speed import speed_now
from xprofiler.profiles import measured_profile, profile_text
from xrunner.comm.ranks import Agreed, Ranks
from xrunner.comm.relay import Connect, way_to_frontend
from xrunner.core import inbox
from xrunner.core.driver import Options
from xrunner.core.engine import Engine
from xrunner.models import attention_planning
from xrunner.models.cache import checked_kv_dtype
from xrunner.models.device import find_device
from xrunner.models.weights import products_text
from xrunner.rank.warm_up import Extent
from xrunner.threads import set_threads
from xscheduler.highest_goodput import highest_goodput, nearest_goodput
from xscheduler.ordering import served_hints
from xscheduler.reschedule import rescheduler
from xscheduler.setting_search import infeasible_text, search_schedule
from xscheduler.settings import Setting, find_model, run_dtype, run_kv_dtype

if TYPE_CHECKING:
    import torch

    from xprofiler.job import ProfilingJob


@dataclass(frozen=True)
class EnginePlan:
    """The schedule that rank 0 finds; without one, the reason why none is feasible."""

    opened: Opened | None
    attention: str
    reason: str = ""
    lowest_latency_s: float | None = None


def serve(options: EngineOptions, ranks: Ranks) -> None:
    """Plan, load and serve until the frontend drains or disconnects; all ranks call it."""
    path = ranks.share(lambda: str(options.socket))
    asked = options.asked
    ranks.agree(lambda: {"model": options.model, "schedule": str(asked.schedule), "admission": asked.rule})
    set_threads(ranks.threads(asked.threads))
    device = find_device(asked.device, ranks.local)
    plan = _plan(options, ranks, device)
    if plan.opened is None:
        raise Infeasible(plan.reason, plan.lowest_latency_s)
    say_starting(options.socket, "loading the model")
    engine = Engine.load(options.model, plan.opened.schedule, ranks, device=device, attention=plan.attention)
    again = None if asked.pinned else rescheduler(_setting_of(plan.opened), arrivals=True)
    with way_to_frontend(ranks, path) as connect:
        link = Link(connect)
        moved: Schedule | None = plan.opened.schedule
        refused: Schedule | None = None
        while moved:
            link.leave_unless(engine.leads)
            bounded = engine.schedule.latency_bound_s is not None
            how = Options(
                spans=True,
                promises=True,
                order=_order(options, engine, plan.opened),
                pins=bounded and asked.order_choice.warm == "lru",
                hints=_hints(options, engine, plan.opened),
                preemption=asked.order_choice.preemption(engine.schedule),
            )
            engine.open(Extent.unlimited(engine.schedule), how, again)
            engine.prepare_grammars()
            zero_s = ranks.share(partial(_zero_s, engine))  # rank 0 is on the frontend's machine
            moved = link.serve(engine, replace(plan.opened, schedule=engine.schedule, zero_s=zero_s, refused=refused))
            moved = next((schedule for schedule in ranks.all(moved, Schedule) if schedule), None)
            if moved:
                engine, refused = _onward(engine, options.model, moved)
        if options.report_speed and (speed := speed_now(plan.opened.profile, engine, ranks)):
            link.report(speed)
        link.close()


def _order(options: EngineOptions, engine: Engine, opened: Opened) -> Order:
    """Return the order of waiting requests; under a bound, it keeps what the server has promised."""
    choice = options.asked.order_choice
    order = choice.make(engine.schedule, opened.profile)
    return order if choice.plain or engine.schedule.latency_bound_s is None else Promised(order)


def _hints(options: EngineOptions, engine: Engine, opened: Opened) -> Callable[[Request], Hints] | None:
    """Return the function that gives each request the order's hints; None if the order needs none."""
    choice = options.asked.order_choice
    if choice.plain:
        return None
    tokenizer = load_tokenizer(Path(options.model)) if choice.name == "learned" else None
    return served_hints(choice, engine.schedule, opened.profile, tokenizer, engine.worker.now)


class Link:
    """This rank's connection to the frontend, while the rank leads; InputError if the frontend has ended."""

    def __init__(self, connect: Connect):
        self._connect = connect
        self._inbox: inbox.Inbox | None = None

    def serve(self, engine: Engine, opened: Opened) -> Schedule | None:
        """Serve until there is no work left, or until another schedule needs another engine.

        The leader returns that schedule; otherwise the result is None.
        """
        gc.collect()  # an engine before this one: what is frozen isn't freed
        with frozen_heap():
            if not engine.leads:
                engine.serve()
                return None
            self._inbox = self._inbox or inbox.Inbox(self._connect())
            with _frontend_there():
                return inbox.serve(engine, self._inbox, opened)

    def report(self, speed: Speed) -> None:
        """Send the machine's speed, if this rank leads."""
        if self._inbox:
            with _frontend_there():
                self._inbox.send(speed)
                self._inbox.finish()

    def leave_unless(self, leads: bool) -> None:
        """Close the connection if another rank leads now; that rank connects afterwards."""
        if self._inbox and not leads:
            with _frontend_there():
                self._inbox.leave()
            self._inbox = None

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._inbox:
            self._inbox.close()


@contextmanager
def _frontend_there() -> Iterator[None]:
    try:
        yield
    except inbox.Gone:
        raise InputError("The server's frontend has closed the connection: the engine stops.") from None


def _zero_s(engine: Engine) -> float:
    """Return the start of the run on this machine's monotonic clock."""
    return time.monotonic() - engine.worker.now()


def _onward(engine: Engine, model: str, schedule: Schedule) -> tuple[Engine, Schedule | None]:
    """Return the engine of the next schedule, and None.

    If the ranks can't follow it, return an engine of the earlier schedule, and the refused schedule.
    """
    try:
        return engine.onward(model, schedule), None
    except Agreed as error:
        output.note(f"the server keeps its schedule: {error}")
        return engine.onward(model, engine.schedule), schedule


def _plan(options: EngineOptions, ranks: Ranks, device: "torch.device") -> EnginePlan:
    """Return the schedule to follow, with its profile: all ranks measure, the first one searches."""
    asked, spec = options.asked, find_model(options.model)

    def first() -> tuple[Schedule | None, str]:
        directory = model_directory(options.model)
        given = read_schedule(asked.schedule) if asked.schedule else None
        if given:
            given.check_model(ModelSpec.from_directory(directory))
        dtype = run_dtype(asked.dtype, given, spec, device.type)
        checked_kv_dtype(run_kv_dtype(asked.kv_dtype, given, dtype), spec, dtype, device)
        attention, _ = attention_planning.choose_attention(asked.attention, spec, dtype, device)
        return given, attention

    given, attention = ranks.share(first, Schedule)
    dtype = run_dtype(asked.dtype, given, spec, device.type)
    say = partial(say_starting, options.socket)
    kept = run_kv_dtype(asked.kv_dtype, given, dtype)
    measured = measured_profile(Path(options.model), dtype, ranks, device, attention, say, kv_dtype=kept)
    say("searching a schedule")
    return ranks.share(lambda: _found(options, given, measured, attention), EnginePlan)


def _found(options: EngineOptions, given: Schedule | None, measured: "ProfilingJob", attention: str) -> EnginePlan:
    setting = engine_setting(options, measured, given)
    if given:
        given = replace(given, prefix_caching=given.prefix_caching and not options.asked.no_prefix_caching)
        given = with_adjustment(given, options.asked.adjust, options.asked.no_adjust)
        return EnginePlan(Opened(given, setting.profile, None, setting.assumptions, 0.0), attention)
    try:
        schedule, goodput = _searched(setting, options.asked)
    except Infeasible as error:
        return EnginePlan(None, attention, str(error), error.lowest_latency_s)
    caches = TRAITS[schedule.policy].caches_prefixes and not schedule.model.spec.encoder_layers
    schedule = replace(
        schedule,
        admission=admission_rule(options.asked.rule, schedule.policy),
        prefix_caching=caches and not options.asked.no_prefix_caching,
    )
    share = options.asked.adjust if schedule.traits.adjustable else None  # another policy may be the best
    schedule = with_adjustment(schedule, share, options.asked.no_adjust)
    output.note(f"schedule: {schedule_text(schedule)}")
    return EnginePlan(Opened(schedule, setting.profile, goodput, setting.assumptions, 0.0), attention)


def engine_setting(options: EngineOptions, measured: "ProfilingJob", given: Schedule | None) -> Setting:
    """Return the engine's setting, for the lengths of --workload, of its `given` schedule, or of task S."""
    assumptions: list[str] = []
    scaling: list[str] = []
    spec, asked = find_model(options.model), options.asked
    if given and asked.workload is None:
        workload = given.workload
    else:
        if asked.workload is None:
            assumptions.append("workload: task S (summarization), the default")
        named = parse_columns(asked.columns) if asked.columns else None
        workload = parse_workload(asked.workload or "S", named, None, assumptions.append)
        workload, scaling = fit_context(workload, spec, asked.scale_to_context)
    profile = measured.profile
    assumptions += [*scaling, profile_text(profile), *products_text(profile.dtype, measured.cluster.is_cpu)]
    for assumption in assumptions:
        output.note(assumption)
    return Setting(spec, measured.cluster, workload, profile, profile.kv_dtype, tuple(assumptions))


def _setting_of(opened: Opened) -> Setting:
    """Return the setting that the served schedule was searched for."""
    schedule = opened.schedule
    return Setting(
        schedule.model.spec, schedule.cluster, schedule.workload, opened.profile, schedule.kv_dtype, opened.assumptions
    )


def _searched(setting: Setting, asked: ServedOptions) -> tuple[Schedule, float | None]:
    """Return the schedule with the highest goodput within the bound less a margin, and that goodput in requests/s.

    Without a bound, return the schedule with the highest throughput, and None. Raises Infeasible if there is none.
    """
    policies, bound_s = asked.policies, asked.latency_bound_s
    grows, caches = asked.rule == "grow", not asked.no_prefix_caching
    if bound_s is None or bound_s == float("inf"):
        answer = search_schedule(setting, None, policies=policies)
        if answer.schedule is None:
            raise Infeasible(infeasible_text(answer, None), answer.lowest_latency_s)
        return answer.schedule, None
    try:
        best = highest_goodput(setting, bound_s, policies, grows=grows, caches=caches)
    except Infeasible as error:
        if not asked.best_effort:
            raise
        best, kept_s = nearest_goodput(setting, bound_s, policies, grows, caches)
        output.note(
            f"{error} Only requests that can meet it are accepted, under a schedule for {duration_text(kept_s)}"
        )
        return replace(best.schedule, latency_bound_s=bound_s), None
    output.note(f"goodput: {best.goodput_seq_s:.3g} requests/s within the bound (predicted)")
    return replace(best.schedule, latency_bound_s=bound_s), best.goodput_seq_s
