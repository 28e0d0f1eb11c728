"""Turns of a number of agents: those of a trace's sessions, or drawn from a workload."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from xcore.specs.schedule import BLOCK_SIZE
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.prefixes import Prefixes
from xcore.traces.sessions import drawn_sessions
from xsimulator.replay.closed_loop import Sessions

LEAST_TURNS, TURNS_PER_AGENT, SESSIONS_PER_AGENT = 1000, 10, 2
"""Least turns of a sample: in all, and of each agent; least sessions of each agent."""


def drawn_for(
    workload: Workload, agents: int, turns: int, seed: int, longest: int | None
) -> tuple[RequestLengths, ...]:
    """Draw the sessions of `turns` turns that keep agents busy; none is longer than `longest` tokens."""
    least = max(LEAST_TURNS, TURNS_PER_AGENT * agents)
    count = max(-(-least // turns), SESSIONS_PER_AGENT * agents)
    return drawn_sessions(workload, count, turns, seed, longest)


@dataclass(frozen=True, eq=False)
class AgentSample:
    """The turns of agents, enough to keep them busy for a while."""

    requests: tuple[RequestLengths, ...]
    sessions: Sessions
    prefixes: Prefixes | None
    """The prefixes that prompts share; None: no shared prefixes."""

    @property
    def mean_pause_s(self) -> float:
        """The mean seconds from the end of an agent's last turn to the next one."""
        return fmean(self.sessions.pauses_s)


@dataclass(frozen=True, eq=False)
class AgentWork:
    """The work of agents: the sessions of a list of requests, of which any number of agents gets a sample.

    A sample with more sessions than there are repeats them, with new texts.
    """

    requests: tuple[RequestLengths, ...]
    turns: tuple[tuple[int, ...], ...]
    """The requests of each session by index, one after the other."""
    pauses_s: tuple[float, ...]
    """[requests]: seconds from the end of the agent's last request to this one's arrival."""
    _samples: dict[int, AgentSample] = field(default_factory=dict, repr=False)

    def sample(self, agents: int) -> AgentSample:
        """Return the first sessions, as many as keep the agents busy; they are taken once for the same number."""
        if agents not in self._samples:
            self._samples[agents] = self._taken(agents)
        return self._samples[agents]

    def _taken(self, agents: int) -> AgentSample:
        chosen, least = list[Sequence[int]](), max(LEAST_TURNS, TURNS_PER_AGENT * agents)
        count = len(self.requests)
        while len(chosen) < SESSIONS_PER_AGENT * agents or least > 0:
            first = len(chosen) // len(self.turns) * count
            chosen.append([first + place for place in self.turns[len(chosen) % len(self.turns)]])
            least -= len(chosen[-1])
        places = sorted(place for session in chosen for place in session)
        number = {place: i for i, place in enumerate(places)}
        turns = tuple(tuple(number[place] for place in session) for session in chosen)
        rows = tuple(self.requests[place % count] for place in places)
        sessions = Sessions(turns, tuple(self.pauses_s[place % count] for place in places), agents)
        alike = self.prefixes and self.prefixes.repeated(places[-1] + 1).take(places)
        return AgentSample(rows, sessions, alike)

    @functools.cached_property
    def prefixes(self) -> Prefixes | None:
        """The prefixes that prompts share; None: no shared prefixes."""
        return Prefixes.of(self.requests, BLOCK_SIZE)
