"""Goodput: the highest rate of arrival that a schedule serves within all bounds, by replaying requests through it.

An open system: requests come at their own times, and latency counts from arrival, the wait before the encoding
included. A closed form knows no queue, so every candidate is followed by the event simulator.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exegpt.duration import beyond_text
from exegpt.errors import InputError
from exegpt.estimate import Estimate
from exegpt.profile import Profile
from exegpt.quantity import figure_text
from exegpt.schedule import Schedule
from exegpt.served import summarise
from exegpt.trace import with_poisson_arrivals
from exegpt.workload import RequestLengths, Workload
from xscheduler.tuned import Alternative, Tuned
from xsimulator.replay import replay

REQUESTS = 3000
"""Requests that are replayed: enough that the 99th percentile stands still to a few percent."""
FEW = 500
"""Fewer requests say little about a 99th percentile."""
WARM_UP = 0.1
"""Share of the first requests that find the system emptier than it will be, and are not counted."""
RUNGS = 3
"""Latency bounds, from the lowest reachable to the asked one, whose best schedules are candidates."""
PRECISION = 0.01
"""Rates that differ by this share are taken as equal."""
_MEANING = {
    "p99-length": "of the requests whose outputs are the longest 2%, 95% meet it",
    "p99-queries": "99% of all requests meet it",
}
_LEAST_LOAD = 0.02
"""Share of a schedule's steady throughput at which it is as good as idle."""


@dataclass(frozen=True)
class Arrivals:
    """Requests that arrive at one per second on average, to be quickened."""

    requests: tuple[RequestLengths, ...]

    def at(self, rate: float) -> tuple[RequestLengths, ...]:
        """The same requests at `rate` per second."""
        return tuple(replace(r, arrival_s=r.arrival_s / rate) for r in self.requests)

    @staticmethod
    def poisson(workload: Workload, context: int | None, seed: int = 0, count: int = REQUESTS) -> "Arrivals":
        """Requests of the workload, arriving independently (stretched: a few thousand miss their rate by percents)."""
        drawn = workload.draw(count, seed, context)
        return _stretched(with_poisson_arrivals(drawn, 1.0, seed))

    @staticmethod
    def traced(workload: Workload, context: int | None) -> "Arrivals":
        """The first requests of the workload's list in the pattern in which they came, bursts and lulls. The list
        must have arrivals; InputError where its first requests come all at once.
        """
        assert workload.requests
        first = sorted(workload.requests, key=lambda r: r.arrival_s)[:REQUESTS]
        return _stretched([r if context is None else r.clipped(context) for r in first])


def _stretched(requests: Sequence[RequestLengths]) -> Arrivals:
    """Requests in order of arrival, from 0 on and at one per second on average."""
    begin, end = requests[0].arrival_s, requests[-1].arrival_s
    if end <= begin:
        raise InputError(f"The first {len(requests)} requests arrive all at once: pass Poisson arrivals with --rate.")
    times = (len(requests) - 1) / (end - begin)
    return Arrivals(tuple(replace(r, arrival_s=(r.arrival_s - begin) * times) for r in requests))


@dataclass(frozen=True)
class Bounds:
    """What must hold at a rate, in seconds since arrival; None: no bound."""

    latency_s: float | None
    """At the schedule's meaning of it."""
    ttft_s: float | None = None
    """On the 99th percentile."""
    tpot_s: float | None = None
    """On the 99th percentile."""

    def broken(self, estimate: Estimate) -> str:
        """The first bound that doesn't hold, with its figures; empty where all do."""
        for name, limit, figure in (
            ("latency", self.latency_s, estimate.latency_s),
            ("time to first token", self.ttft_s, estimate.ttft_p99_s),
            ("time per output token", self.tpot_s, estimate.tpot_p99_s),
        ):
            if limit is not None and figure is not None and figure > limit:
                return f"its {name} is {beyond_text(figure, limit)}"
        return ""


