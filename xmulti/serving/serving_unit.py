"""The engines of models that share devices, under one server.

Rank 0 of the job connects to the frontend for each model.
"""

import select
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from xcore import document
from xcore.console import output
from xcore.errors import InputError
from xcore.files import model_directory
from xcore.frozen_heap import frozen_heap
from xcore.orders.promised import Promised
from xcore.requests.engine_protocol import Opened
from xcore.requests.request import Request
from xcore.specs.cluster_plan import Plan, PlannedModel
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xmulti.rank.multiprocessors import Unavailable, streams_on_shares
from xmulti.rank.rank_unit import RankUnit
from xmulti.serving.ranked_order import RankedOrder, ranked_order
from xmulti.serving.unit_bounds import check_bounds, keeps_bounds
from xmulti.sharing.unit_loads import order_of
from xprofiler.present_speed import speed_now
from xprofiler.profiles import measured_profile, profile_text
from xrunner.comm.ranks import Ranks
from xrunner.comm.relay import way_to_frontend
from xrunner.core import inbox
from xrunner.core.driver import Options
from xrunner.core.engine import Engine
from xrunner.core.inbox import Inbox, Session
from xrunner.models import attention_planning
from xrunner.models.device import find_device
from xrunner.threads import set_threads

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class UnitProcessOptions:
    """The options of the process of one unit of a plan."""

    plan: Path
    unit: int
    """Its place in `Plan.units`."""
    socket: Path
    """The folder in which the frontend listens at `engine-I` for the plan's I-th model."""
    device: str | None
    attention: str | None
    threads: int | None
    report_speed: bool = False
    """Whether the frontend gets the machine's `Speed` in the end, for each model."""
    order: str | None = None
    """The order of requests, one of `plan_order.RUN`; None: that of the plan's method."""
    rankers: Mapping[str, Path] = field(default_factory=dict)
    """The files of the models' rankers, for the learned order."""
    promises: bool = False
    """Whether a server's admission control keeps the models' latency bounds, where that is possible."""


def serve(options: UnitProcessOptions, ranks: Ranks) -> None:
    """Load a unit's models and serve until the frontend has drained all of them, or is gone; all ranks call it."""
    plan, unit = ranks.attempt(lambda: read_unit(options))
    set_threads(ranks.threads(options.threads))
    device = find_device(options.device, ranks.local)
    directories = ranks.attempt(lambda: {model.name: directory_of(model) for model in unit})
    order = ranks.attempt(lambda: ranked_order(options.order, options.rankers, directories))
    attention = attention_for(unit, options.attention, device)
    profiles = measured_profiles(unit, directories, ranks, device, attention)
    promised = options.promises and keeps_bounds(unit)
    if promised:
        check_bounds(unit, profiles)
    engines = RankUnit.load(unit, directories, ranks, device, attention, _streams(unit, ranks, device))
    arrivals = count() if promised else None
    how = {model.name: options_of(model, profiles[model.name], order=order, arrivals=arrivals) for model in unit}
    engines.open(options=how)
    with ExitStack() as stack, frozen_heap():
        inboxes = _connect(options.socket, plan, unit, stack) if engines.leads else {}
        try:
            if engines.leads:
                serve_unit(engines, inboxes, _opened(engines, profiles))
            else:
                engines.serve()
            if options.report_speed:
                _report_speed(engines, profiles, inboxes, ranks)
        except inbox.Gone:
            raise InputError("The server's frontend has gone: its engines end.") from None
    engines.close()


def read_unit(options: UnitProcessOptions) -> tuple[Plan, tuple[PlannedModel, ...]]:
    """Return the plan and the selected unit of it.

    Raises:
        InputError: The plan has no such unit.
    """
    plan = document.read(Plan, options.plan)
    if not 0 <= options.unit < len(plan.units):
        raise InputError(f"Plan '{options.plan}' has {len(plan.units)} units, but no unit {options.unit}.")
    return plan, plan.units[options.unit]


def directory_of(model: PlannedModel) -> Path:
    """Return the directory of a planned model's weights.

    Raises:
        InputError: The plan names no directory, or that of another model.
    """
    if model.directory is None:
        raise InputError(f"Model '{model.name}' was planned without weights: pass --model {model.name}=DIR.")
    directory = model_directory(model.directory)
    model.schedule.check_model(ModelSpec.from_directory(directory))
    return directory


def attention_for(unit: tuple[PlannedModel, ...], asked: str | None, device: "torch.device") -> str:
    """Return the library whose attention kernels all models of a unit use.

    This is the library chosen for every model; if the choices differ, it is Triton.
    """
    chosen = {
        attention_planning.choose_attention(asked, model.schedule.model.spec, model.schedule.dtype, device)[0]
        for model in unit
    }
    return chosen.pop() if len(chosen) == 1 else "triton"


