"""Closed loop: a fixed number of agents, each of which sends its next request when its last one has ended."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xcore.batching import Hints, Order, Preemption
from xcore.orders import fcfs
from xcore.orders.fcfs import FCFS
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xcore.traces.prefixes import Prefixes
from xsimulator.replay.compiled import RequestArrays, is_compiled
from xsimulator.replay.dependent_requests import DependentReplay
from xsimulator.replay.event_simulator import Replay, drawn_steps, replay_parts
from xsimulator.replay.following_turns import Agents, FollowingTurns


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

    def dealt(self, replicas: int) -> list["Sessions"]:
        """Return the sessions and agents of each replica, which get them in turns; one without agents is left out."""
        count = min(replicas, self.agents)
        return [
            Sessions(self.turns[i::count], self.pauses_s, self.agents // count + (i < self.agents % count))
            for i in range(count)
        ]


@dataclass(frozen=True)
class ClosedLoop:
    """A closed loop in simulated time."""

    replay: Replay
    full_s: float
    """Seconds until the first agent found no session left; until then all agents were busy."""


def replay_closed_loop(
    schedule: Schedule,
    profile: Profile,
    requests: Items[RequestLengths],
    sessions: Sessions,
    order: Order = fcfs,
    hints: Items[Hints] | None = None,
    preemption: Preemption | None = None,
    lanes: bool = False,
) -> ClosedLoop:
    """Run sessions through a schedule in simulated time; the requests' own arrivals are ignored.

    Replicas get sessions and agents in turns. A session stays on its replica, which has its prefix in the cache. The
    compiled event loop is used if it covers the arguments, unless `lanes` asks for the Python one.

    Raises:
        InputError: The KV cache cannot hold one of the requests.
    """
    dealt = sessions.dealt(schedule.replicas)
    plain = hints is None and preemption is None and type(order) is FCFS
    if plain and not lanes and is_compiled(schedule):
        prefixes = Prefixes.of(requests, schedule.block_size) if schedule.prefix_caching else None
        parts = loop_parts(requests, dealt, prefixes, drawn_steps(schedule, requests))
        run = replay_parts(schedule, profile, requests, parts)
    else:
        # With two sides, one may be ahead of an end that makes a request arrive at the other.
        step_by_step = schedule.traits.disaggregated
        replaying = DependentReplay(schedule, profile, requests, order, hints, step_by_step, preemption)
        for replica, own in zip(replaying.replicas, dealt, strict=False):
            replaying.run([replica], Agents(FollowingTurns.of(own.turns, own.pauses_s, own.agents)))
        run = replaying.result
    finished = np.empty(len(requests))
    for each in run.served:
        finished[each.index] = each.finish_s
    return ClosedLoop(run, full_s(dealt, finished))


def full_s(dealt: Iterable[Sessions], finished: Array) -> float:
    """Return when the first agent of any replica found no session left, from when requests finished [requests]."""
    return min(_first_idle_s(own, finished) for own in dealt)


def _first_idle_s(own: Sessions, finished: Array) -> float:
    spare = len(own.turns) - own.agents
    return float(np.sort(finished[[turns[-1] for turns in own.turns]])[spare]) if spare >= 0 else 0.0


def loop_parts(
    requests: Items[RequestLengths],
    dealt: Iterable[Sessions],
    prefixes: Prefixes | None = None,
    steps: Array | None = None,
) -> list[tuple[list[int], RequestArrays]]:
    """Return each replica's requests, with their indices in the list; a replica without sessions is left out."""
    parts = []
    for own in dealt:
        places = sorted(place for turns in own.turns for place in turns)
        if places:
            number = {place: i for i, place in enumerate(places)}
            pauses_s = [own.pauses_s[place] for place in places]
            turns = FollowingTurns.of([[number[place] for place in each] for each in own.turns], pauses_s, own.agents)
            rows = [(requests[place].input, requests[place].output) for place in places]
            inputs, outputs = np.ascontiguousarray(np.array(rows, dtype=np.float64).T)
            alike = prefixes.take(places) if prefixes else None
            taken = None if steps is None else steps[places]
            flags = np.zeros(len(places))
            part = RequestArrays(turns.arrivals, inputs, outputs, flags, alike, steps=taken, turns=turns)
            parts.append((places, part))
    return parts
