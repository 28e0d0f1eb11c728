"""Inbox: the engine's end of its connection to the frontend.

The leader receives requests from it and sends back tokens and results. Neither side waits for the other while
sequences run: messages that the frontend hasn't read yet are kept here.
"""

import contextlib
import select
import socket
import time
from collections.abc import Sequence

from xcore.batching import PrefixPool
from xcore.errors import InputError, TooLong
from xcore.requests.engine_protocol import (
    BEGIN,
    DRAIN,
    FROM_FRONTEND,
    LOADS,
    MOVES,
    Abort,
    CachedKeys,
    Changed,
    Ended,
    Event,
    Follow,
    Frames,
    Held,
    Opened,
    Stepped,
    Stop,
    TokenColumns,
    TokenEvent,
    framed,
    short_keys,
)
from xcore.requests.request import Request, Result
from xcore.specs.schedule import Schedule
from xrunner.core.compiling import Compiling
from xrunner.core.engine import Engine

_CHUNK = 2**18
"""Bytes that are read at once."""
_LOOK_S, _COMPILING_S = 1.0, 2e-3
"""Longest wait of an idle engine, in seconds, before it checks whether it is to end or a grammar is compiled."""
_SILENT_S = 1.0
"""Longest time without a message, in seconds, while steps are made: the frontend takes a silent engine for stalled."""


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

    def fileno(self) -> int:
        """Return the connection's file descriptor, to wait for orders on several connections."""
        return self._connection.fileno()

    @property
    def unsent(self) -> bool:
        """Whether a message has not been sent completely."""
        return bool(self._unsent)

    def take(self, wait_s: float = 0.0) -> list[object]:
        """Return the orders that have arrived, after waiting up to `wait_s` for the first. Raises Gone."""
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
        """Drop the orders before the frontend's BEGIN: they were for the previous engine, and are sent again."""
        while BEGIN not in self._taken:
            self._taken += self._read(_LOOK_S)
        self._taken = self._taken[self._taken.index(BEGIN) + 1 :]

    def send(self, message: object) -> None:
        """Send a message, or keep it until there is room.

        Raises Gone.
        """
        self._unsent += framed(message)
        self._flush()

    def finish(self) -> None:
        """Wait until all messages are sent. Raises Gone."""
        self._connection.setblocking(True)
        try:
            if self._unsent:  # a frontend that has received everything may have closed the connection
                self._connection.sendall(self._unsent)
        except (BrokenPipeError, ConnectionResetError):
            raise Gone from None

    def leave(self) -> None:
        """Let another rank connect in place of this one; return once the frontend has closed the connection.

        Orders that arrive meanwhile are sent again, to that rank. Raises Gone.
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


class Session:
    """The frontend's requests on an open engine, until it drains; on the leader.

    `opened` describes the engine. Raises Gone if the frontend closes the connection early.
    """

    def __init__(self, engine: Engine, inbox: Inbox, opened: Opened):
        self.engine, self.inbox = engine, inbox
        self.draining = False
        """Whether no more requests come."""
        self._changes = 0
        self._compiling: Compiling[Request] = Compiling(engine.grammars)
        self._refused: list[Ended] = []
        self._sent_s, self._cached = time.monotonic(), 0
        inbox.send(opened)
        inbox.begin()

    @property
    def over(self) -> bool:
        """Whether all requests have ended and no more requests will arrive."""
        return self.draining and self.engine.idle and not self._compiling

    @property
    def patience_s(self) -> float:
        """How long an idle engine may wait for orders."""
        return _COMPILING_S if self._compiling else 0.0 if self.draining else _LOOK_S

    def take(self, wait_s: float = 0.0) -> None:
        """Follow the orders that have arrived, after waiting up to `wait_s` for the first."""
        for order in self.inbox.take(wait_s):
            self._follow(order)
        for request, aborted in self._compiling.take():
            self._add(request)
            if aborted:
                self.engine.abort(request.id)

    def _follow(self, order: object) -> None:
        if order == DRAIN:
            self.draining = True
        elif isinstance(order, Abort):
            for request_id in order.ids:
                self.engine.abort(request_id)
                self._compiling.abort(request_id)
        elif isinstance(order, Stop):
            self.engine.abort(order.id, order.output_tokens)
            self._compiling.abort(order.id)  # the stop may be for tokens of the previous engine
        elif isinstance(order, Follow):
            self.engine.follow(order.schedule)
        else:
            assert isinstance(order, Request)
            if not self._compiling.put(order, order):
                self._add(order)

    def _add(self, request: Request) -> None:
        """Add a request to the engine; record a refusal if the engine can't run it."""
        try:
            held = self.engine.add(request)
            if held is not None:
                self.inbox.send(Held(request.id, held))
        except InputError as error:
            refused = Ended(request.id, "error", refused=str(error), too_long=isinstance(error, TooLong))
            self._refused.append(refused)

    def send(self, events: Sequence[Event]) -> None:
        """Send the events of the engine's steps, and the schedules that have taken over."""
        if events or self._refused or self._has_stepped():
            self.inbox.send(_stepped(self.engine, events, self._refused))
            self._refused, self._sent_s = [], time.monotonic()
        for change in self.engine.changes[self._changes :]:
            self.inbox.send(Changed(change.schedule))
            self._changes += 1

    def _has_stepped(self) -> bool:
        """Return whether steps without events have been made since the last message, if that was long ago.

        A long prompt that is processed in parts takes many of them.
        """
        if time.monotonic() - self._sent_s < _SILENT_S:
            return False
        before, self._cached = self._cached, sum(sequence.cached for sequence in self.engine.ledger.resident)
        return self._cached != before


def serve(engine: Engine, inbox: Inbox, opened: Opened) -> Schedule | None:
    """Run the frontend's requests on an open engine until the frontend drains, or a schedule needs another engine.

    Return that schedule; the frontend sends it the unfinished requests again. Raises Gone, as `Session`.
    """
    session = Session(engine, inbox, opened)
    while not session.over:
        session.take(session.patience_s if engine.idle else 0.0)
        session.send(engine.step() if engine.busy else [])
        if engine.moving:
            schedule = engine.with_room(engine.moving.schedule)  # they have been accepted
            inbox.send(LOADS)
            engine.surrender()
            return schedule
    inbox.finish()
    engine.drain()
    return None


def _stepped(engine: Engine, events: Sequence[Event], refused: Sequence[Ended]) -> Stepped:
    results = [event for event in events if isinstance(event, Result)]
    ended = [Ended(result.id, result.finish_reason, error=result.error) for result in results]
    return Stepped(
        now_s=engine.worker.now(),
        tokens=TokenColumns.of([event for event in events if isinstance(event, TokenEvent)]),
        ended=(*refused, *ended),
        occupancy=engine.occupancy,
        spans=engine.take_spans(),
        cached=cached_keys(engine),
    )


def cached_keys(engine: Engine) -> CachedKeys | None:
    """Return the changes of the cache of prefixes since the last call, if `Options.pins` is set; None: no changes."""
    pool = engine.ledger.pool
    if not isinstance(pool, PrefixPool) or engine.schedule.replicas > 1:
        return None
    found, lost = pool.take_changes()
    return CachedKeys(short_keys(found), short_keys(lost)) if found or lost else None
