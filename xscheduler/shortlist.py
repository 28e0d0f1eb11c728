"""Rank schedules for a given list of requests: a replay covers how the list begins and ends, a steady state doesn't."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xcore.specs.profile import Profile
    from xcore.specs.workload import RequestLengths
    from xscheduler.tuned import Tuned

MOST = 4096
"""Maximum number of requests of a short list: a longer one spends most of its time in the steady state."""


def checked_by(requests: "Sequence[RequestLengths]") -> str:
    """Return the name of the prediction that a bound is checked against, for this many requests."""
    return "steady state" if len(requests) > MOST else "replay of these requests"


def best_by_replay(answer: "Tuned", profile: "Profile", requests: "Sequence[RequestLengths]") -> "Tuned":
    """Return the answer with the best schedule by replay: the one that completes these requests first.

    Only schedules that keep the bound in their replay count; if none does, the closest one is best. A long list leaves
    the answer unchanged.
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
