"""Supervisor: the frontend's process, with HTTP on one side and the engine on the other, and how both end."""

import asyncio
import contextlib
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from exegpt import document
from exegpt.duration import format_duration
from exegpt.engine_protocol import Opened, Stepped
from exegpt.errors import InputError
from exegpt.report import output
from exegpt.report.schedule_text import schedule_text
from exegpt.server.api import KINDS, make_api, resume_entries
from exegpt.server.engine_link import EngineLink
from exegpt.server.engine_process import EngineProcess
from exegpt.server.frontend import Frontend
from exegpt.server.gate import Gate, hashed
from exegpt.server.joined_engine import JoinedEngine
from exegpt.server.journal import Journal
from exegpt.server.library_log import log_libraries
from exegpt.server.measured import Measured
from exegpt.server.served_model import ServedModel
from exegpt.server.tracing import tracing

_MOST_RESTARTS = 5
"""Ends of the engine in a row, without an answer between them, after which the server gives up."""
_LOOK_S = 0.05


@dataclass(frozen=True)
class ServerOptions:
    """What `exegpt serve` is asked for, beside what its engine is."""

    model: Path
    name: str | None
    """By which clients call the model; None: its directory's."""
    host: str
    port: int
    ranks: int
    engine_socket: Path | None
    """Where ranks connect that a launcher has started; None: the server starts its engine."""
    api_keys: tuple[str, ...]
    hosts: tuple[str, ...]
    """Names beside loopback's by which the server may be called without keys."""
    origins: tuple[str, ...]
    admin_token: str | None
    """With which schedules can be changed and the server drained over HTTP; None: they can't."""
    max_output: int | None
    max_waiting: int
    journal: Path | None
    """The folder of requests with an Idempotency-Key; None: keys have no effect."""
    answer_ttl_s: float
    drain_timeout_s: float
    stall_timeout_s: float
    chat_template: Path | None = None
    """A file to use in place of the model's own."""
    log_requests: bool = False
    """A line of the log per request."""
    otlp_traces_endpoint: str | None = None
    """The URL of an OpenTelemetry collector that takes traces; None: the environment's, if there is one."""


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would stop listening at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run`."""
        yield


class Supervisor:
    """Starts the engine and starts it again when it fails; ends with it when all is answered."""

    def __init__(self, frontend: Frontend, options: ServerOptions, engine_arguments: list[str], directory: Path):
        self._frontend, self._options, self._directory = frontend, options, directory
        self._socket = options.engine_socket or directory / "engine"
        self._arguments = [*engine_arguments, "--socket", str(self._socket)]
        self._schedule = directory / "schedule.json"
        self._engine: EngineProcess | JoinedEngine = EngineProcess(self._arguments, options.ranks)
        if options.engine_socket:
            self._engine = JoinedEngine(frontend.link)
        self._ended = asyncio.Event()
        self._signals = 0
        self._failures = 0
        self.code = 0
        frontend.link.on_opened = self._opened
        frontend.link.on_changed = self._changed
        frontend.link.on_stepped = self._stepped
        frontend.link.on_lost = frontend.lost
        frontend.drain = self.interrupt

    async def run(self, server: Server) -> None:
        """Supervise until the server ends."""
        await self._frontend.link.listen(self._socket)
        serving = asyncio.ensure_future(server.serve(sockets=[bind(self._options)]))
        supervising = asyncio.ensure_future(self._supervise())
        self._preparing = asyncio.ensure_future(asyncio.to_thread(self._frontend.model.prepare_grammars))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({serving, supervising, ended}, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done():
                supervising.result()
        finally:
            server.should_exit = True
            supervising.cancel()
            self._engine.told = self._frontend.link.drain()
            await self._engine.stop()
            await serving
            await self._frontend.link.close()

    def interrupt(self) -> None:
        """A signal to end: the first drains, the second ends at once."""
        self._signals += 1
        if self._signals > 1:
            self._ended.set()
            return
        output.note(
            "draining: requests that have been accepted are finished; a second signal ends at once", event="drain"
        )
        self._frontend.draining = True
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._answered(), self._options.drain_timeout_s)
        self._ended.set()

    async def _answered(self) -> None:
        while self._frontend.active:
            await asyncio.sleep(_LOOK_S)

    def _opened(self, opened: Opened) -> None:
        self._keep(opened)
        self._resuming = asyncio.ensure_future(resume_entries(self._frontend))
        bound = opened.schedule.latency_bound_s
        under = f" under {format_duration(bound)}" if bound else ""
        where = f"http://{self._options.host}:{self._options.port}"
        served = f"serving {self._frontend.model.name} on {where}{under}: {schedule_text(opened.schedule)}"
        output.note(served, event="ready")

    def _changed(self, opened: Opened) -> None:
        self._keep(opened)
        output.note(f"the schedule has changed: {schedule_text(opened.schedule)}", event="schedule_changed")

    def _keep(self, opened: Opened) -> None:
        """Take requests for this schedule, which another engine would follow too."""
        document.write(self._schedule, opened.schedule)
        if "--schedule" not in self._arguments:
            self._arguments += ["--schedule", ""]
        self._arguments[self._arguments.index("--schedule") + 1] = str(self._schedule)
        self._frontend.opened(opened)

    def _stepped(self, stepped: Stepped) -> None:
        self._frontend.monitor.stepped(stepped)
        if stepped.ended:
            self._failures = 0
        if self._frontend.admission:
            self._updating = asyncio.ensure_future(self._frontend.admission.update())

    async def _watch(self) -> None:
        """Kill an engine that has stalled: `_supervise` starts another."""
        link = self._frontend.link
        while link.silent_s < self._frontend.stall_limit_s:
            await asyncio.sleep(_LOOK_S)
        output.note(f"the engine has done nothing for {link.silent_s:.1f} s: it is killed", event="engine_stalled")
        self._frontend.lost()
        self._engine.kill()

    async def _supervise(self) -> None:
        """Run engines, one after the other; returns when the first can't be started."""
        while True:
            await self._engine.start()
            watching = asyncio.ensure_future(self._watch())
            code = await self._engine.wait()
            watching.cancel()
            self._engine.kill()
            self._frontend.link.ended()
            self._frontend.lost()
            if self._frontend.draining and not self._frontend.active:
                return
            self._failures += 1
            known = self._engine.restarts and "--schedule" in self._arguments
            if not known or self._failures >= _MOST_RESTARTS:
                self.code = code or 1  # it has said why
                self._frontend.link.fail()
                await self._answered()
                return
            self._frontend.monitor.restarting()
            output.note(
                f"the engine has ended (exit code {code}): it is started again", event="engine_restart", code=code
            )


def bind(options: ServerOptions) -> socket.socket:
    """The listening socket; InputError where the address can't be had."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listening = socket.create_server((options.host, options.port), family=family, backlog=2048)
        # asyncio sets it for sockets of a named protocol alone; without it a token waits up to 40 ms for the client's
        # acknowledgement of the one before
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; else what a client doesn't read keeps its closed connection
            stall_ms = min(max(1, round(1000 * options.stall_timeout_s)), 2**31 - 1)
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError(f"{options.host}:{options.port} can't be listened on ({why}): pass another --port.") from None
    listening.setblocking(False)
    return listening


def run(options: ServerOptions, engine_arguments: list[str]) -> int:
    """Serve until a signal ends it; the exit code."""
    loopback = options.host in ("127.0.0.1", "localhost", "::1")
    if not loopback and not options.api_keys:
        raise InputError(f"--host {options.host} lets other machines in: pass --api-key-file, or listen on 127.0.0.1.")
    return asyncio.run(_run(options, engine_arguments))


async def _run(options: ServerOptions, engine_arguments: list[str]) -> int:
    model = ServedModel.read(options.model, options.name, options.chat_template)
    frontend = Frontend(
        model,
        EngineLink(),
        "",
        options.max_output,
        options.stall_timeout_s,
        options.max_waiting,
        log_requests=options.log_requests,
    )
    frontend.admin = hashed(options.admin_token) if options.admin_token else None
    if options.journal:
        frontend.journal = Journal(options.journal, options.answer_ttl_s)
        frontend.journal.begin()
    frontend.monitor.tracing = spans = tracing(model.name, options.otlp_traces_endpoint)
    directory = Path(tempfile.mkdtemp(prefix="exegpt-serve-"))  # 0700: the socket is this user's alone
    supervisor = Supervisor(frontend, options, engine_arguments, directory)
    measured = Measured(make_api(frontend), frontend.monitor, KINDS)
    application = Gate(measured, options.api_keys, options.hosts, options.origins)
    config = uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=2**16,
        server_header=False,
    )
    log_libraries()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.interrupt)
    try:
        await supervisor.run(Server(config))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if spans:
            spans.close()  # nothing is served any more
    return supervisor.code
