"""Supervisor: the frontend's process, which serves HTTP, manages the engines, and controls how the server ends."""

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Protocol

import uvicorn
from prometheus_client import CollectorRegistry

from xcore.console import output
from xcore.errors import InputError
from xcore.frozen_heap import frozen_heap
from xcore.specs.cluster_plan import Plan
from xcore.specs.schedule import Schedule
from xserver.admission.gate import ApiKeys, check_origins, guarded, hashed
from xserver.admission.loop_lag import LoopLag
from xserver.admission.measured import RequestTiming
from xserver.engines.engine_link import EngineLink
from xserver.engines.residency import Residency, ResidencyOptions
from xserver.engines.server_unit import ServerUnit
from xserver.engines.unit_options import EngineUnitOptions
from xserver.http.api import KINDS, make_api, resume_entries
from xserver.http.client_connection import limited_connections
from xserver.http.frontend import Frontend
from xserver.http.frontends import Frontends
from xserver.http.journal import Journal
from xserver.http.served_model import ServedModel
from xserver.nodes.node_link import NodeAddress, NodeLinks
from xserver.telemetry.library_log import log_libraries
from xserver.telemetry.request_reports import Reports
from xserver.telemetry.tracing import tracing

_LOOK_S = 0.05
_MOST_KEEP_ALIVE_S = 86400.0
_SWITCH_S = 0.0005
"""Seconds for which another thread may compute while the event loop waits: Python's 5 ms would pass at every send."""


class PlanWatch(Protocol):
    """A watch over the models' popularity, which may search for another plan."""

    @property
    def state(self) -> dict[str, object]:
        """The answer of `GET /plan`."""

    def follows(self, plan: Plan) -> None:
        """Record that the models follow another plan."""

    def goes_back(self, plan: Plan, why: str) -> None:
        """Record that the models follow an earlier plan again."""

    async def run(self) -> None:
        """Watch until cancelled."""


Watching = Callable[[Mapping[str, Frontend], Plan, Callable[[Plan], None], CollectorRegistry], PlanWatch]
"""Makes the watch from the models' frontends, the plan, a function that follows another plan, and the metrics."""


