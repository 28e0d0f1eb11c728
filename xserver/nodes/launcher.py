"""The launcher of a node: it starts and ends engines for a server with the token, and passes on their connections."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic

from xcore import __version__
from xcore.console import output
from xcore.errors import InputError
from xcore.spec import Spec
from xserver.nodes.launch_protocol import (
    ATTACH_S,
    FIRST,
    FROM_SERVER,
    PROOF_S,
    SILENT_S,
    Attach,
    Denied,
    EndEngine,
    EngineConnected,
    Hello,
    Ping,
    Pong,
    StartEngine,
    Stranger,
    Welcome,
    address_text,
    admit,
    encoded,
    prepare,
    receive,
    why_text,
)
from xserver.nodes.launched_engine import LaunchedEngine

MOST_ENGINES = 64
_MOST_UNPROVEN = 32
"""Most connections that have not proved themselves; for another one, the oldest is closed."""
_ATTACH_S = 2 * ATTACH_S
"""Most seconds until a server attaches to a connection of an engine."""
_CHUNK = 2**18
_LOOPBACK = "127.0.0.1", "::1", "localhost"


@dataclass(frozen=True)
class LauncherOptions:
    """The options of a launcher."""

    host: str
    port: int
    token: str
    directories: Mapping[str, Path]
    """The node's directories of models, by name; others have the server's path."""


@dataclass(eq=False)
class _Waiting:
    """A connection of an engine to which no server has attached yet."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    attached: "asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]"


