"""A server's connection to the launcher of a node, which is made again whenever it is lost."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Gauge

from xcore import __version__
from xcore.console import output
from xcore.errors import InputError
from xcore.spec import Spec
from xserver.nodes.launch_protocol import (
    ATTACH_S,
    FROM_LAUNCHER,
    PING_S,
    PROOF_S,
    SILENT_S,
    Attach,
    Denied,
    EngineConnected,
    EngineEnded,
    EngineStarting,
    Hello,
    Ping,
    Pong,
    Stranger,
    Welcome,
    address_text,
    encoded,
    introduce,
    prepare,
    receive,
    why_text,
)

_AGAIN_S = 1.0
"""Seconds between two attempts to connect."""
_CLOCKS = 8
"""Latest comparisons of the clocks that count, and those before the first engine."""
_CHUNK = 2**18

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class NodeAddress:
    """The address of a node's launcher."""

    node: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"node {self.node} ({address_text(self.host, self.port)})"


class EngineEvents(Protocol):
    """The receiver of a launcher's messages about one engine."""

    def connected(self, place: int, connection: int) -> None:
        """Attach to a connection of the engine, of the model with this place."""

    def starts(self, place: int, text: str) -> None:
        """Record what the engine does before it opens."""

    def ended(self, code: int, reason: str) -> None:
        """Record that the engine has ended, or could not be started."""

    def gone(self) -> None:
        """Record that the launcher was lost, and the engine with it."""


