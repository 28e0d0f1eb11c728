"""Replicas: what the drivers of several copies of a model tell each other. Results go to the first one's, which speaks;
changes of schedule come from it, so that all copies change together.

Each side says END when no more will come, and waits for the other's: nothing is on its way when a run is over.
"""

from collections.abc import Callable

from exegpt.request import Result
from xrunner.comm.transport import CHANGE, RESULT, Transport
from xrunner.core.adaptation import Change
from xrunner.rank.worker import END


class Leader:
    """The leader: `report` takes its own results, and those of the `others` once it has listened."""

    def __init__(self, transport: Transport | None, others: tuple[int, ...], report: Callable[[Result], None]):
        self.report = report
        self._transport, self._others = transport, others
        self._silent = len(others)
        """How many have yet to say that no more will come."""

    def listen(self) -> bool:
        """Hand on what has come; whether that was all."""
        while self._silent and self._transport and (heard := self._transport.poll(tag=RESULT)) is not None:
            if heard == END:
                self._silent -= 1
            else:
                self.report(heard)
        return not self._silent

    def broadcast(self, change: Change | str) -> None:
        """Let the others change too."""
        if self._transport:
            self._transport.post(change, *self._others, tag=CHANGE)

    def drain(self) -> None:
        """Wait for all results."""
        self.broadcast(END)
        if self._transport:
            self._transport.wait(self.listen)


class Follower:
    """Another replica's driver, which reports to the leader and takes the changes that that one finds."""

    def __init__(self, transport: Transport, leader: int):
        self._transport, self._leader = transport, leader
        self._over = False

    def report(self, result: Result | str) -> None:
        """Send a result."""
        self._transport.post(result, self._leader, tag=RESULT)

    def listen(self) -> None:
        """Nobody reports here."""

    def look(self, now: float) -> Change | None:
        """The next change; None where none has come."""
        heard = None if self._over else self._transport.poll(self._leader, CHANGE)
        self._over = self._over or heard == END
        return None if self._over else heard

    def drain(self) -> None:
        """Wait until no change will come; those that come now have nobody left to change for."""
        self.report(END)
        self._transport.wait(self._ended)

    def _ended(self) -> bool:
        self.look(0.0)
        return self._over
