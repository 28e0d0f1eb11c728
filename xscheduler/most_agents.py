"""The largest number of agents whose turns keep the bounds with a schedule, by replays of a closed loop."""

from collections.abc import Callable
from dataclasses import dataclass

from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xscheduler.agent_sample import AgentWork
from xscheduler.loop_meter import LoopMeter
from xscheduler.search_problem import Limits

BEYOND, MOST = 64, 100_000
"""The numbers of agents that are tried: up to this factor above the one in question, and up to this number."""
PRECISION = 0.01
"""Share by which the answer may be below the largest number."""


@dataclass(frozen=True)
class MostAgents:
    """The largest number of agents that keep the bounds."""

    agents: int
    """0: not even one agent does."""
    more: bool
    """Whether more agents than were tried keep the bounds too."""


def most_agents(work: AgentWork, schedule: Schedule, profile: Profile, limits: Limits, agents: int) -> MostAgents:
    """Return the largest number of agents that keep the bounds with a schedule, searched from `agents` on."""

    def holds(count: int) -> bool:
        return not LoopMeter(profile, work.sample(count), limits).play(schedule).excess

    return largest(holds, agents, min(MOST, BEYOND * agents))


def largest(holds: Callable[[int], bool], first: int, most: int) -> MostAgents:
    """Return the largest number up to `most` that `holds`, as if all smaller ones held too."""
    low, high = 0, first
    while holds(high):
        if high == most:
            return MostAgents(high, True)
        low, high = high, min(2 * high, most)
    while high - low > max(1, int(PRECISION * low)):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return MostAgents(low, False)
