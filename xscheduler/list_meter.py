"""The score of a schedule for a finite list of requests: a replay of that very list."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimesColumns, bound_latency, most_together
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xcore.traces.prefixes import Prefixes
from xscheduler.search_problem import Limits
from xsimulator.replay.compiled import EventTimes, Replicas, RequestArrays, dealt, is_compiled
from xsimulator.replay.event_simulator import Replay, in_turn, replay
from xsimulator.replay.watch import Watch


@dataclass(frozen=True, order=True)
class Played:
    """The result of a replay of the list; a smaller one is better."""

    excess: float
    """The largest excess of a time over its bound, as a share of the bound; 0: all bounds hold."""
    seconds: float
    """Seconds until the last request is completed."""
    latency_s: float
    """The latency in the schedule's meaning of the bound."""
    together: int = field(default=0, compare=False)
    """Most sequences that run at a time, over all replicas."""
    blocks: int = field(default=0, compare=False)
    """Most KV blocks that one replica uses; 0: unknown."""


class ReplayMeter(Protocol):
    """Scores schedules by replays of the same requests."""

    requests: Sequence[RequestLengths]
    at_once: bool
    """Whether all requests arrive at the start, and the cache may be as small as they need."""
    fills_memory: bool
    """Whether schedules use all of the memory for their cache, to keep prefixes."""

    def is_fast(self, schedule: Schedule) -> bool:
        """Return whether the compiled replay covers the schedule."""

    def play(self, schedule: Schedule) -> Played:
        """Replay the requests."""

    def together(self, replicas: int) -> int:
        """Return the most requests that one of several replicas has at a time."""


@dataclass
class ListMeter:
    """Replays one list of requests under schedules of one profile."""

    profile: Profile
    requests: Sequence[RequestLengths]
    limits: Limits
    prompts: Sequence[Sequence[int]] | None = None
    """Tokens of the prompts, which show their common prefixes."""
    replays: int = 0
    fills_memory: bool = False

    def __post_init__(self) -> None:
        self._replicas = Replicas(self.profile)
        self._dealt: dict[tuple[int, bool], list[RequestArrays]] = {}
        self.at_once = not any(request.arrival_s > 0 for request in self.requests)

    def is_fast(self, schedule: Schedule) -> bool:
        """Return whether the compiled replay covers the schedule."""
        return is_compiled(schedule) and (self.at_once or in_turn(schedule, self.requests))

    def play(self, schedule: Schedule) -> Played:
        """Replay the list."""
        self.replays += 1
        if not self.is_fast(schedule):
            run = self.replayed(schedule)
            return self._played(schedule, RequestTimesColumns.of(run.served), run.seconds, 0)
        watch, parts = Watch.nothing(), self._parts(schedule)
        served = [self._replicas.serve(schedule, requests, watch) for requests in parts]
        columns, seconds = _joined(parts, served)
        return self._played(schedule, columns, seconds, int(watch.used[1]))

    def together(self, replicas: int) -> int:
        """Return the number of requests of one replica."""
        return -(-len(self.requests) // replicas)

    def replayed(self, schedule: Schedule) -> Replay:
        """Replay the list, and return the times of each request."""
        prompts = self.prompts if schedule.prefix_caching else None
        return replay(schedule, self.profile, self.requests, timeline=False, prompts=prompts)

    def _parts(self, schedule: Schedule) -> list[RequestArrays]:
        key = schedule.replicas, schedule.prefix_caching
        if key not in self._dealt:
            prefixes = self._prefixes(schedule.block_size) if schedule.prefix_caching else None
            self._dealt[key] = [requests for _, requests in dealt(self.requests, schedule.replicas, prefixes)]
        return self._dealt[key]

    def _prefixes(self, block_size: int) -> Prefixes | None:
        if self.prompts is None:
            return Prefixes.of(self.requests, block_size)
        return Prefixes.of_texts(self.prompts, block_size)

    def _played(self, schedule: Schedule, columns: RequestTimesColumns, seconds: float, blocks: int) -> Played:
        since, limits, percentile = "start" if self.at_once else "arrival", self.limits, schedule.meaning.percentile
        latency_s, excess = bound_latency(columns, schedule.meaning, since), 0.0
        if limits.latency_s is not None:
            excess = max(excess, latency_s / limits.latency_s - 1)
        for key, bound_s in (("ttft", limits.ttft_s), ("tpot", limits.tpot_s)):
            if bound_s is not None and (times := columns.latencies(since)[key]).size:
                excess = max(excess, float(np.percentile(times, percentile)) / bound_s - 1)
        return Played(excess, seconds, latency_s, most_together(columns.start_s, columns.finish_s), blocks)


def _joined(parts: Sequence[RequestArrays], served: Sequence[EventTimes | None]) -> tuple[RequestTimesColumns, float]:
    """Return the requests' times over all replicas, and the seconds until all work is done."""
    times = [each for each in served if each is not None]
    assert len(times) == len(parts), "nothing is watched"
    columns = RequestTimesColumns(
        np.concatenate([requests.outputs for requests in parts]),
        np.concatenate([requests.arrivals for requests in parts]),
        np.concatenate([each.started for each in times]),
        np.concatenate([each.first for each in times]),
        np.concatenate([each.finished for each in times]),
    )
    return columns, max(each.seconds for each in times)