class Launcher:
    """Serves one server at a time; the files of its engines are in `folder`.

    When the connection of the server ends, or nothing has come for `SILENT_S`, its engines end at once.
    """

    def __init__(self, options: LauncherOptions, folder: Path):
        self._options, self._folder = options, folder
        self._numbers = count()
        self._unproven: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not proved themselves, the oldest first."""
        self._session: _ServerSession | None = None
        """The present server."""
        self._waiting: dict[int, _Waiting] = {}
        self._connections: set[asyncio.Task[None]] = set()

    async def run(self, ended: asyncio.Event) -> None:
        """Serve until the event; then end all engines.

        Raises:
            InputError: The address isn't available.
        """
        where = address_text(self._options.host, self._options.port)
        try:
            server = await asyncio.start_server(self._serve, self._options.host, self._options.port, limit=_CHUNK)
        except OSError as error:
            raise InputError(f"{where} can't be opened ({why_text(error)}): pass another --listen HOST:PORT.") from None
        private = "" if self._options.host in _LOOPBACK else ", without encryption: use a private network"
        output.note(f"the launcher listens on {where}{private}", event="ready")
        await ended.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        if self._session:  # its task was cancelled while it ended the engines
            await self._session.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        task = asyncio.current_task()
        assert task, "a task of the server"
        self._connections.add(task)
        peer = str((writer.get_extra_info("peername") or ("?",))[0])
        try:
            first = await self._first(reader, writer)
            if isinstance(first, Attach):
                await self._attach(first, reader, writer)
            elif isinstance(first, Hello):
                await self._control(first, peer, reader, writer)
        except Stranger:
            output.note(f"{peer} does not have this launcher's token, and is refused", event="node_refused")
        except InputError as error:
            output.note(f"the connection of {peer} is closed: {error}", event="node_refused")
        except (OSError, EOFError, asyncio.TimeoutError, TimeoutError, asyncio.CancelledError):
            pass  # it is gone, too slow, or this launcher ends
        finally:
            writer.close()
            self._connections.discard(task)

    async def _first(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Spec:
        """Return the first message of a server that has the token."""
        if len(self._unproven) >= _MOST_UNPROVEN:  # a server proves itself at once: the oldest is none
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.close()
        prepare(writer)

        async def proved() -> Spec:
            await admit(reader, writer, self._options.token)
            return await receive(reader, FIRST)

        self._unproven[writer] = None
        try:
            return await asyncio.wait_for(proved(), PROOF_S)
        finally:
            self._unproven.pop(writer, None)

    async def _control(
        self, hello: Hello, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Start and end engines for a server until its connection ends; then end all of them."""
        reason = ""
        if hello.version != __version__:
            reason = f"it has exegpt {__version__}, but the server {hello.version}: install the same version on both"
        elif self._session:
            reason = f"it works for a server at {self._session.peer} until that one has ended"
        if reason:
            writer.write(encoded(Denied(reason, __version__)))
            await writer.drain()
            return
        session = _ServerSession(peer, self._options.directories, self._folder, writer, self._engine_connected)
        self._session = session
        writer.write(encoded(Welcome()))
        output.note(f"a server at {peer} has connected", event="node_connected")
        try:
            while True:
                session.take(await asyncio.wait_for(receive(reader, FROM_SERVER), SILENT_S))
                await asyncio.wait_for(writer.drain(), SILENT_S)
        finally:
            writer.close()
            await session.close()
            self._session = None
            output.note(f"the server at {peer} has gone: its engines have ended", event="node_lost")

    def _engine_connected(
        self,
        session: "_ServerSession",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        engine: int,
        place: int,
    ) -> "asyncio.Future[None]":
        """Offer an engine's connection to the server, and pass it on when the server attaches to it."""
        number = next(self._numbers)
        self._waiting[number] = _Waiting(reader, writer, asyncio.get_running_loop().create_future())
        session.send(EngineConnected(engine, place, number))
        return asyncio.ensure_future(self._relay(number))

    async def _relay(self, number: int) -> None:
        """Pass on a connection of an engine, when a server has attached to it, until it ends."""
        waiting = self._waiting[number]
        writers = [waiting.writer]
        try:
            reader, writer = await asyncio.wait_for(waiting.attached, _ATTACH_S)
            writers.append(writer)
            await asyncio.gather(_pump(waiting.reader, writer), _pump(reader, waiting.writer))
        except (asyncio.TimeoutError, TimeoutError):
            pass
        finally:  # also after cancellation
            self._waiting.pop(number, None)
            for each in writers:
                each.close()

    async def _attach(self, attach: Attach, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on a connection of an engine until it ends."""
        waiting = self._waiting.pop(attach.connection, None)
        if waiting is None or waiting.attached.done():
            raise InputError(f"there is no connection {attach.connection} of an engine.")
        waiting.attached.set_result((reader, writer))
        await writer.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on bytes until one end has closed; then close the other one, which ends the other direction, too."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()  # what was written still arrives


_Connected = Callable[["_ServerSession", asyncio.StreamReader, asyncio.StreamWriter, int, int], "asyncio.Future[None]"]


class _ServerSession:
    """The engines of one server."""

    def __init__(
        self,
        peer: str,
        directories: Mapping[str, Path],
        folder: Path,
        writer: asyncio.StreamWriter,
        connected: _Connected,
    ):
        self.peer = peer
        """The server's address."""
        self._directories, self._folder, self._writer, self._connected = directories, folder, writer, connected
        self._engines: dict[int, tuple[LaunchedEngine, asyncio.Task[None]]] = {}
        self._last = -1

    def send(self, message: Spec) -> None:
        """Send a message to the server, if it is there."""
        if not self._writer.is_closing():
            self._writer.write(encoded(message))

    def take(self, message: Spec) -> None:
        """Follow a message of the server.

        Raises:
            InputError: It can't be followed.
        """
        if isinstance(message, Ping):
            self.send(Pong(message.number, monotonic()))
        elif isinstance(message, EndEngine):
            if message.engine in self._engines:
                self._engines[message.engine][0].end()
        elif isinstance(message, StartEngine):
            if message.engine <= self._last:
                raise InputError(f"There was an engine {message.engine} already.")
            if len(self._engines) >= MOST_ENGINES:
                raise InputError(f"A launcher runs at most {MOST_ENGINES} engines.")
            self._last = message.engine
            engine = LaunchedEngine(message, self._directories, self._folder, self.send, partial(self._connected, self))
            task = asyncio.ensure_future(engine.run())
            self._engines[message.engine] = engine, task
            task.add_done_callback(partial(self._ended, message.engine))

    def _ended(self, engine: int, task: "asyncio.Task[None]") -> None:
        del self._engines[engine]
        if not task.cancelled() and (error := task.exception()):
            output.note(f"the launcher has failed at an engine: {error}", event="engine_failed")

    async def close(self) -> None:
        """End all engines."""
        for engine, _ in self._engines.values():
            engine.end()
        if tasks := [task for _, task in self._engines.values()]:
            await asyncio.wait(tasks)