class NodeLink:
    """The connection to a node's launcher."""

    def __init__(self, address: NodeAddress, token: str):
        self.address, self._token = address, token
        self.up = False
        """Whether the launcher can start engines."""
        self.why = "its launcher has not been reached yet"
        """Why it can't."""
        self._has_been_up = False
        self._changed = asyncio.Condition()
        self._writer: asyncio.StreamWriter | None = None
        self._engines: dict[int, EngineEvents] = {}
        self._next = 0
        self._pings: dict[int, float] = {}
        """When each unanswered ping was sent."""
        self._clocks: deque[tuple[float, float]] = deque(maxlen=_CLOCKS)
        """Round trips of pings in seconds, and how far the launcher's clock was ahead."""

    def ahead_s(self) -> float:
        """Return by how many seconds the node's monotonic clock is ahead of this process's.

        The launcher has read its clock at some time of a ping's round trip. So the error is at most half of the round
        trip, and the shortest of the latest round trips counts.
        """
        return min(self._clocks)[1] if self._clocks else 0.0

    async def reachable(self) -> None:
        """Wait until the launcher can start engines."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.up)

    def add(self, engine: EngineEvents) -> int:
        """Return the number of a new engine."""
        number, self._next = self._next, self._next + 1
        self._engines[number] = engine
        return number

    def send(self, message: Spec) -> None:
        """Send a message to the launcher, if it is there."""
        if self._writer and not self._writer.is_closing():
            self._writer.write(encoded(message))

    async def attach(self, connection: int) -> Streams:
        """Return a new connection that continues as a connection of an engine, after several attempts if needed.

        Strangers may take the place of a connection that has not proved itself yet.

        Raises:
            OSError: It can't be made; the text says why.
        """
        until_s = time.monotonic() + ATTACH_S
        while True:
            try:
                reader, writer = await self._open()
            except (InputError, OSError, EOFError, asyncio.TimeoutError, TimeoutError) as error:
                if time.monotonic() + _AGAIN_S >= until_s:
                    raise ConnectionError(_reason(error)) from error
                await asyncio.sleep(_AGAIN_S)
            else:
                writer.write(encoded(Attach(connection)))
                return reader, writer

    async def run(self) -> None:
        """Keep the connection until cancelled.

        Raises:
            InputError: The launcher refuses this server, before it has ever been reached.
        """
        while True:
            try:
                await self._serve()
            except (InputError, OSError, EOFError, asyncio.TimeoutError, TimeoutError) as error:
                if isinstance(error, InputError) and not self._has_been_up:
                    raise
                await self._lost(_reason(error))
            finally:
                if self._writer:
                    self._writer.close()
                    self._writer = None
            await asyncio.sleep(_AGAIN_S)

    async def _serve(self) -> None:
        reader, self._writer = await self._open()
        self.send(Hello(__version__))
        answer = await self._receive(reader)
        if isinstance(answer, Denied):
            text = f"The launcher of {self.address} starts no engines: {answer.reason}."
            raise InputError(text) if answer.version != __version__ else ConnectionRefusedError(answer.reason)
        if not isinstance(answer, Welcome):
            raise InputError(f"The launcher of {self.address} does not greet.")
        self._clocks.clear()
        self._pings.clear()
        for number in range(_CLOCKS):
            self._ping(number)
            while self._pings:
                self._take(await self._receive(reader))
        await self._reached()
        pinging = asyncio.ensure_future(self._ping_on())
        try:
            while True:
                self._take(await self._receive(reader))
        finally:
            pinging.cancel()

    async def _receive(self, reader: asyncio.StreamReader) -> Spec:
        return await asyncio.wait_for(receive(reader, FROM_LAUNCHER), SILENT_S)

    async def _open(self) -> Streams:
        """Return a connection to the launcher, to which this server has proved itself.

        Raises:
            InputError: The token is wrong.
            OSError: The launcher can't be reached.
        """

        async def proved() -> Streams:
            reader, writer = await asyncio.open_connection(self.address.host, self.address.port, limit=_CHUNK)
            try:
                prepare(writer)
                await introduce(reader, writer, self._token)
            except BaseException:
                writer.close()
                raise
            return reader, writer

        try:
            return await asyncio.wait_for(proved(), PROOF_S)
        except Stranger:
            raise InputError(
                f"The launcher of {self.address} does not have this server's token: give both the same token file."
            ) from None

    def _ping(self, number: int) -> None:
        self._pings[number] = time.monotonic()
        self.send(Ping(number))

    async def _ping_on(self) -> None:
        number = _CLOCKS
        while True:
            await asyncio.sleep(PING_S)
            self._ping(number)
            number += 1

    def _take(self, message: Spec) -> None:
        if isinstance(message, Pong):
            sent_s, now_s = self._pings.pop(message.number, None), time.monotonic()
            if sent_s is not None:
                self._clocks.append((now_s - sent_s, message.now_s - (sent_s + now_s) / 2))
        elif isinstance(message, EngineEnded):
            if engine := self._engines.pop(message.engine, None):
                engine.ended(message.code, message.reason)
        elif isinstance(message, EngineConnected) and message.engine in self._engines:
            self._engines[message.engine].connected(message.place, message.connection)
        elif isinstance(message, EngineStarting) and message.engine in self._engines:
            self._engines[message.engine].starts(message.place, message.text)

    async def _reached(self) -> None:
        async with self._changed:
            self.up = self._has_been_up = True
            self._changed.notify_all()
        output.note(f"{self.address} is connected", event="node_connected", node=self.address.node)

    async def _lost(self, why: str) -> None:
        """Record that the launcher can't be reached, and that its engines are gone."""
        if self.up or why != self.why:
            output.note(f"{self.address} can't be reached: {why}", event="node_lost", node=self.address.node)
        self.up, self.why, self._next = False, why, 0
        engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            engine.gone()


def _reason(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "its launcher has closed the connection"
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return "its launcher does not answer"
    return why_text(error) if isinstance(error, OSError) else str(error).rstrip(".")


def _is_up(link: NodeLink) -> float:
    return float(link.up)


class NodeLinks:
    """The connections to the launchers of all nodes on which engines of a server may run."""

    def __init__(self, addresses: Sequence[NodeAddress], token: str | None, registry: CollectorRegistry):
        self._links = {address.node: NodeLink(address, token or "") for address in addresses}
        self._running: list[asyncio.Task[None]] = []
        if self._links:
            gauge = Gauge("exegpt_node_up", "Whether a node's launcher is connected.", ["node"], registry=registry)
            for node, link in self._links.items():
                gauge.labels(str(node)).set_function(partial(_is_up, link))

    @property
    def by_node(self) -> Mapping[int, NodeLink]:
        """The connections by node."""
        return self._links

    def run(self, failed: "Callable[[asyncio.Task[None]], object]") -> None:
        """Begin to connect; call `failed` with a connection that can't be kept."""
        for link in self._links.values():
            self._running.append(asyncio.ensure_future(link.run()))
            self._running[-1].add_done_callback(failed)

    async def close(self) -> None:
        """End the connections: the launchers end all engines that still run."""
        for running in self._running:
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._running, return_exceptions=True)