@dataclass(frozen=True)
class Sustained:
    """What a schedule serves within the bounds."""

    schedule: Schedule
    steady: Estimate
    """With as many requests waiting as can be served."""
    goodput_seq_s: float
    """0 where the bounds don't hold even when it is nearly idle."""
    broken: str
    """What doesn't hold at a slightly higher rate; empty where nothing but the steady throughput ends it."""


@dataclass(frozen=True)
class Rated:
    """The answer at a rate of arrival."""

    tuned: Tuned
    """Estimates are replays at the rate; a policy that can't sustain it has none."""
    rate_seq_s: float
    sustained: dict[str, Sustained]
    """Every policy's best, as far as one was found under the bound."""

    @property
    def highest_rate_seq_s(self) -> float:
        """The highest rate that any schedule sustains."""
        return max((s.goodput_seq_s for s in self.sustained.values()), default=0.0)


def _few(arrivals: Arrivals) -> str:
    """A warning for so few requests that their 99th percentile is but one of them."""
    return "; so few say little about percentiles: pass a longer trace" if len(arrivals.requests) < FEW else ""


def served_at(schedule: Schedule, profile: Profile, arrivals: Arrivals, rate: float) -> Estimate:
    """What requests experience at a rate (requests/s): figures since arrival, the warm-up left out."""
    done = replay(schedule, profile, arrivals.at(rate), timeline=False)
    first = round(WARM_UP * len(done.served))
    kept = [s for s in done.served if s.index >= first]
    since = min(s.arrival_s for s in kept)
    seconds = max(s.finish_s for s in kept) - since
    found = summarise(kept, seconds, schedule.bound, utilisation=done.estimate.utilisation)
    return replace(found, latency_from="arrival")


def goodput(
    schedule: Schedule, steady: Estimate, profile: Profile, arrivals: Arrivals, bounds: Bounds, start: float
) -> Sustained:
    """The highest rate within the bounds, up to the steady throughput, searched from `start` requests/s."""
    broken = ""

    def holds(rate: float) -> bool:
        nonlocal broken
        found = bounds.broken(served_at(schedule, profile, arrivals, rate))
        broken = found or broken
        return not found

    low, high = _LEAST_LOAD * steady.throughput_seq_s, steady.throughput_seq_s
    start = min(max(start, low), high)
    if holds(start):
        low = start
        if start == high or holds(high):
            return Sustained(schedule, steady, high, "")
    else:
        least, low = low, start / 2
        while not holds(low):
            if low <= least:
                return Sustained(schedule, steady, 0.0, broken)
            low /= 2
        high = 2 * low
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return Sustained(schedule, steady, low, broken)


def best_of(
    candidates: Sequence[tuple[Schedule, Estimate]], profile: Profile, arrivals: Arrivals, bounds: Bounds, rate: float
) -> Sustained:
    """The candidate with the highest goodput; one that fails at a better one's rate is not looked at further."""
    best: Sustained | None = None
    for schedule, steady in sorted(candidates, key=lambda c: -c[1].throughput_seq_s):
        if best is None or not best.goodput_seq_s:
            best = goodput(schedule, steady, profile, arrivals, bounds, rate)
            continue
        better = best.goodput_seq_s * (1 + PRECISION)
        if steady.throughput_seq_s <= better:
            break  # they come by falling steady throughput
        if not bounds.broken(served_at(schedule, profile, arrivals, better)):
            best = goodput(schedule, steady, profile, arrivals, bounds, better)
    assert best is not None
    return best


Search = Callable[[float | None, bool], Tuned]
"""Finds the best schedules under a latency bound in seconds, and with True the lowest latency."""


