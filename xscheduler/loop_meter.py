"""The score of a schedule for agents in a closed loop: a replay of their turns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import xsimulator
from xcore.arrays import Array, Flags
from xcore.specs.estimate import Estimate
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimesColumns, bound_latency, most_together, summarise_columns
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xscheduler.agent_sample import AgentSample
from xscheduler.list_meter import Played
from xscheduler.rate_sample import WARM_UP
from xscheduler.search_problem import Limits
from xsimulator.replay.closed_loop import full_s, loop_parts
from xsimulator.replay.compiled import Replicas, RequestArrays, is_compiled
from xsimulator.replay.event_simulator import drawn_steps


@dataclass(frozen=True)
class LoopTimes:
    """The times of all turns in a closed loop, arrays [turns], and those that count."""

    columns: RequestTimesColumns
    inputs: Array
    cached: Array
    """Tokens of each prompt that were in the cache when it was first admitted."""
    busy: Array
    """[stages]: the share of the time in which the stage's devices work, in the schedule's order of stages."""
    counts: Flags
    """Turns that ended after the warm-up and before an agent found no session left."""
    seconds: float
    """Seconds in which the turns that count ended."""

    @property
    def counted(self) -> RequestTimesColumns:
        """The times of the turns that count."""
        names = RequestTimesColumns.__dataclass_fields__
        return RequestTimesColumns(*(getattr(self.columns, name)[self.counts] for name in names))

    @property
    def cached_share(self) -> float:
        """The share of the counted prompts' tokens that were found in the cache."""
        return float(self.cached[self.counts].sum() / self.inputs[self.counts].sum())


@dataclass
class LoopMeter:
    """Replays the turns of agents under schedules of one profile.

    The first tenth of the turns, at least one of each agent, finds the system emptier than later ones, and is not
    counted. Nor are the turns that end when agents have no session left.
    """

    profile: Profile
    sample: AgentSample
    limits: Limits
    fills_memory: bool = False
    at_once: bool = False

    def __post_init__(self) -> None:
        self.requests: Sequence[RequestLengths] = self.sample.requests
        self._inputs, self._outputs = np.array([(r.input, r.output) for r in self.requests], dtype=np.float64).T
        self._replicas = Replicas(self.profile)
        self._parts: dict[object, list[tuple[list[int], RequestArrays]]] = {}

    def is_fast(self, schedule: Schedule) -> bool:
        """Return whether the compiled replay covers the schedule."""
        return is_compiled(schedule)

    def together(self, replicas: int) -> int:
        """Return the number of agents of one replica."""
        return -(-self.sample.sessions.agents // replicas)

    def play(self, schedule: Schedule) -> Played:
        """Replay the turns; the score's seconds are those of a turn, at the throughput of all agents."""
        times, excess, limits = self.times(schedule), 0.0, self.limits
        counted = times.counted
        latency_s, percentile = bound_latency(counted, schedule.meaning, "arrival"), schedule.meaning.percentile
        if limits.latency_s is not None:
            excess = max(excess, latency_s / limits.latency_s - 1)
        for key, bound_s in (("ttft", limits.ttft_s), ("tpot", limits.tpot_s)):
            if bound_s is not None and (values := counted.latencies("arrival")[key]).size:
                excess = max(excess, float(np.percentile(values, percentile)) / bound_s - 1)
        seconds = times.seconds / int(times.counts.sum())
        return Played(excess, seconds, latency_s, most_together(times.columns.start_s, times.columns.finish_s))

    def estimate(self, schedule: Schedule) -> tuple[Estimate, float]:
        """Return the figures of the turns that count, and the share of their prompts found in the cache."""
        times, steady = self.times(schedule), xsimulator.estimate(schedule, self.profile)
        used = [float(share) for share, stage in zip(times.busy, schedule.stages, strict=True) for _ in stage.devices]
        busy = (*used * schedule.replicas, *[0.0] * schedule.idle)
        figures = summarise_columns(times.counted, times.seconds, schedule.meaning, steady.memory_bytes, busy)
        names = ("usable_bytes", "kv_blocks", "kv_tokens", "engine", "extrapolated")
        return replace(figures, **{name: getattr(steady, name) for name in names}), times.cached_share

    def times(self, schedule: Schedule) -> LoopTimes:
        """Replay the turns, and return their times."""
        figures, ends_s, busy = np.empty((5, len(self.requests))), 0.0, np.zeros(len(schedule.stages))
        parts = self._dealt(schedule)
        for places, part in parts:
            served = self._replicas.serve(schedule, part)
            assert served is not None, "nothing is watched"
            figures[:, places] = served.arrived, served.started, served.first, served.finished, served.hits
            ends_s, busy = max(ends_s, served.seconds), busy + served.busy
        arrived, started, first, finished, cached = figures
        sessions = self.sample.sessions
        counts, seconds = _counted(finished, full_s(sessions.dealt(schedule.replicas), finished), sessions.agents)
        columns = RequestTimesColumns(self._outputs, arrived, started, first, finished)
        return LoopTimes(columns, self._inputs, cached, busy / (ends_s * len(parts)), counts, seconds)

    def _dealt(self, schedule: Schedule) -> list[tuple[list[int], RequestArrays]]:
        """Return each replica's requests, with their places in the sample."""
        key = schedule.replicas, schedule.prefix_caching, schedule.speculation
        if key not in self._parts:
            dealt, prefixes = self.sample.sessions.dealt(schedule.replicas), self.sample.prefixes
            steps = drawn_steps(schedule, self.requests)
            self._parts[key] = loop_parts(self.requests, dealt, prefixes if schedule.prefix_caching else None, steps)
        return self._parts[key]


def _counted(finished: Array, idle_s: float, agents: int) -> tuple[Flags, float]:
    """Return which turns count, and the seconds in which they ended.

    `finished` [turns] are their ends, and at `idle_s` an agent finds no session left.
    """
    ends = np.sort(finished[finished <= idle_s])
    begin_s = ends[min(max(agents, round(WARM_UP * len(ends))), len(ends) - 1) - 1] if len(ends) > 1 else 0.0
    if begin_s >= idle_s:  # all turns ended at once
        begin_s = 0.0
    counts: Flags = (finished > begin_s) & (finished <= idle_s)
    return counts, float(idle_s - begin_s)
