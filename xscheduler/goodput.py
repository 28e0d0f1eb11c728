"""Goodput: the highest rate of arrival that a schedule serves within all bounds, by replaying requests through it.

An open system: requests come at their own times, and latency counts from arrival, the wait before the encoding
included. A closed form has no queue, so every candidate is replayed by the event simulator.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from xcore.duration import beyond_text
from xcore.specs.estimate import Estimate
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.served import ServedColumns, summarise_columns
from xscheduler.arrivals import BATCHES, REQUESTS, Arrivals, Sample, at
from xsimulator.replay.compiled import COUNTS, COUNTS_FOR_LATENCY, Replicas, Requests, Times, Watch

Array = NDArray[np.float64]

PRECISION = 0.0025
"""Rates that differ by this share are taken as equal."""
FINE = 0.001
"""Precision of the goodput of a policy's best schedule."""
SIGMAS = 1.5
"""Standard errors by which misses must stay below what a bound allows."""
BEYOND = 1.03
"""No schedule is asked for more than this times its steady throughput: the closed form, which the replay reaches within
a few tenths of a percent on one stage.
"""
LEAST_LOAD = 0.02
"""Share of a schedule's steady throughput at which it is as good as idle."""


@dataclass(frozen=True)
class Bounds:
    """What must hold at a rate, in seconds since arrival; None: no bound."""

    latency_s: float | None
    """At the schedule's meaning of it."""
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def limits(self) -> Array:
        """[3]: of the first token, per output token, of the latency; infinite: no bound."""
        return np.array([math.inf if s is None else s for s in (self.ttft_s, self.tpot_s, self.latency_s)])

    @property
    def end_queues(self) -> bool:
        """Whether a queue that grows without end breaks one of them."""
        return self.latency_s is not None or self.ttft_s is not None

    def broken(self, estimate: Estimate) -> str:
        """The first bound that doesn't hold, with its figures; empty where all do."""
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
    """Requests per second that a schedule serves within the bounds."""

    low: float
    """What it sustains: misses stay below what the bounds allow by `SIGMAS` standard errors; 0 where the bounds don't
    hold even when it is nearly idle."""
    high: float
    """From about where on misses exceed what the bounds allow by as much. As `low` where nothing is left to chance."""


@dataclass(frozen=True)
class Verdict:
    """The result of a replay at a rate: whether the bounds held, and the most of the batch and of the blocks in use."""

    schedule: Schedule
    rate: float
    held: bool
    batch: float
    blocks: float
    excess: "Excess | None" = None
    """Whether the replay followed every request to its end."""

    def decides(self, schedule: Schedule, rate: float) -> bool:
        """Return whether a schedule with another batch and other blocks has the same result.

        It does if it has what was in use, and no more than there was. A lower rate keeps the bounds that a higher rate
        keeps.
        """
        batch, blocks = _batch(schedule), schedule.kv_blocks
        same = self.batch <= batch <= _batch(self.schedule) and self.blocks <= blocks <= self.schedule.kv_blocks
        return same and (rate <= self.rate if self.held else rate >= self.rate)

    def same(self, schedule: Schedule, rate: float) -> bool:
        """Return whether a replay of the schedule would be the same."""
        return rate == self.rate and self.decides(schedule, rate)


