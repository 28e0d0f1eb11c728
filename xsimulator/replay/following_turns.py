"""Following turns: the requests of one replica in a closed loop, most of which arrive after another one has ended."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from xcore.arrays import Array, Places
from xcore.specs.request_times import RequestTimes


class DependentArrival(NamedTuple):
    """A request that arrives."""

    request: int
    """Its index."""
    arrival_s: float


@dataclass(frozen=True)
class FollowingTurns:
    """Sessions of turns, and the number of agents that run them. A turn is a request, by its index."""

    next: Places
    """[requests]: the next turn of the session; -1: it is the last one."""
    pauses: Array
    """[requests]: seconds from the end of the agent's last turn to this one's arrival: its tool's time."""
    sessions: Places
    """[sessions]: first turns, in the order in which agents begin them."""
    agents: int
    """Sessions at a time."""

    @staticmethod
    def of(turns: Iterable[Items[int]], pauses_s: Items[float], agents: int) -> "FollowingTurns":
        """Return the sessions with these turns."""
        following, firsts = np.full(len(pauses_s), -1, dtype=np.intp), list[int]()
        for own in turns:
            firsts.append(own[0])
            for before, after in pairwise(own):
                following[before] = after
        return FollowingTurns(following, np.array(pauses_s), np.array(firsts, dtype=np.intp), agents)

    @property
    def arrivals(self) -> Array:
        """[requests]: seconds until the first turns of the first sessions arrive; infinite for all other turns."""
        arrivals, first = np.full(len(self.pauses), inf), self.sessions[: self.agents]
        arrivals[first] = self.pauses[first]
        return arrivals


@dataclass
class Agents:
    """The agents of one replica, and the sessions that are left."""

    turns: FollowingTurns
    outside_s: float = 0.0
    """Seconds from a turn's recorded end to its end for the agent."""
    _begun: int = field(init=False)

    def __post_init__(self) -> None:
        self._begun = min(self.turns.agents, len(self.turns.sessions))

    def begin(self) -> Iterator[DependentArrival]:
        """Yield the first turns of the first sessions."""
        for first in self.turns.sessions[: self._begun].tolist():
            yield DependentArrival(first, float(self.turns.pauses[first]))

    def after(self, ended: RequestTimes) -> Iterator[DependentArrival]:
        """Yield the agent's next turn, after one of its turns has ended."""
        following = int(self.turns.next[ended.index])
        if following < 0 and self._begun < len(self.turns.sessions):
            following, self._begun = int(self.turns.sessions[self._begun]), self._begun + 1
        if following >= 0:
            yield DependentArrival(following, ended.finish_s + self.outside_s + float(self.turns.pauses[following]))
