"""A given list of requests: a steady state doesn't know how a list begins and ends, its replay does."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xcore.specs.profile import Profile
    from xcore.specs.workload import RequestLengths
    from xscheduler.tuned import Tuned

MOST = 4096
"""Requests of a short list: a longer one spends most of its time in the steady state."""


def checked_by(requests: "Sequence[RequestLengths]") -> str:
    """Which prediction a bound is checked against for so many requests."""
    return "steady state" if len(requests) > MOST else "replay of these requests"


def best_by_replay(answer: "Tuned", profile: "Profile", requests: "Sequence[RequestLengths]") -> "Tuned":
    """The answer with that policy's schedule as the best under which these very requests are through first, of those
    that hold the bound in their replay; where none does, the one that comes closest. A long list leaves it as it is.
    """
    from xscheduler.ties import preferred
    from xsimulator.replay.event_simulator import replay

    if answer.schedule is None or len(requests) > MOST:
        return answer
    bound_s = answer.schedule.latency_bound_s or math.inf
    ranked = []
    for alternative in answer.alternatives:
        if alternative.schedule and alternative.estimate:
            run = replay(alternative.schedule, profile, requests, timeline=False)
            late = max(0.0, (run.estimate.latency_s or 0.0) - bound_s)
            ranked.append((late, run.seconds, alternative))
    least = min(late for late, *_ in ranked)
    in_time = [entry for entry in ranked if entry[0] == least]
    best = preferred(in_time, lambda entry: 1.0 / entry[1], lambda entry: entry[2].policy)
    assert best is not None
    return replace(answer, schedule=best[2].schedule, estimate=best[2].estimate)
