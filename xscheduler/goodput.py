"""Goodput: the highest arrival rate that a schedule serves within all bounds, measured by replaying requests.

The system is open: requests arrive at their own times. Latency counts from arrival, so it includes the wait before
prefill. A closed form has no queue, so the event simulator replays every candidate.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np

from xcore.arrays import Array
from xcore.duration import beyond_text
from xcore.policies.adjustment import fewest_chosen
from xcore.specs.estimate import Estimate
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimesColumns, summarise_columns
from xcore.specs.schedule import Schedule
from xscheduler.rate_sample import BATCHES, REQUESTS, Arrivals, Sample, at
from xsimulator.replay.compiled import COUNTS, COUNTS_FOR_LATENCY, EventTimes, Replicas, RequestArrays
from xsimulator.replay.watch import Watch

PRECISION = 0.0025
"""Rates that differ by less than this share count as equal."""
FINE = 0.001
"""Precision of the goodput of a policy's best schedule."""
SIGMAS = 1.5
"""Number of standard errors by which misses must stay below what a bound allows."""
BEYOND = 1.03
"""No schedule is tried above this multiple of its steady throughput.

The steady throughput is the closed form. The replay reaches it within a few tenths of a percent on one stage.
"""
LEAST_LOAD = 0.02
"""Share of a schedule's steady throughput at which the schedule is almost idle."""


@dataclass(frozen=True)
class RateBounds:
    """Bounds that must hold at a rate, in seconds since arrival; None: no bound."""

    latency_s: float | None
    """Bound on the latency, in the schedule's meaning of the bound."""
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def limits(self) -> Array:
        """The limits [3] on the first token, the time per output token and the latency; infinite: no bound."""
        return np.array([math.inf if s is None else s for s in (self.ttft_s, self.tpot_s, self.latency_s)])

    @property
    def end_queues(self) -> bool:
        """Whether an endlessly growing queue breaks one of the bounds."""
        return self.latency_s is not None or self.ttft_s is not None

    def broken(self, estimate: Estimate) -> str:
        """Return the first bound that doesn't hold, with its figures; empty if all hold."""
        for name, limit, figure in (
            ("latency", self.latency_s, estimate.latency_s),
            ("time to first token", self.ttft_s, estimate.ttft_bounded_s),
            ("time per output token", self.tpot_s, estimate.tpot_bounded_s),
        ):
            if limit is not None and figure is not None and figure > limit:
                return f"its {name} is {beyond_text(figure, limit)}"
        return ""


@dataclass(frozen=True)
class Goodput:
    """The requests per second that a schedule serves within the bounds."""

    low: float
    """The sustained rate: misses stay `SIGMAS` standard errors below what the bounds allow.

    0 if the bounds don't hold even when the schedule is almost idle.
    """
    high: float
    """About the rate from which misses exceed what the bounds allow by `SIGMAS` standard errors.

    Equal to `low` if the measurement involves no randomness.
    """


@dataclass(frozen=True)
class Verdict:
    """The result of a replay at a rate: whether the bounds held, and the peak use of the batch and of the KV blocks."""

    schedule: Schedule
    rate: float
    held: bool
    batch: float
    blocks: float
    candidates: float = 0.0
    """The most requests that an adjusted batch was chosen from."""
    excess: "Excess | None" = None
    """The excess of misses; None if it wasn't measured or the replay stopped before the end of every request."""

    def fits(self, schedule: Schedule) -> bool:
        """Return whether a schedule has the batch and blocks of the peak use, and no more than the replayed one."""
        return self.batch <= _batch(schedule) <= _batch(self.schedule) and self._has_blocks(schedule)

    def decides(self, schedule: Schedule, rate: float) -> bool:
        """Return whether a schedule with another batch and other blocks has the same result.

        It does if they fit. An adjusted batch is no upper limit: it must be the same, or so large that all candidates
        are always chosen with either batch. A lower rate keeps the bounds that a higher rate keeps.
        """
        if schedule.adjust is None:
            same = self.fits(schedule)
        else:
            alike = schedule.control == self.schedule.control
            fewest = fewest_chosen(min(_batch(schedule), _batch(self.schedule)))
            same = (alike or self.candidates <= fewest) and self._has_blocks(schedule)
        return same and (rate <= self.rate if self.held else rate >= self.rate)

    def _has_blocks(self, schedule: Schedule) -> bool:
        return self.blocks <= schedule.kv_blocks <= self.schedule.kv_blocks

    def same(self, schedule: Schedule, rate: float) -> bool:
        """Return whether a replay of the schedule would be the same."""
        return rate == self.rate and self.decides(schedule, rate)


