"""The event queue: actors in simulated time, whose events happen one after the other in the order of time.

One actor's event may cause another one's arrival. The caller of `events` can therefore submit requests after each
event.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from math import inf
from typing import Protocol


class Actor(Protocol):
    """An actor in simulated time, usually devices with their requests. Times are in seconds since the run began."""

    def next_event(self) -> float:
        """Return the time of the actor's next event; infinite if it has no event before it gets more work."""

    def act(self, now: float) -> None:
        """Process the actor's next event, whose time is `now`."""

    @property
    def idle(self) -> bool:
        """Return whether nothing waits and nothing runs."""


def events(actors: Items[Actor], until: float = inf) -> Iterator[float]:
    """Process the actors' events up to the time `until`, and yield the time of each after it has happened.

    The earliest event comes first; of simultaneous events, that of the first actor in the list.

    Raises:
        RuntimeError: No event is left, but an actor still has work.
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
        raise RuntimeError("a waiting request can never be admitted")  # ledgers refuse such requests


def run(actors: Items[Actor], until: float = inf) -> None:
    """Process all events up to `until`, for callers that don't look at each event."""
    for _ in events(actors, until):
        pass