def measured_profiles(
    unit: tuple[PlannedModel, ...],
    directories: dict[str, Path],
    ranks: Ranks,
    device: "torch.device",
    attention: str,
) -> dict[str, Profile]:
    """Return this machine's measured profile of each model: stored, or measured now."""
    profiles = {}
    for model in unit:
        schedule, directory = model.schedule, directories[model.name]
        job = measured_profile(directory, schedule.dtype, ranks, device, attention, kv_dtype=schedule.kv_dtype)
        profiles[model.name] = job.profile
    return profiles


def _streams(unit: tuple[PlannedModel, ...], ranks: Ranks, device: "torch.device") -> "list[torch.cuda.Stream]":
    """Return the streams on which models that share by space decode at the same time; none if they must take turns."""
    shares = [model.share.decode for model in unit if model.share and model.share.by == "space"]
    if not shares:
        return []
    try:
        if ranks.size > 1:
            raise Unavailable(f"each has {ranks.size} devices, but shares need a single device")
        return streams_on_shares(device, shares)
    except Unavailable as why:
        if not ranks.rank:
            output.note(f"models that share by space take turns in this run: {why}")
        return []


def options_of(
    model: PlannedModel,
    profile: Profile,
    spans: bool = True,
    order: RankedOrder | None = None,
    arrivals: Iterator[int] | None = None,
) -> Options:
    """Return the options of a model that shares devices: the order in which it is simulated.

    `order` None: that of the plan's method. With `arrivals`, which numbers all models' requests, the order keeps a
    server's promises.
    """
    if order:
        by_score = order.order.of(model)
        kept = Promised(by_score, arrivals) if arrivals is not None and order.rankers else by_score
        return Options(spans=spans, order=kept, hints=order.hints_of(model.name))
    by_method, known = order_of(model, profile)
    return Options(spans=spans, order=by_method, hints=(lambda _: known) if known else None)


def _connect(directory: Path, plan: Plan, unit: tuple[PlannedModel, ...], stack: ExitStack) -> dict[str, inbox.Inbox]:
    """Return connections to the frontend, open until `stack` ends."""
    inboxes = {}
    for number, model in enumerate(plan.models):
        if model in unit:
            connect = stack.enter_context(way_to_frontend(Ranks(), str(directory / f"engine-{number}")))
            inboxes[model.name] = inbox.Inbox(connect())
    return inboxes


def _opened(engines: RankUnit, profiles: Mapping[str, Profile]) -> dict[str, Opened]:
    opened = {}
    for tenant in engines.tenants:
        tenant.engine.prepare_grammars()
        profile = profiles[tenant.name]
        opened[tenant.name] = Opened(tenant.engine.schedule, profile, None, (profile_text(profile),), engines.zero_s)
    return opened


def _report_speed(
    engines: RankUnit, profiles: Mapping[str, Profile], inboxes: Mapping[str, inbox.Inbox], ranks: Ranks
) -> None:
    for tenant in engines.tenants:
        speed = speed_now(profiles[tenant.name], tenant.engine, ranks)
        if speed and engines.leads:
            inboxes[tenant.name].send(speed)
            inboxes[tenant.name].finish()


class _Session(Session):
    """One model's requests. Each gets the current time as its arrival: turns go by arrival over all models."""

    def _add(self, request: Request) -> None:
        super()._add(replace(request, arrival_s=self.engine.worker.now()))


def serve_unit(unit: RankUnit, inboxes: Mapping[str, Inbox], opened: Mapping[str, Opened]) -> None:
    """Run the frontend's requests on an open unit until it has drained every model; arguments are by the models' names.

    Raises Gone if the frontend closes a connection early.
    """
    engines: dict[str, Engine] = {tenant.name: tenant.engine for tenant in unit.tenants}
    sessions = [_Session(engine, inboxes[name], opened[name]) for name, engine in engines.items()]
    ran = True  # orders that came with BEGIN are processed at once
    while not all(session.over for session in sessions):
        if not ran:
            _rest(unit, sessions)
        for session in sessions:
            session.take()
        ran = unit.step()
        for session in sessions:
            session.send(session.engine.take())
    for session in sessions:
        session.inbox.finish()
    unit.drain()


def _rest(unit: RankUnit, sessions: list[_Session]) -> None:
    """Wait for orders while nothing can run; only briefly if there are requests."""
    patience_s = min(session.patience_s for session in sessions if not session.over) if unit.idle else 0.0
    if patience_s:
        inboxes = [session.inbox for session in sessions]
        select.select(inboxes, [inbox for inbox in inboxes if inbox.unsent], [], patience_s)
    elif not unit.idle:
        unit.wait()
