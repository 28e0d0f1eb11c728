"""The event queue: engines beside each other in simulated time, one event after the other over all of them.

An engine's event may be another one's next arrival, so whoever follows them can submit requests after each event.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from math import inf
from typing import Protocol


class Engine(Protocol):
    """What acts in simulated time: devices with their requests, mostly. Times in seconds since the run began."""

    def next_event(self) -> float:
        """When it acts next; endless where nothing happens before it is given a request."""

    def act(self, now: float) -> None:
        """Let happen what happens then, `now` being that time."""

    @property
    def idle(self) -> bool:
        """Whether no request waits and none runs."""


def events(engines: Items[Engine], until: float = inf) -> Iterator[float]:
    """Let engines act until some time, the one with the earliest event first, of several the first of the list. Gives
    the time of each event when it has happened.
    """
    while True:
        now, place = min([(engine.next_event(), place) for place, engine in enumerate(engines)])
        if now > until or now == inf:
            return
        engines[place].act(now)
        yield now


def run(engines: Items[Engine], until: float = inf) -> None:
    """Let engines act until some time, or until all requests are done; RuntimeError where one can never run."""
    for _ in events(engines, until):
        pass
    check_done(engines, until)


def check_done(engines: Items[Engine], until: float = inf) -> None:
    """RuntimeError where engines that have no more events before `until` have a request that can never run."""
    if until == inf and not all(engine.idle for engine in engines):
        raise RuntimeError("a waiting request can never be admitted")  # ledgers refuse those