def tune_at(
    search: Search,
    profile: Profile,
    arrivals: Arrivals,
    bounds: Bounds,
    rate: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    wider: Search | None = None,
) -> Rated:
    """The schedule with the highest goodput among the best ones under several latency bounds.

    `wider` searches without the bounds on first and further tokens, which schedules that miss them when full may keep
    at the rate.
    """
    under = search(bounds.latency_s, True)
    found = [under, *(search(bound, False) for bound in _ladder(under))]
    if wider:
        free = wider(bounds.latency_s, True)
        found += [free, *(wider(bound, False) for bound in _ladder(free))]
    candidates: dict[str, list[tuple[Schedule, Estimate]]] = {}
    for tuned in found:
        for a in tuned.alternatives:
            if a.schedule and a.estimate:
                schedule = replace(a.schedule, latency_bound_s=bounds.latency_s)
                own = candidates.setdefault(a.policy, [])
                if all(schedule != other for other, _ in own):
                    own.append((schedule, a.estimate))
    sustained = {}
    for number, (policy, own) in enumerate(candidates.items()):
        progress(number, len(candidates))
        sustained[policy] = best_of(own, profile, arrivals, bounds, rate)
    alternatives = tuple(
        _alternative(sustained[a.policy], profile, arrivals, rate) if a.policy in sustained else a
        for a in under.alternatives
    )
    winner = max(
        (a for a in alternatives if a.estimate),
        key=lambda a: (
            _rounded(sustained[a.policy].goodput_seq_s),
            -(a.estimate.latency_s or 0.0) if a.estimate else 0.0,
        ),
        default=None,
    )
    searches = [tuned.search for tuned in found]
    total = replace(
        under.search,
        evaluations=sum(s.evaluations for s in searches),
        seconds=sum(s.seconds for s in searches),
    )
    said = (
        *(text for text in under.assumptions if not text.startswith("bound:")),  # of candidates, since their start
        *(f"bound: {_MEANING[own[0][0].bound]}, counted from arrival" for own in [*candidates.values()][:1]),
        f"arrivals: {figure_text(rate, 6)}/s, an open system: latency counts from arrival, and figures are measured by "
        f"the event simulator over {len(arrivals.requests)} requests, the first {WARM_UP:.0%} left out{_few(arrivals)}",
        "goodput: the highest rate within all bounds, to 1%, and never above the steady throughput",
    )
    schedule, estimate = (winner.schedule, winner.estimate) if winner else (None, None)
    answer = Tuned(schedule, estimate, alternatives, total, under.lowest_latency_s, said)
    return Rated(answer, rate, sustained)


def _rounded(rate: float) -> float:
    """Rates within the precision are equal."""
    return round(math.log(rate) / PRECISION) if rate else -math.inf


def _ladder(under: Tuned) -> list[float]:
    """Bounds from just above the lowest reachable latency to below that of the best schedule under the asked bound."""
    if under.estimate is None or under.estimate.latency_s is None or under.lowest_latency_s is None:
        return []
    low, high = 1.1 * under.lowest_latency_s, under.estimate.latency_s
    return np.geomspace(low, high, RUNGS + 1)[:-1].tolist() if low < high else []


def _alternative(sustained: Sustained, profile: Profile, arrivals: Arrivals, rate: float) -> Alternative:
    """A policy's best at the asked rate."""
    schedule, reached = sustained.schedule, sustained.goodput_seq_s
    steady = sustained.steady
    why = sustained.broken or f"its steady throughput ends it, limited by {steady.binding}"
    if reached < rate * (1 - PRECISION):
        if not reached:
            return Alternative(schedule.policy, None, None, f"sustains no rate: nearly idle, {sustained.broken}")
        return Alternative(schedule.policy, None, None, f"sustains {figure_text(reached)}/s at most; beyond, {why}")
    estimate = replace(
        served_at(schedule, profile, arrivals, rate),
        memory_bytes=steady.memory_bytes,
        binding="latency" if sustained.broken else steady.binding,
        extrapolated=steady.extrapolated,
        latency_tail_s=None,
    )
    return Alternative(schedule.policy, schedule, estimate, f"sustains {figure_text(reached)}/s; beyond, {why}")
