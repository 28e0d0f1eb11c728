"""The messages between a server and the launcher of a node, and how both ends prove themselves.

    server ──Hello, StartEngine, EndEngine, Ping──► launcher
    server ◄──Welcome, Denied, EngineConnected, EngineStarting, EngineEnded, Pong── launcher

    server ──Attach, then the engine protocol────► launcher ──Unix socket──► engine
    server ◄──the engine protocol──────────────── launcher ◄──Unix socket── engine

A server has one connection with the first messages, and one for each connection of an engine. The launcher passes on
the bytes of the latter unchanged (`xcore.requests.engine_protocol`). Both ends begin by proving that they have the
token. A message is its length (8 bytes, little-endian) and JSON: its name and its keys, which are checked like those of
a file. Nothing is encrypted.
"""

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from xcore import document
from xcore.errors import InputError
from xcore.requests.proof import NONCE, PROOF, proof, proves
from xcore.spec import Spec

MAX_MESSAGE = 2**24
"""Largest message in bytes; a longer one ends the connection."""
PROOF_S = 5.0
"""Most seconds until the other end has proved itself and said what the connection is for."""
SILENT_S = 15.0
"""Seconds without a message after which the other end counts as lost."""
PING_S = 2.0
"""Seconds between two pings of a server."""
ATTACH_S = 10.0
"""Seconds in which a server begins attempts to attach to a connection of an engine."""
_PREFIX = 8
_SERVER, _LAUNCHER = b"server", b"launcher"
_NO_PROOF = bytes(PROOF)

Number = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of a message: names of files have some, so its digits are limited."""


class Stranger(Exception):
    """The other end doesn't have the token."""


@dataclass(frozen=True)
class Hello(Spec):
    """The first message of a server: it wants to start engines."""

    version: str
    """The version of exegpt, which both ends must have: the engine protocol has no other."""


@dataclass(frozen=True)
class Attach(Spec):
    """The first message of a connection that continues as a connection of an engine."""

    connection: Number


@dataclass(frozen=True)
class Welcome(Spec):
    """The launcher starts engines for this server."""


@dataclass(frozen=True)
class Denied(Spec):
    """The launcher starts no engines for this server."""

    reason: str
    version: str


@dataclass(frozen=True)
class LaunchedModel(Spec):
    """A model of an engine to start."""

    name: str
    place: Number
    """Its index among the plan's models: its engine connects to the socket `engine-PLACE`."""
    directory: str
    """The server's directory of the model; the launcher uses its own, if it has one by this name."""


@dataclass(frozen=True)
class StartEngine(Spec):
    """An engine to start: of a model with devices of its own, or of those that share devices."""

    engine: Number
    """The server's number for it, which no earlier engine of this connection has."""
    models: tuple[LaunchedModel, ...]
    devices: tuple[int, ...]
    """As numbered on the node; a rank for each."""
    in_use: int
    """Devices of the node that the plan uses."""
    flags: tuple[str, ...]
    """Further arguments of `exegpt engine`, of those in `launched_engine.FLAGS`."""
    schedule: dict[str, object] | None
    """The document of the schedule of a model with devices of its own."""
    plan: dict[str, object] | None
    """The document of the plan of models that share devices.

    Both are checked when the engine starts. If they are wrong, the engine is refused, and the connection stays.
    """
    unit: int
    """The place of these models in `Plan.units`."""


@dataclass(frozen=True)
class EndEngine(Spec):
    """An engine to end."""

    engine: Number


@dataclass(frozen=True)
class Ping(Spec):
    """A question for the launcher's clock."""

    number: Number


@dataclass(frozen=True)
class Pong(Spec):
    """The answer to a ping."""

    number: Number
    now_s: float
    """The launcher's monotonic clock."""


@dataclass(frozen=True)
class EngineConnected(Spec):
    """An engine has connected to the socket of one of its models; the server can attach to this connection."""

    engine: Number
    place: Number
    connection: Number


@dataclass(frozen=True)
class EngineStarting(Spec):
    """The present work of an engine before it opens."""

    engine: Number
    place: Number
    text: str


@dataclass(frozen=True)
class EngineEnded(Spec):
    """An engine has ended, or could not be started."""

    engine: Number
    code: int
    """The exit code."""
    reason: str = ""
    """Why the launcher has not started it."""


FIRST: tuple[type[Spec], ...] = (Hello, Attach)
FROM_SERVER: tuple[type[Spec], ...] = (StartEngine, EndEngine, Ping)
FROM_LAUNCHER: tuple[type[Spec], ...] = (Welcome, Denied, EngineConnected, EngineStarting, EngineEnded, Pong)


def encoded(message: Spec) -> bytes:
    """Return a message with its length before it; InputError if the other end would refuse its length."""
    data = json.dumps([type(message).__name__, document.to_dict(message)]).encode()
    _check_size(len(data))
    return len(data).to_bytes(_PREFIX, "little") + data


def _check_size(size: int) -> None:
    if size > MAX_MESSAGE:
        raise InputError(f"A message has {size:,} bytes, but at most {MAX_MESSAGE:,} are accepted.")


async def receive(reader: asyncio.StreamReader, kinds: Iterable[type[Spec]]) -> Spec:
    """Return the next message, which is of one of these kinds.

    Raises:
        InputError: It is too long, or no such message.
        IncompleteReadError: The connection has ended.
    """
    size = int.from_bytes(await reader.readexactly(_PREFIX), "little")
    _check_size(size)
    data = await reader.readexactly(size)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise InputError("A message is not in UTF-8.") from None
    content = document.parse_json(text, "A message")
    by_name = {kind.__name__: kind for kind in kinds}
    name, values = content if isinstance(content, list) and len(content) == 2 else ("", None)
    if not isinstance(name, str) or name not in by_name:
        raise InputError(f"A message is none of {', '.join(by_name)}.")
    return document.from_dict(by_name[name], values, f"A message {name}")


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
    """Let a server prove that it has the token, then prove the same to it.

    A wrong proof is answered with `_NO_PROOF`: a connection that only closes says nothing about the token.

    Raises:
        Stranger: It doesn't have the token.
        IncompleteReadError: It has closed the connection.
    """
    mine = secrets.token_bytes(NONCE)
    writer.write(mine)
    theirs = await reader.readexactly(NONCE)
    if not proves(await reader.readexactly(PROOF), token, _SERVER, mine, theirs):
        writer.write(_NO_PROOF)
        raise Stranger
    writer.write(proof(token, _LAUNCHER, theirs, mine))


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
    """Prove to a launcher that this server has the token, then let the launcher prove the same.

    Raises:
        Stranger: One of both doesn't have the other's token.
        IncompleteReadError: The launcher has closed the connection before it checked the token.
    """
    theirs, mine = await reader.readexactly(NONCE), secrets.token_bytes(NONCE)
    writer.write(mine + proof(token, _SERVER, theirs, mine))
    if not proves(await reader.readexactly(PROOF), token, _LAUNCHER, mine, theirs):
        raise Stranger


def address_text(host: str, port: int) -> str:
    """Return HOST:PORT as it is typed: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def why_text(error: OSError) -> str:
    """Return the system's own words for an error, without asyncio's about the address."""
    if error.errno and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno).lower()
    return (error.strerror or str(error)).lower()


def prepare(writer: asyncio.StreamWriter) -> None:
    """Send small messages of a connection at once, and detect a machine that is gone."""
    connection = writer.get_extra_info("socket")
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux
            options.append((socket.IPPROTO_TCP, getattr(socket, name), seconds))
    for level, option, value in options:
        connection.setsockopt(level, option, value)