@dataclass
class Meter:
    """Measures with the event simulator whether schedules keep the bounds at a rate, with the same requests for all."""

    profile: Profile
    arrivals: Arrivals
    bounds: RateBounds
    replays: int = 0

    def __post_init__(self) -> None:
        self._replicas = Replicas(self.profile)
        self._verdicts: dict[object, list[Verdict]] = {}
        self._counting = Lock()

    def holds(self, schedule: Schedule, rate: float, count: int = REQUESTS) -> bool:
        """Return whether the first requests keep the bounds at `rate` requests/s.

        Stops as soon as they cannot. Known results of equivalent schedules are not replayed again.
        """
        return self._verdict(schedule, rate, count).held

    def sustains(self, schedule: Schedule, rate: float, count: int = REQUESTS) -> bool:
        """Return whether misses stay below the allowed share by `SIGMAS` standard errors.

        Stops as soon as they cannot.
        """
        verdict = self._verdict(schedule, rate, count, measured=True)
        return verdict.held and self.excess(schedule, rate, count).likely <= 0

    def look_ahead(self, schedules: Sequence[Schedule], rate: float, count: int, measured: bool = False) -> None:
        """Replay schedules in parallel, one thread each, so that `holds` finds their verdicts.

        If they are `measured`, `sustains` finds them too. Replays run without Python's lock.
        """
        if len(schedules) > 1 and all(map(self.is_kept, schedules)):
            with ThreadPoolExecutor(len(schedules)) as threads:
                list(threads.map(lambda schedule: self._verdict(schedule, rate, count, measured), schedules))

    def used(self, schedule: Schedule, rate: float, count: int) -> Verdict | None:
        """Return the verdict with a schedule's peak use at a rate; None if no replay at that rate kept the bounds."""
        alike = (v for v in self._alike(schedule, count) if v.held and v.same(schedule, rate))
        return next((replace(v, schedule=schedule) for v in alike), None)

    def excess(self, schedule: Schedule, rate: float, count: int = REQUESTS) -> "Excess":
        """Return by how much misses exceed what the bounds allow at a rate, with every request replayed to its end."""
        alike = self._alike(schedule, count)
        known = next((v.excess for v in alike if v.excess and v.same(schedule, rate)), None)
        if known is None:
            known = self._replayed(schedule, rate, count, ends=False).excess
            assert known is not None, "no bound limits a growing queue"
        return known

    def _verdict(self, schedule: Schedule, rate: float, count: int, measured: bool = False) -> Verdict:
        known = next((v for v in self._alike(schedule, count) if v.decides(schedule, rate)), None)
        return known or self._replayed(schedule, rate, count, measured=measured)

    def _alike(self, schedule: Schedule, count: int) -> list[Verdict]:
        """Return the verdicts on schedules that differ only in batch and blocks."""
        if not self.is_kept(schedule):
            return []
        return self._verdicts.setdefault((*_all_but_batch(schedule), count), [])

    @staticmethod
    def is_kept(schedule: Schedule) -> bool:
        """Return whether to keep results for other batches: not if the schedule uses all available blocks."""
        return not (schedule.prefix_caching or schedule.admission == "grow")

    def _replayed(
        self, schedule: Schedule, rate: float, count: int, ends: bool = True, measured: bool = True
    ) -> Verdict:
        """Replay the requests; with `ends`, stop when a bound is certain to be broken.

        The excess is `measured` if the replay reaches its end.
        """
        sample, served = self.arrivals.sample(count, schedule.replicas, schedule.meaning), list[EventTimes]()
        watch = Watch(self.bounds.limits, sample.allowed if ends else np.full(3, math.inf), np.zeros(3))
        for requests in sample.replicas:
            times = self._replicas.serve(schedule, at(requests, rate), watch)
            if times is None:
                break
            served.append(times)
        self._count()
        whole = len(served) == len(sample.replicas)
        excess = self._excess(sample, served, rate) if measured and whole else None
        held = whole and bool((watch.missed <= sample.allowed).all())
        batch, blocks, candidates = watch.used.tolist()
        verdict = Verdict(schedule, rate, held, min(batch, _batch(schedule)), blocks, candidates, excess)
        self._alike(schedule, count).append(verdict)
        return verdict

    def _excess(self, sample: Sample, served: list[EventTimes], rate: float) -> "Excess":
        missed = [
            missed_bounds(at(requests, rate), times.first, times.finished, self.bounds.limits)
            for requests, times in zip(sample.replicas, served, strict=True)
        ]
        return excess_of(missed, sample.allowed, self.arrivals.random)

    def _whole(self, schedule: Schedule, rate: float, count: int) -> tuple[Sample, list[EventTimes]]:
        """Replay every request to its end, even if bounds are missed."""
        sample = self.arrivals.sample(count, schedule.replicas, schedule.meaning)
        self._count()
        served = [self._replicas.serve(schedule, at(requests, rate)) for requests in sample.replicas]
        return sample, [times for times in served if times is not None]

    def _count(self) -> None:
        with self._counting:
            self.replays += 1

    def served_at(self, schedule: Schedule, rate: float, count: int = REQUESTS) -> Estimate:
        """Return the figures of the requests at a rate (requests/s), counted from arrival, without the warm-up."""
        sample, times = self._whole(schedule, rate, count)
        kept = [replica.flags > 0 for replica in sample.replicas]

        def column(of: "Array | list[Array]") -> Array:
            return np.concatenate([values[keep] for values, keep in zip(of, kept, strict=True)])

        requests = [at(replica, rate) for replica in sample.replicas]
        columns = RequestTimesColumns(
            column([replica.outputs for replica in requests]),
            column([replica.arrivals for replica in requests]),
            column([replica.started for replica in times]),
            column([replica.first for replica in times]),
            column([replica.finished for replica in times]),
        )
        seconds = float(columns.finish_s.max() - columns.arrival_s.min())
        summary = summarise_columns(columns, seconds, schedule.meaning, utilisation=_utilisation(schedule, times))
        share = schedule.replicas / len(times)
        return replace(
            summary,
            throughput_seq_s=share * summary.throughput_seq_s,
            throughput_tok_s=share * summary.throughput_tok_s,
            latency_from="arrival",
        )

    def highest(self, schedule: Schedule, held: float, limit: float, count: int, precision: float) -> float:
        """Return the highest rate that holds, between `held` requests/s, which holds, and `limit`.

        The steps double until a rate fails; then bisection follows.
        """
        low, high, step = held, math.inf, 4 * precision
        while high == math.inf:
            if low >= limit:
                return limit
            rate = min(low * (1 + step), limit)
            if self.holds(schedule, rate, count):
                low, step = rate, min(2 * step, 1.0)
            else:
                high = rate
        while high > low * (1 + precision):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.holds(schedule, middle, count) else (low, middle)
        return low

    def limit(self, steady_seq_s: float) -> float:
        """Return the highest rate to try for a schedule: its throughput if no bound ends a growing queue."""
        return steady_seq_s * (BEYOND if self.bounds.end_queues else 1.0)

    def goodput(
        self,
        schedule: Schedule,
        steady_seq_s: float,
        count: int = REQUESTS,
        start: float | None = None,
        precision: float = PRECISION,
    ) -> Goodput:
        """Return the rates between which the goodput lies, searched from `start` requests/s.

        The search uses a secant of the excess. Near the goodput, where randomness bends the excess, it uses bisection.
        A finer `precision` repeats the same replays and then continues.
        """
        limit, least = self.limit(steady_seq_s), LEAST_LOAD * steady_seq_s
        seen: dict[float, Excess] = {}
        low, high, rate, step = 0.0, math.inf, min(start or limit, limit), 0.015
        while high > low * (1 + precision):
            excess = seen[rate] = self.excess(schedule, rate, count)
            if excess.likely <= 0:
                low = rate
            else:
                high = rate
            if low >= limit:
                return Goodput(limit, limit)
            if high <= least:
                return Goodput(0.0, 0.0)
            if low and high <= low * (1 + PRECISION):
                rate = math.sqrt(low * high)
            elif low and high < math.inf:
                rate = _between(low, seen[low].likely, high, seen[high].likely)
            else:
                rate = min(low * (1 + step), limit) if low else max(high * (1 - step), least)
                step = min(2 * step, 0.5)
        return Goodput(low, min(max(_crossing(seen), low), limit))


