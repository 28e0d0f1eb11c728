"""Inbox: the engine's end of its connection to the frontend. The leader takes requests from it, and sends back what
comes of them.

Neither side waits for the other while sequences run: what the frontend hasn't read yet is kept here.
"""

import contextlib
import select
import socket
from collections.abc import Sequence

import numpy as np

from exegpt.engine_protocol import (
    BEGIN,
    DRAIN,
    FROM_FRONTEND,
    MOVES,
    Abort,
    Changed,
    Ended,
    Follow,
    Frames,
    LogProbs,
    Opened,
    Prompt,
    Stepped,
    Stop,
    framed,
)
from exegpt.errors import InputError
from exegpt.request import Request
from exegpt.schedule import Schedule
from xrunner.core.compiling import Compiling
from xrunner.core.engine import Engine
from xrunner.core.events import Event, Token

_CHUNK = 2**18
"""Bytes that are read at once."""
_LOOK_S, _COMPILING_S = 1.0, 2e-3
"""Longest wait of an idle engine, after which it looks whether it is to end, or whether a grammar is compiled."""


class Gone(Exception):
    """The frontend has closed the socket."""


class Inbox:
    """Orders from the frontend, and messages to it, over a connected stream socket."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        connection.setblocking(False)
        self._frames = Frames(FROM_FRONTEND)
        self._unsent = bytearray()
        self._taken: list[object] = []
        """Orders that were read with BEGIN."""

    def take(self, wait_s: float = 0.0) -> list[object]:
        """The orders that have come, after waiting up to `wait_s` for the first. Raises Gone."""
        taken = self._taken or self._read(wait_s)
        self._taken = []
        return taken

    def _read(self, wait_s: float) -> list[object]:
        if wait_s:
            select.select([self._connection], [self._connection] if self._unsent else [], [], wait_s)
        self._flush()
        try:
            data = self._connection.recv(_CHUNK)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            raise Gone from None
        if not data:
            raise Gone
        return self._frames.feed(data)

    def begin(self) -> None:
        """Forget the orders before the frontend's BEGIN: they were for the engine before this one, and come again."""
        while BEGIN not in self._taken:
            self._taken += self._read(_LOOK_S)
        self._taken = self._taken[self._taken.index(BEGIN) + 1 :]

    def send(self, message: object) -> None:
        """Send a message, or keep it until there is room. Raises Gone."""
        self._unsent += framed(message)
        self._flush()

    def finish(self) -> None:
        """Wait until all is sent. Raises Gone."""
        self._connection.setblocking(True)
        try:
            if self._unsent:  # a frontend that has all may have closed the connection
                self._connection.sendall(self._unsent)
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None

    def leave(self) -> None:
        """Let another rank connect in this one's place: return once the frontend has closed the connection. Orders that
        come meanwhile come again, to that rank. Raises Gone.
        """
        self.send(MOVES)
        self.finish()
        with contextlib.suppress(ConnectionResetError):  # it has closed with bytes unread
            while self._connection.recv(_CHUNK):
                pass
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._connection.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None


def serve(engine: Engine, inbox: Inbox, opened: Opened) -> Schedule | None:
    """Run the frontend's requests on an open engine until the frontend drains, or until another schedule needs another
    engine: that schedule, to which the frontend gives again what hasn't ended. On the leader. Raises Gone where the
    frontend ends without a word. `opened` says what the engine is.
    """
    draining, changes = False, 0
    compiling: Compiling[Request] = Compiling(engine.grammars)
    inbox.send(opened)
    inbox.begin()
    while not (draining and engine.idle and not compiling):
        refused: list[Ended] = []
        idle_s = _COMPILING_S if compiling else 0.0 if draining else _LOOK_S
        for order in inbox.take(idle_s if engine.idle else 0.0):
            if order == DRAIN:
                draining = True
            elif isinstance(order, Abort):
                for request_id in order.ids:
                    engine.abort(request_id)
                    compiling.abort(request_id)
            elif isinstance(order, Stop):
                engine.abort(order.id, order.output_tokens)
            elif isinstance(order, Follow):
                engine.follow(order.schedule)
            else:
                assert isinstance(order, Request)
                refused += [] if compiling.put(order, order) else _add(engine, order)
        for request, aborted in compiling.take():
            refused += _add(engine, request)
            if aborted:
                engine.abort(request.id)
        events = engine.step() if engine.busy else []
        if events or refused:
            inbox.send(_stepped(engine, events, refused))
        for change in engine.changes[changes:]:
            inbox.send(Changed(change.schedule))
            changes += 1
        if engine.moving:
            schedule = engine.moving.schedule
            engine.surrender()
            return schedule
    inbox.finish()
    engine.drain()
    return None


def _add(engine: Engine, request: Request) -> list[Ended]:
    """Let a request wait; its end, where the engine can't run it."""
    try:
        engine.add(request)
    except InputError as error:
        return [Ended(request.id, "error", refused=str(error))]
    return []


def _stepped(engine: Engine, events: Sequence[Event], refused: Sequence[Ended]) -> Stepped:
    tokens = [event for event in events if isinstance(event, Token)]
    results = [event for event in events if not isinstance(event, Token)]
    asked = any(token.logprob is not None for token in tokens)
    ended = [Ended(result.id, result.finish_reason) for result in results]
    return Stepped(
        now_s=engine.worker.now(),
        ids=np.array([int(token.request_id) for token in tokens], dtype=np.int64),
        tokens=np.array([token.token for token in tokens], dtype=np.int64),
        made_s=np.array([token.made_s for token in tokens], dtype=np.float64),
        starts_s=np.array([np.nan if t.start_s is None else t.start_s for t in tokens], dtype=np.float64),
        ended=(*refused, *ended),
        occupancy=engine.occupancy,
        spans=engine.take_spans(),
        logprobs=LogProbs.of((t.logprob, t.likeliest) for t in tokens) if asked else None,
        prompts=tuple(Prompt(token.request_id, LogProbs.of(token.prompt)) for token in tokens if token.prompt),
    )