@dataclass(frozen=True)
class ServerOptions:
    """The options of `exegpt serve`."""

    units: tuple[EngineUnitOptions, ...]
    """The engines with their models."""
    starts: int
    """Engines that may start at once."""
    plan: Plan | None
    """The plan of its models; None: the server has no plan."""
    replan: Callable[[Plan], tuple[Plan, tuple[EngineUnitOptions, ...]]] | None
    """Returns another plan for the same models, and its engines, as the next plan; None: the server has no plan."""
    watching: Watching | None
    """None: the server has no plan."""
    host: str
    port: int
    api_keys: tuple[str, ...]
    read_api_keys: Callable[[], tuple[str, ...]] | None
    """Reads the keys again, on SIGHUP; None: they come from the environment, which doesn't change."""
    hosts: tuple[str, ...]
    """Names other than loopback's by which the server may be called without keys."""
    origins: tuple[str, ...]
    admin_token: str | None
    """Token for changing schedules and draining over HTTP; None: not possible."""
    read_admin_tokens: Callable[[], tuple[str, ...]] | None
    """Reads it again, on SIGHUP, as the first of its file; None: it comes from the environment."""
    max_output: int | None
    max_waiting: int
    journal: Path | None
    """The folder of requests with an Idempotency-Key; None: keys have no effect."""
    answer_ttl_s: float
    drain_timeout_s: float
    stall_timeout_s: float
    max_connections: int
    """Maximum connections of one client address."""
    keep_alive_s: float
    """The time for which a connection without requests stays open."""
    nodes: tuple[NodeAddress, ...] = ()
    """The launchers of other nodes."""
    node_token: str | None = None
    """The token of the launchers."""
    residency: ResidencyOptions | None = None
    """How many of the engines are loaded at once; None: all."""
    separate_keys: bool = False
    """Whether each API key's requests share cached prefixes only among themselves."""
    log_requests: bool = False
    """Whether to log a line per request."""
    otlp_traces_endpoint: str | None = None
    """The URL of an OpenTelemetry collector that takes traces; None: the environment's, if there is one."""


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would stop listening at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run`."""
        yield


class Supervisor:
    """Starts the engines and serves until everything is answered or an engine fails for good; then ends the engines.

    An engine fails for good if it can't be restarted and there is no earlier plan to go back to.
    """

    def __init__(self, frontends: Frontends, options: ServerOptions, directory: Path):
        self._frontends, self._options, self._directory = frontends, options, directory
        self._nodes = NodeLinks(options.nodes, options.node_token, frontends.registry)
        self._turns = {node: asyncio.Semaphore(options.starts) for node in (None, *self._nodes.by_node)}
        self._replacing = asyncio.Lock()
        self._units = [self._unit(unit) for unit in options.units]
        self._running: dict[ServerUnit, asyncio.Task[int]] = {}
        self._wanted = [unit.follows for unit in options.units]
        """What the units of the current plan follow; other units are ending."""
        self._plan = options.plan
        self._before: Plan | None = None
        """The latest earlier plan with other engines, all of which had opened."""
        self._ended = asyncio.Event()
        self._error: BaseException | None = None
        """The error of a task that should never end."""
        self._signals = 0
        self.code = 0
        frontends.drain = self.interrupt
        frontends.follow_plan = self.follow_as_sent if options.replan else None
        self._replanning: PlanWatch | None = None
        if options.plan and options.watching:
            watched = frontends.by_name, options.plan, self.follow, frontends.registry
            self._replanning = replanning = options.watching(*watched)
            frontends.followed = lambda: replanning.state

    def _unit(self, options: EngineUnitOptions) -> ServerUnit:
        frontends = self._frontends

        async def resume(frontend: Frontend) -> None:
            await resume_entries(frontend, frontends.unfinished(frontend))

        ours = [frontends.each[model.place] for model in options.models]
        where, at = f"http://{self._options.host}:{self._options.port}", options.at.node if options.at else None
        node = None if at is None else self._nodes.by_node[at]
        return ServerUnit(options, ours, self._directory, where, resume, self._turns[at], node, frontends.take_over)

    async def run(self, server: Server) -> None:
        """Supervise until the server ends."""
        for unit in self._units:
            await unit.listen()
        serving = asyncio.ensure_future(server.serve(sockets=[bind(self._options)]))
        self._nodes.run(self._failed)
        residing = self._begin()
        self._preparing = asyncio.ensure_future(self._prepare())
        ended = asyncio.ensure_future(self._ended.wait())
        replanning = asyncio.ensure_future(self._replanning.run()) if self._replanning else None
        try:
            await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._error:
                raise self._error
        finally:
            server.should_exit = True
            if residing:
                residing.cancel()
            if replanning:
                replanning.cancel()
                await asyncio.wait({replanning})  # including its search
            await self._replacing.acquire()  # a running change of the plan starts engines, which must end here too
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*(unit.stop() for unit in self._units))
            await self._nodes.close()
            await serving
            for unit in self._units:
                await unit.close()

    def _begin(self) -> "asyncio.Future[None] | None":
        """Start the engines; return the task that loads and ends them later, if not all may be loaded at once."""
        if self._options.residency is None:
            for unit in self._units:
                self._start(unit)
            return None
        residency = Residency(self._options.residency, self._units, self._start, self._sleep)
        self._frontends.residency = residency
        residency.begin()
        residing = asyncio.ensure_future(residency.run())
        residing.add_done_callback(self._failed)
        return residing

    async def _sleep(self, unit: ServerUnit) -> None:
        """End the engine of an idle unit, which may be started again."""
        self._running.pop(unit).cancel()
        await unit.give_up()
        output.note(f"the engine of {unit.name} is unloaded", event="engine_unloaded")

    def _start(self, unit: ServerUnit) -> None:
        task = asyncio.ensure_future(unit.run())
        self._running[unit] = task
        task.add_done_callback(partial(self._unit_ended, unit))

    def _unit_ended(self, unit: ServerUnit, task: "asyncio.Task[int]") -> None:
        error = None if task.cancelled() else task.exception()
        if unit.options.follows not in self._wanted:  # another unit has its models or will get them
            if error:
                output.note(f"the replaced engine of {unit.name} has failed: {error}", event="engine_failed")
            return
        if isinstance(error, InputError | OSError) and self._go_back(unit, f": {error}"):
            return  # for example, a plan of several ranks without mpirun
        if self._failed(task) or task.cancelled():
            return
        code = task.result()
        if code and not self._go_back(unit):
            unit.fail()
            self.code = self.code or code
            self._drain()

    def _failed(self, task: "asyncio.Task[object]") -> bool:
        """Return whether a task has raised an error, and end the server if so.

        Models without engines would keep their clients waiting.
        """
        error = None if task.cancelled() else task.exception()
        if error:
            self._error = self._error or error
            self._ended.set()
        return bool(error)

    def follow(self, plan: Plan) -> None:
        """Switch to another plan for the same models; InputError for an impossible one."""
        assert self._options.replan, "a server of a plan"
        plan, units = self._options.replan(plan)
        if any(unit.follows not in self._wanted for unit in units) and self._has_opened:
            self._before = self._plan
        self._change(plan, units)
        if self._replanning:
            self._replanning.follows(plan)

    def follow_as_sent(self, plan: Plan) -> None:
        """Switch to a plan that an administrator has sent, including the schedules of engines that stay.

        Models that keep their engines follow the plan's schedules, even if they have changed to other schedules.
        """
        kept = self._units
        self.follow(plan)
        for unit in kept:
            schedule = unit.options.documents.get("--schedule")
            if unit.options.follows not in self._wanted or not isinstance(schedule, Schedule):
                continue
            for frontend in unit.frontends:
                if frontend.link.opened and frontend.link.opened.schedule != schedule:
                    frontend.link.follow(schedule)

    @property
    def _has_opened(self) -> bool:
        """Whether all engines of the plan have opened."""
        opened = [unit.options.follows for unit in self._units if unit.has_opened]
        return all(follows in opened for follows in self._wanted)

    def _go_back(self, unit: ServerUnit, why: str = "") -> bool:
        """Go back to the earlier plan, because a unit of this one can't be started; return whether that is possible.

        `why` is appended to the message if the engine hasn't reported the reason.
        """
        plan, self._before = self._before, None
        if plan is None or self._signals:
            return False
        assert self._options.replan, "a server of a plan"
        try:
            plan, units = self._options.replan(plan)
        except InputError:
            return False
        if unit.options.follows in [options.follows for options in units]:
            return False
        self._change(plan, units)
        if self._replanning:
            self._replanning.goes_back(plan, f"the engine of {unit.name} can't be started{why}")
        return True

    def _change(self, plan: Plan, units: tuple[EngineUnitOptions, ...]) -> None:
        self._plan, self._wanted = plan, [unit.follows for unit in units]
        self._following = asyncio.ensure_future(self._replace(units))
        self._following.add_done_callback(self._failed)

    async def _replace(self, units: tuple[EngineUnitOptions, ...]) -> None:
        """Replace the engines of units that differ from those of the earlier plan; the other units stay.

        New engines continue the requests of the ended ones.
        """
        async with self._replacing:
            wanted = [options.follows for options in units]
            gone = [unit for unit in self._units if unit.options.follows not in wanted]
            self._units = [unit for unit in self._units if unit not in gone]
            staying = [unit.options.follows for unit in self._units]
            for unit in gone:
                self._running.pop(unit).cancel()
            await asyncio.gather(*(unit.give_up() for unit in gone))
            moved = [model for unit in gone for model in unit.frontends]
            renewed = ", ".join(frontend.model.name for frontend in moved) or "no model"
            output.note(f"the plan has changed: new engines start for {renewed}", event="plan")
            for options in units:
                if options.follows not in staying:
                    unit = self._unit(options)
                    names = [frontend.model.name for frontend in unit.frontends]
                    for frontend in unit.frontends:
                        frontend.shares = tuple(name for name in names if name != frontend.model.name)
                    self._units.append(unit)
                    self._start(unit)

    async def _prepare(self) -> None:
        for frontend in self._frontends.each:
            await asyncio.to_thread(frontend.model.prepare_grammars)

    def interrupt(self) -> None:
        """Handle a signal: the first one drains, the second one ends the server at once."""
        self._signals += 1
        if self._signals > 1:
            self._ended.set()
            return
        output.note(
            "draining: accepted requests run to completion; a second signal ends the server at once", event="drain"
        )
        self._drain()

    def _drain(self) -> None:
        self._frontends.refuse_more()
        self._draining = asyncio.ensure_future(self._end_when_answered())

    async def _end_when_answered(self) -> None:
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._answered(), self._options.drain_timeout_s)
        self._ended.set()

    async def _answered(self) -> None:
        while self._frontends.active:
            await asyncio.sleep(_LOOK_S)


def bind(options: ServerOptions) -> socket.socket:
    """Return the listening socket; InputError if the address isn't available."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listening = socket.create_server((options.host, options.port), family=family, backlog=2048)
        # asyncio sets it only for sockets with a named protocol. Without it a token waits up to 40 ms for the client's
        # acknowledgement of the previous token.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only: without it, unread data keeps a closed connection
            stall_ms = min(max(1, round(1000 * options.stall_timeout_s)), 2**31 - 1)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError(f"Port {options.host}:{options.port} can't be opened ({why}): pass another --port.") from None
    listening.setblocking(False)
    return listening


def run(options: ServerOptions) -> int:
    """Serve until a signal ends the server; return the exit code."""
    loopback = options.host in ("127.0.0.1", "localhost", "::1")
    if not loopback and not options.api_keys:
        raise InputError(f"--host {options.host} lets other machines connect: pass --api-key-file, or use 127.0.0.1.")
    check_origins(options.origins, bool(options.api_keys))
    if options.separate_keys and not options.api_keys:
        raise InputError("--separate-keys separates the requests of API keys, and there are none: see --api-key-file.")
    return asyncio.run(_run(options))


async def _run(options: ServerOptions) -> int:
    spans = tracing(options.otlp_traces_endpoint)
    try:
        frontends = _frontends(options, Reports(options.log_requests, spans))
        # mode 0700: only this user can access its sockets
        with tempfile.TemporaryDirectory(prefix="exegpt-serve-", ignore_cleanup_errors=True) as directory:
            return await _serve(Supervisor(frontends, options, Path(directory)), frontends, options)
    finally:
        if spans:
            spans.close()  # after the last request


def _frontends(options: ServerOptions, reports: Reports) -> Frontends:
    """Return the frontends of all models, in order."""
    journal = Journal(options.journal, options.answer_ttl_s) if options.journal else None
    models = sorted((model for unit in options.units for model in unit.models), key=lambda model: model.place)
    read = [ServedModel.read(model.directory, model.name, model.formats) for model in models]
    shares = {
        model.place: tuple(read[other.place].name for other in unit.models if other is not model)
        for unit in options.units
        for model in unit.models
    }
    lag = LoopLag()
    each = [
        Frontend(
            model,
            EngineLink(),
            "",
            options.max_output,
            options.stall_timeout_s,
            options.max_waiting,
            journal=journal,
            reports=reports,
            lag=lag,
            shares=shares[place],
        )
        for place, model in enumerate(read)
    ]
    admin = hashed(options.admin_token) if options.admin_token else None
    frontends = Frontends(each, admin, reports, options.separate_keys)
    if journal:
        journal.begin(frontends.unserved(journal.unfinished))
    return frontends


async def _serve(supervisor: Supervisor, frontends: Frontends, options: ServerOptions) -> int:
    sys.setswitchinterval(_SWITCH_S)
    watching = asyncio.ensure_future(frontends.each[0].lag.watch())  # the lag of all of them
    measured = RequestTiming(make_api(frontends), frontends.unrouted, KINDS)
    keys = ApiKeys(options.api_keys)
    config = uvicorn.Config(
        guarded(measured, keys, options.hosts, options.origins),
        http=limited_connections(options.max_connections),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=ceil(min(options.keep_alive_s, _MOST_KEEP_ALIVE_S)),
        server_header=False,
    )
    log_libraries()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.interrupt)

    def replace_admin_token(tokens: Sequence[str]) -> None:
        frontends.admin = hashed(tokens[0])

    files = [
        ("--api-key-file", options.read_api_keys, keys.replace),
        ("--admin-token-file", options.read_admin_tokens, replace_admin_token),
    ]
    secrets = [(name, read, replace) for name, read, replace in files if read]
    if secrets:
        loop.add_signal_handler(signal.SIGHUP, read_again, secrets)
    with frozen_heap():
        await supervisor.run(Server(config))
    watching.cancel()
    return supervisor.code


def read_again(files: Iterable[tuple[str, Callable[[], tuple[str, ...]], Callable[[tuple[str, ...]], None]]]) -> None:
    """Replace the keys of files, given as (option, read, replace); keep those of a file that can't be read."""
    for name, read, replace in files:
        try:
            keys = read()
        except InputError as error:
            output.note(f"{name} can't be read again, so its previous keys stay valid: {error}", event="keys")
        else:
            replace(keys)
            output.note(f"{name} was read again: keys: {len(keys):,}", event="keys")