@dataclass(frozen=True)
class Excess:
    """The logarithm of misses over allowed misses, for the bound where it is highest; above 0: too many misses."""

    likely: float
    """With `SIGMAS` standard errors more misses than measured."""
    certain: float
    """With `SIGMAS` standard errors fewer misses than measured."""


def _batch(schedule: Schedule) -> int:
    """Return the limit of the resident sequences, or of the prompts of a batch; 0: no limit."""
    return schedule.control.batch


def _all_but_batch(schedule: Schedule) -> tuple[object, ...]:
    """Return everything that determines a replay, except the batch and the KV blocks."""
    numbers = schedule.replicas, schedule.kv_dtype, schedule.meaning, schedule.adjust
    return schedule.policy, schedule.stages, *numbers, *schedule.control.besides_batch


def _between(low: float, below: float, high: float, above: float) -> float:
    """Return a rate between two rates at which the excess should be just below 0.

    The excess is taken as linear in the logarithm of the rate.
    """
    width = math.log(high / low)
    share = below / (below - above) - 0.3 * PRECISION / width
    return low * math.exp(width * min(max(share, 0.1), 0.9))


def _crossing(seen: dict[float, Excess]) -> float:
    """Return the rate from which there are certainly too many misses.

    It lies on the line through the two rates around it, or the two closest ones.
    """
    (rate, nearest), (other, second) = sorted(seen.items(), key=lambda item: abs(item[1].certain))[:2]
    if second.certain == nearest.certain:
        return max(rate, other)
    share = nearest.certain / (nearest.certain - second.certain)  # at most half: `nearest` is closer to 0
    return rate * math.exp(math.log(other / rate) * max(share, -2.0))


