"""Replicas: the messages between the drivers of several copies of a model.

The first driver, the leader, gets all events, deals out the requests that arrive during the run, and makes all copies
change their schedule together.

Each side says END when it will send no more, and waits for the other's END: no message is in transit when a run is
over.
"""

import time
from collections.abc import Callable, Sequence

from xcore.requests.engine_protocol import Event, TokenEvent
from xcore.requests.request import Request, Result
from xcore.specs.change import Change
from xrunner.comm.transport import CHANGE, REQUEST, RESULT, Transport
from xrunner.rank.worker import END

_LOOK_S = 2e-3
"""Longest wait for another replica's message, in seconds, so that the frontend's orders and aborts are processed."""
Order = tuple[int, Request] | str
"""A request with its place, the id of one to abort, or END: no more requests will come."""


class Leader:
    """The first replica's driver. `emit` gets its own events and, in `listen`, the other replicas' events."""

    def __init__(self, transport: Transport | None, others: Sequence[int], emit: Callable[[Event], None]):
        self.emit = emit
        self._transport, self._others = transport, tuple(others)
        self._running = len(others)
        """Number of followers that have not sent END yet."""
        self._closed = False
        self.outstanding = 0
        """Requests given to the others that have not ended."""

    @property
    def over(self) -> bool:
        """Whether no more events will come from the other replicas."""
        return not self._running

    def give(self, order: tuple[int, Request], replica: int) -> None:
        """Give a request to another replica (from 1 on)."""
        assert self._transport, "other replicas are other ranks"
        self._transport.post(order, self._others[replica - 1], tag=REQUEST)
        self.outstanding += 1

    def abort(self, request_id: str) -> None:
        """End a request, whichever other replica has it.

        The output length of a request that a stop text ends doesn't matter there: only the leader's lengths are
        observed (`Adaptation`).
        """
        if self._transport:
            self._transport.post(request_id, *self._others, tag=REQUEST)

    def close(self) -> None:
        """Tell the other replicas, once, that no more requests will come."""
        if self._transport and not self._closed:
            self._transport.post(END, *self._others, tag=REQUEST)
        self._closed = True

    def wait(self) -> None:
        """Sleep until a message of another replica has arrived, at most `_LOOK_S`."""
        if self._transport and not self.over:
            end = time.perf_counter() + _LOOK_S
            self._transport.wait(lambda: self.listen() or time.perf_counter() >= end)

    def listen(self) -> bool:
        """Process the messages that have arrived. Return whether there were any."""
        heard = False
        while self._running and self._transport and (message := self._transport.poll(tag=RESULT)) is not None:
            heard = True
            if message == END:
                self._running -= 1
                continue
            for event in message:
                self.outstanding -= isinstance(event, Result)
                self.emit(event)
        return heard

    def broadcast(self, change: Change | str) -> None:
        """Send a change to the other replicas."""
        if self._transport:
            self._transport.post(change, *self._others, tag=CHANGE)

    def drain(self) -> None:
        """Wait for all events of the other replicas."""
        self.broadcast(END)
        if self._transport:
            self._transport.wait(self._ended)

    def _ended(self) -> bool:
        self.listen()
        return self.over


class Follower:
    """Another replica's driver: it reports to the leader and follows the leader's requests and changes."""

    def __init__(self, transport: Transport, leader: int):
        self._transport, self._leader = transport, leader
        self._over = False
        """Whether no change will come."""
        self._tokens: list[TokenEvent] = []
        self._orders: list[Order] = []
        """Orders that have come while it waited."""

    def emit(self, event: Event) -> None:
        """Send a result, with the tokens before it; tokens without a result are kept until `flush`."""
        if isinstance(event, Result):
            self.flush(event)
        else:
            self._tokens.append(event)

    def flush(self, *events: Event) -> None:
        """Send the kept tokens, then these events."""
        if self._tokens or events:
            self._transport.post([*self._tokens, *events], self._leader, tag=RESULT)
            self._tokens.clear()

    def orders(self) -> list[Order]:
        """Return the orders that have arrived."""
        orders, self._orders = self._orders, []
        while (order := self._transport.poll(self._leader, REQUEST)) is not None:
            orders.append(order)
        return orders

    def wait(self) -> None:
        """Sleep until an order has arrived, at most `_LOOK_S`, since a change may arrive too."""
        end = time.perf_counter() + _LOOK_S
        self._transport.wait(lambda: self._has_order() or time.perf_counter() >= end)

    def _has_order(self) -> bool:
        order = self._transport.poll(self._leader, REQUEST)
        self._orders += [] if order is None else [order]
        return order is not None

    def look(self, now: float) -> Change | None:
        """Return the next change; None if there is none."""
        change = None if self._over else self._transport.poll(self._leader, CHANGE)
        self._over = self._over or change == END
        return None if self._over else change

    def drain(self) -> None:
        """Wait until no more changes will come. Later changes are dropped, since no requests are left."""
        self._transport.post(END, self._leader, tag=RESULT)
        self._transport.wait(self._ended)

    def _ended(self) -> bool:
        self.look(0.0)
        return self._over