@dataclass
class Meter:
    """Asks the event simulator whether schedules hold the bounds at a rate; common requests for all of them."""

    profile: Profile
    arrivals: Arrivals
    bounds: Bounds
    replays: int = 0

    def __post_init__(self) -> None:
        self._replicas = Replicas(self.profile)
        self._verdicts: dict[object, list[Verdict]] = {}
        self._counting = Lock()

    def holds(self, schedule: Schedule, rate: float, count: int = REQUESTS) -> bool:
        """Return whether the first requests keep to the bounds at `rate` requests/s.

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
        """Replay schedules side by side, a thread for each, so that `holds` finds their verdicts, and where they are
        `measured` `sustains` too. Replays run without Python's lock.
        """
        if len(schedules) > 1 and all(map(self.is_kept, schedules)):
            with ThreadPoolExecutor(len(schedules)) as threads:
                list(threads.map(lambda schedule: self._verdict(schedule, rate, count, measured), schedules))

    def used(self, schedule: Schedule, rate: float, count: int) -> Verdict | None:
        """Return the most that a schedule used at a rate; None if it was not replayed at that rate."""
        return next((v for v in self._alike(schedule, count) if v.held and v.same(schedule, rate)), None)

    def excess(self, schedule: Schedule, rate: float, count: int = REQUESTS) -> "Excess":
        """By how much misses exceed what the bounds allow at a rate, every request followed to its end."""
        alike = self._alike(schedule, count)
        known = next((v.excess for v in alike if v.excess and v.same(schedule, rate)), None)
        if known is None:
            known = self._replayed(schedule, rate, count, ends=False).excess
            assert known is not None, "no bound ends it"
        return known

    def _verdict(self, schedule: Schedule, rate: float, count: int, measured: bool = False) -> Verdict:
        known = next((v for v in self._alike(schedule, count) if v.decides(schedule, rate)), None)
        return known or self._replayed(schedule, rate, count, measured=measured)

    def _alike(self, schedule: Schedule, count: int) -> list[Verdict]:
        """Verdicts on schedules that differ in batch and blocks alone."""
        if not self.is_kept(schedule):
            return []
        return self._verdicts.setdefault((*_all_but_batch(schedule), count), [])

    @staticmethod
    def is_kept(schedule: Schedule) -> bool:
        """Return whether to keep results for other batches: not where all blocks come into use."""
        return not (schedule.prefix_caching or schedule.admission == "grow")

    def _replayed(
        self, schedule: Schedule, rate: float, count: int, ends: bool = True, measured: bool = True
    ) -> Verdict:
        """A replay that `ends` when a bound is broken for certain; its excess is `measured` if it has gone on to its
        end.
        """
        sample, served = self.arrivals.sample(count, schedule.replicas, schedule.meaning), list[Times]()
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
        batch, blocks = watch.used.tolist()
        verdict = Verdict(schedule, rate, held, batch, blocks, excess)
        self._alike(schedule, count).append(verdict)
        return verdict

    def _excess(self, sample: Sample, served: list[Times], rate: float) -> "Excess":
        missed = [
            _missed(at(requests, rate), times, self.bounds.limits)
            for requests, times in zip(sample.replicas, served, strict=True)
        ]
        excesses = []
        for bound, allowed in enumerate(sample.allowed):
            parts = np.array_split(np.concatenate([counts[bound] for counts in missed]), BATCHES)
            each = np.array([part.sum() for part in parts], dtype=np.float64)
            error = math.sqrt(BATCHES) * float(each.std(ddof=1)) if self.arrivals.random else 0.0
            total = float(each.sum()) + SIGMAS * error * np.array([1.0, -1.0])
            excesses.append(np.log((np.maximum(total, 0.0) + 0.5) / (allowed + 0.5)))
        return Excess(*map(float, np.max(excesses, axis=0)))

    def _whole(self, schedule: Schedule, rate: float, count: int) -> tuple[Sample, list[Times]]:
        """Everything to its end, whatever is missed."""
        sample = self.arrivals.sample(count, schedule.replicas, schedule.meaning)
        self._count()
        served = [self._replicas.serve(schedule, at(requests, rate)) for requests in sample.replicas]
        return sample, [times for times in served if times is not None]

    def _count(self) -> None:
        with self._counting:
            self.replays += 1

    def served_at(self, schedule: Schedule, rate: float, count: int = REQUESTS) -> Estimate:
        """What requests experience at a rate (requests/s): figures since arrival, the warm-up left out."""
        sample, times = self._whole(schedule, rate, count)
        kept = [replica.flags > 0 for replica in sample.replicas]

        def column(of: "Array | list[Array]") -> Array:
            return np.concatenate([values[keep] for values, keep in zip(of, kept, strict=True)])

        requests = [at(replica, rate) for replica in sample.replicas]
        columns = ServedColumns(
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
        """The highest rate that holds, from `held` requests/s, which does, up to `limit`: steps that double, then
        bisection.
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
        """The highest rate to try for a schedule: its throughput where no bound ends a growing queue."""
        return steady_seq_s * (BEYOND if self.bounds.end_queues else 1.0)

    def goodput(
        self,
        schedule: Schedule,
        steady_seq_s: float,
        count: int = REQUESTS,
        start: float | None = None,
        precision: float = PRECISION,
    ) -> Goodput:
        """The rates between which the goodput lies, searched from `start` requests/s: a secant of the excess, and
        bisection where it is so close that chance bends it: a finer `precision` goes on behind the same replays.
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
    """Logarithms of the misses over what a bound allows, of the bound where that is most; above 0 too many miss it."""

    likely: float
    """Of `SIGMAS` standard errors more misses than there were."""
    certain: float
    """Of as many fewer."""


def _batch(schedule: Schedule) -> int:
    """Return the limits of the resident sequences and of the prompts in a step."""
    return schedule.control.batch


def _all_but_batch(schedule: Schedule) -> tuple[object, ...]:
    """Return all that decides a replay but the batch and the KV blocks."""
    variables = schedule.control.besides_batch
    return schedule.policy, schedule.stages, schedule.replicas, schedule.kv_dtype, schedule.meaning, *variables


def _between(low: float, below: float, high: float, above: float) -> float:
    """A rate between two where the excess, linear in the logarithm of the rate, should just be below 0."""
    width = math.log(high / low)
    share = below / (below - above) - 0.3 * PRECISION / width
    return low * math.exp(width * min(max(share, 0.1), 0.9))


def _crossing(seen: dict[float, Excess]) -> float:
    """The rate at which misses are too many for certain, on the line through the two rates around it or closest."""
    (rate, nearest), (other, second) = sorted(seen.items(), key=lambda item: abs(item[1].certain))[:2]
    if second.certain == nearest.certain:
        return max(rate, other)
    share = nearest.certain / (nearest.certain - second.certain)  # half at most: the nearest is nearer to 0
    return rate * math.exp(math.log(other / rate) * max(share, -2.0))


def _missed(requests: Requests, times: Times, limits: Array) -> list[Array]:
    """[3][requests]: 1 for each counting request that missed the bound, of those that it is about."""
    counts, late = requests.flags >= COUNTS, requests.flags >= COUNTS + COUNTS_FOR_LATENCY
    several = counts & (requests.outputs > 1)
    ttft, latency = times.first - requests.arrivals, times.finished - requests.arrivals
    tpot = (times.finished - times.first)[several] / (requests.outputs[several] - 1)
    return [ttft[counts] > limits[0], tpot > limits[1], latency[late] > limits[2]]


def _utilisation(schedule: Schedule, times: list[Times]) -> tuple[float, ...]:
    """Busy fractions by rank, those of the replicas that were followed for all."""
    busy = np.mean([replica.busy / replica.finished.max() for replica in times], axis=0)
    stages = sorted(range(len(schedule.stages)), key=lambda s: schedule.stages[s].devices[0])
    shares = [float(busy[s]) for s in stages for _ in schedule.stages[s].devices]
    return tuple(shares * schedule.replicas) + (0.0,) * schedule.idle