def excess_of(missed: "Sequence[list[Array]]", allowed: Array, random: bool) -> Excess:
    """Return the excess of the misses of several replicas' requests over the `allowed` misses of each bound [3].

    With `random` arrivals, the misses of parts of the requests in a row give the standard error.
    """
    excesses = []
    for bound, most in enumerate(allowed):
        parts = np.array_split(np.concatenate([counts[bound] for counts in missed]), BATCHES)
        each = np.array([part.sum() for part in parts], dtype=np.float64)
        error = math.sqrt(BATCHES) * float(each.std(ddof=1)) if random else 0.0
        total = float(each.sum()) + SIGMAS * error * np.array([1.0, -1.0])
        excesses.append(np.log((np.maximum(total, 0.0) + 0.5) / (most + 0.5)))
    return Excess(*map(float, np.max(excesses, axis=0)))


def missed_bounds(requests: RequestArrays, first: Array, finished: Array, limits: Array) -> list[Array]:
    """Return 1 for each counted request that missed a bound, [3][requests that the bound applies to].

    `first` and `finished` [requests] are the times of the first and the last token.
    """
    counts, late = requests.flags >= COUNTS, requests.flags >= COUNTS + COUNTS_FOR_LATENCY
    several = counts & (requests.outputs > 1)
    ttft, latency = first - requests.arrivals, finished - requests.arrivals
    tpot = (finished - first)[several] / (requests.outputs[several] - 1)
    return [ttft[counts] > limits[0], tpot > limits[1], latency[late] > limits[2]]


def _utilisation(schedule: Schedule, times: list[EventTimes]) -> tuple[float, ...]:
    """Return the busy fractions by rank; the followed replicas stand for all replicas."""
    busy = np.mean([replica.busy / replica.finished.max() for replica in times], axis=0)
    stages = sorted(range(len(schedule.stages)), key=lambda s: schedule.stages[s].devices[0])
    shares = [float(busy[s]) for s in stages for _ in schedule.stages[s].devices]
    return tuple(shares * schedule.replicas) + (0.0,) * schedule.idle
