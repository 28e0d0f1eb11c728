"""Closed loop: a fixed number of agents, each of which sends its next request when its last one has ended."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from xcore.batching import Hints, Order
from xcore.orders import fcfs
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xsimulator.replay.dependent_requests import DependentArrival, DependentReplay
from xsimulator.replay.event_simulator import Replay


@dataclass(frozen=True)
class Sessions:
    """Sessions of turns, and the agents that run them."""

    turns: tuple[tuple[int, ...], ...]
    """The requests of each session by index, one after the other."""
    pauses_s: tuple[float, ...]
    """[requests]: seconds from the end of the agent's last request to this one's arrival: its tool's time."""
    agents: int
    """Sessions at a time; an agent whose session has ended begins the next one."""

    def seconds(self, served: Iterable[RequestTimes]) -> list[float]:
        """Return the seconds of each session, from its first arrival to its last end."""
        times = {each.index: each for each in served}
        return [times[turns[-1]].finish_s - times[turns[0]].arrival_s for turns in self.turns]


@dataclass(frozen=True)
class ClosedLoop:
    """A closed loop in simulated time."""

    replay: Replay
    full_s: float
    """Seconds until the first agent found no session left; until then all agents were busy."""


class _Agents:
    """The agents of one replica and the sessions that are left."""

    def __init__(self, turns: Iterable[tuple[int, ...]], pauses_s: Items[float], agents: int):
        self._left, self._pauses_s, self._agents = deque(turns), pauses_s, agents
        self._next: Mapping[int, int] = {before: after for own in self._left for before, after in pairwise(own)}
        self.full_s = inf if len(self._left) >= agents else 0.0

    def begin(self) -> Iterator[DependentArrival]:
        for _ in range(min(self._agents, len(self._left))):
            first = self._left.popleft()[0]
            yield DependentArrival(first, self._pauses_s[first])

    def after(self, ended: RequestTimes) -> Iterator[DependentArrival]:
        following = self._next.get(ended.index)
        if following is None and self._left:
            following = self._left.popleft()[0]
        if following is None:
            self.full_s = min(self.full_s, ended.finish_s)
        else:
            yield DependentArrival(following, ended.finish_s + self._pauses_s[following])


def replay_closed_loop(
    schedule: Schedule,
    profile: Profile,
    requests: Items[RequestLengths],
    sessions: Sessions,
    order: Order = fcfs,
    hints: Items[Hints] | None = None,
) -> ClosedLoop:
    """Run sessions through a schedule in simulated time; the requests' own arrivals are ignored.

    Replicas get sessions and agents in turns. A session stays on its replica, which has its prefix in the cache.

    Raises:
        InputError: The KV cache cannot hold one of the requests.
    """
    # With two sides, one may be ahead of an end that makes a request arrive at the other.
    replaying = DependentReplay(schedule, profile, requests, order, hints, step_by_step=schedule.traits.disaggregated)
    count, full_s = min(len(replaying.replicas), sessions.agents), inf
    for number, replica in enumerate(replaying.replicas[:count]):
        agents = sessions.agents // count + (number < sessions.agents % count)
        own = _Agents(sessions.turns[number::count], sessions.pauses_s, agents)
        replaying.run([replica], own)
        full_s = min(full_s, own.full_s)
    return ClosedLoop(replaying.result, full_s)
