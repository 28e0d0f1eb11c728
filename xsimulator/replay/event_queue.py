"""The event queue: whatever acts in simulated time, one event after the other over all of it.

One actor's event may be another one's next arrival, so whoever follows them can submit requests after each event.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from math import inf
from typing import Protocol


class Actor(Protocol):
    """What acts in simulated time: devices with their requests, mostly. Times in seconds since the run began."""

    def next_event(self) -> float:
        """When it acts next; endless where nothing happens before it is given something to do."""

    def act(self, now: float) -> None:
        """Let happen what happens then, `now` being that time."""

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""


def events(actors: Items[Actor], until: float = inf) -> Iterator[float]:
    """Let actors act until some time, the one with the earliest event first, of several the first of the list. Gives
    the time of each event when it has happened. RuntimeError where the last has, and something waits still.
    """
    while True:
        now, place = min([(actor.next_event(), place) for place, actor in enumerate(actors)])
        if now > until:
            return
        if now == inf:
            break
        actors[place].act(now)
        yield now
    if not all(actor.idle for actor in actors):
        raise RuntimeError("a waiting request can never be admitted")  # ledgers refuse those


def run(actors: Items[Actor], until: float = inf) -> None:
    """The same, for whoever needn't look at each event."""
    for _ in events(actors, until):
        pass
