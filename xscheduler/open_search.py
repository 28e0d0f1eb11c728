"""Search a policy's control variables at an arrival rate, with the event simulator's goodput as the score.

The steady state has no queue, so its best schedules are not the best in an open system. The search may replay every
point of a policy's spaces, but replays few of them, because

* it skips spaces whose ceiling is below the best goodput so far, and points whose steady throughput is;
* one replay at just above that goodput rejects a point, usually before the replay ends;
* a few thousand requests, the same for all points, show which points deserve more requests (docs/theory.md).
"""

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload
from xscheduler.candidates import CandidateFamily, Candidates
from xscheduler.candidates import schedule as schedule_of
from xscheduler.goodput import BEYOND, LEAST_LOAD, PRECISION, Meter
from xscheduler.search_problem import SearchProblem
from xscheduler.space import Point
from xsimulator.steady.outcome import estimate_of

COARSE = (2.0, 1.24)
"""Ratios of neighbouring values on the first grid: of batches, and of the other variable.

Along the other variable goodput has several peaks (a token budget may cut prompts into two even chunks, or three).
"""
STEPS = (1.25, 1.08)
"""Ratios by which the best points' variables are then varied, one pass after the other."""
AROUND = (1.2, 1.08, 1.02)
"""Ratios by which the best schedule's variables are varied in the end, with all requests."""
COUNTS = (8000, 40_000)
"""Numbers of requests for points on the grid, and for the leading points."""
GLANCE = 1000
"""Number of requests that shows whether a schedule keeps the bounds when almost idle."""
ROUGH = 0.02
"""Precision of goodputs on the grid."""
NEAR = 0.05
"""Points whose goodput on the grid is within this share of the best are replayed again."""
CONTENDERS = 12
"""Maximum number of points that are replayed again."""
STARTS = 2
"""Number of points, different in more than their batches, around which neighbours are replayed."""
PATIENCE = 48
"""The grid search stops after this many spaces in a row, by falling ceilings, without a better point."""


@dataclass
class Lead:
    """A point, and the highest rate that it has held so far."""

    space: Candidates
    point: Point
    schedule: Schedule
    steady: float
    """Steady throughput in sequences per second."""
    goodput: float

    def beside(self, other: "Lead") -> bool:
        """Return whether the two points differ only in their batches."""
        return self.space is other.space and self.point[1:] == other.point[1:]


@dataclass
class OpenSearch:
    """A search of one policy's spaces at an arrival rate."""

    problem: SearchProblem
    members: Sequence[Candidates | CandidateFamily]
    meter: Meter
    caching: Workload | None = None
    """The workload whose prefixes are cached; None: prefixes aren't cached.

    With a workload, the spaces are those of the tokens that an unlimited prefix cache leaves to compute. They bound the
    results of the replays.
    """
    threads: int = 1
    """Number of parallel replays, where the next ones don't depend on their results."""
    opened: list[Candidates] = field(default_factory=list)
    """Spaces with replayed points."""
    _tops: dict[Candidates, int] = field(default_factory=dict)
    _schedules: dict[tuple[Candidates, Point], Schedule] = field(default_factory=dict)

    @property
    def points(self) -> int:
        """Number of points of the opened spaces whose steady state was computed."""
        return sum(len(space.sizes) for space in self.opened)

    @property
    def size(self) -> int:
        """Number of points of all spaces."""
        return sum(member.size for member in self.members)

    def exhaustive(self, count: int) -> Lead | None:
        """Return the best of all points, each replayed with `count` requests."""
        best: Lead | None = None
        for space in self._by_ceiling():
            for point in itertools.product(*(range(len(v.values)) for v in space.variables)):
                best = self._challenge(best, space, point, count, PRECISION) or best
        return best

    # ---- step 1: the grid ----

    def grid(self, floor: float = 0.0) -> list[Lead]:
        """Return the best points on coarse grids of the spaces, the best first.

        The list is empty if no point keeps the bounds even when almost idle, or if no point's rate is close to `floor`
        requests/s.
        """
        leads: list[Lead] = []
        spaces = self._by_ceiling()
        first = list(itertools.islice(spaces, PATIENCE))
        best, waited = max(floor, self._scouted(first)), 0
        for space in itertools.chain(first, spaces):
            if self._rate(space.ceiling) * BEYOND <= best or waited >= PATIENCE:
                break
            before = best
            for lead in self._grid_of(space, best):
                leads.append(lead)
                best = max(best, lead.goodput)
            waited = 0 if best > before else waited + 1
        leads.sort(key=lambda lead: -lead.goodput)
        return [lead for lead in leads if lead.goodput >= best * (1 - NEAR)][:CONTENDERS]

    def _scouted(self, spaces: list[Candidates]) -> float:
        """Return the goodput of the best of the spaces' middle points.

        One replay then rejects each worse point, wherever the best one lies in the order of ceilings.
        """
        best: Lead | None = None
        for space in spaces:
            above = best.goodput * (1 + 4 * ROUGH) if best else 0.0
            if self._rate(space.ceiling) * BEYOND <= above:
                break
            _, *others = (coarse(v.values, ratio) for v, ratio in zip(space.variables, COARSE, strict=False))
            rest = tuple(_middle_first(places)[0] for places in others)
            top = self._largest(space, rest)
            if top is not None:
                best = self._lead(space, (top, *rest), above, GLANCE, 4 * ROUGH) or best
        again = best and self._lead(best.space, best.point, best.goodput / 2, COUNTS[0], ROUGH)
        return again.goodput if again else 0.0

    def _grid_of(self, space: Candidates, best: float) -> Iterator[Lead]:
        """Yield the best batch of a coarse grid for each choice of the other variables, if above or near `best`."""
        batches, *other_values = (coarse(v.values, ratio) for v, ratio in zip(space.variables, COARSE, strict=False))
        for rest in itertools.product(*map(_middle_first, other_values)):
            lead = self._best_batch(space, batches, tuple(rest), best)
            if lead:
                best = max(best, lead.goodput)
                yield lead

    def _best_batch(self, space: Candidates, batches: list[int], rest: Point, best: float) -> Lead | None:
        """Try batches from the largest down, until even their steady throughput is lower than the best goodput.

        Goodput may stay flat before it rises. A bound on the time per token alone is kept at a low rate, or by a small
        batch at a high rate.
        """
        top, lead = self._largest(space, rest), None
        if top is None:
            return None
        for batch in sorted({top, *(b for b in batches if b < top)}, reverse=True):
            point, above = (batch, *rest), lead.goodput if lead else best * (1 - NEAR)
            if self._steady(space, point) * BEYOND <= above:
                break  # smaller batches give even less
            lead = self._lead(space, point, above * (1 + ROUGH) if lead else above, COUNTS[0], ROUGH) or lead
        return lead if self.meter.bounds.end_queues else self._saturated(space, top, rest, lead)

    def _saturated(self, space: Candidates, top: int, rest: Point, lead: Lead | None) -> Lead | None:
        """Return the largest batch that keeps the bounds with any queue length, or `lead` if that serves more."""
        low, high = -1, top
        while low < high:
            middle = (low + high + 1) // 2
            point = (middle, *rest)
            holds = self.meter.holds(self.schedule(space, point), self._steady(space, point), COUNTS[0])
            low, high = (middle, high) if holds else (low, middle - 1)
        steady = self._steady(space, (low, *rest)) if low >= 0 else 0.0
        if steady <= (lead.goodput if lead else 0.0):
            return lead
        return Lead(space, (low, *rest), self.schedule(space, (low, *rest)), steady, steady)

    def _largest(self, space: Candidates, rest: Point) -> int | None:
        """Return the index of the largest batch that fits into memory with these other variables; None if none fits.

        The first guess is the index found for the previous other variables. Memory use grows almost linearly, so the
        next guesses are extrapolated to the index at which memory is full.
        """
        values = space.variables[0].values
        budget = space.budget(space.values((0, *rest)))
        low, high = -1, len(values) - 1 if budget is None else bisect_right(values, budget) - 1
        guess, seen = self._tops.get(space, high), list[tuple[int, float]]()
        while low < high:
            guess = min(max(guess, low + 1), high)
            fits = self._fits(space, (guess, *rest))
            low, high = (guess, high) if fits else (low, guess - 1)
            seen.append((values[guess], self._fullness(space, (guess, *rest))))
            if len(seen) == 1:
                guess += 1 if fits else -1
            elif len(seen) % 6:
                guess = bisect_right(values, _full_at(*seen[-2:])) - 1
            else:
                guess = (low + high + 1) // 2
        self._tops[space] = max(low, 0)
        return low if low >= 0 else None

    def _fullness(self, space: Candidates, point: Point) -> float:
        """Return the largest share of a limit that a point uses, over the constraints that are not times."""
        return max(space.shares_of(space.values(point)))

    # ---- step 2: around the best points ----

    def refined(self, contenders: list[Lead]) -> list[Lead]:
        """Replay the grid's best points and their neighbours with more requests; return the best first."""
        leads: list[Lead] = []
        for place, lead in enumerate(contenders):
            # Few requests overestimate goodputs by several percent, most of all that of the apparent best point.
            above = max(other.goodput for other in leads) * (1 - NEAR / 4) if leads else lead.goodput * (1 - NEAR)
            if leads and place % self.threads == 1 % self.threads:
                ahead = [other.schedule for other in contenders[place : place + self.threads]]
                self.meter.look_ahead(ahead, above, COUNTS[1])
            again = self._lead(lead.space, lead.point, above, COUNTS[1], 2 * PRECISION)
            leads += [again] if again else []
        if not leads:  # the points held with few requests but not with more: search from below
            best = self._lead(contenders[0].space, contenders[0].point, 0.0, COUNTS[1], 2 * PRECISION)
            return [best] if best else []
        leads.sort(key=lambda lead: -lead.goodput)
        distant = [lead for i, lead in enumerate(leads) if not any(lead.beside(other) for other in leads[:i])]
        starts, climbed = distant[:STARTS], list[Lead]()
        for lead in starts:
            tight = self._tightened(lead)
            top = self._climbed(tight, max((other.goodput for other in climbed), default=0.0))
            climbed.append(lead if top is tight else top)  # the larger batch, if it does the same
        # A climb may follow random differences, so its starting point is measured with all requests too.
        began = [lead for lead in starts if lead not in climbed]
        return sorted(climbed + began, key=lambda lead: -lead.goodput)

    def _tightened(self, lead: Lead) -> Lead:
        """Return the lead with the smallest batch that has the same result.

        Only the neighbours of that batch behave differently. For batches that are adjusted, it is only a starting
        point: their result may differ.
        """
        verdict = self.meter.used(lead.schedule, lead.goodput, COUNTS[1])
        batches, point = lead.space.variables[0].values, lead.point
        if verdict is None:
            return lead
        for place in range(lead.point[0]):
            if batches[place] >= verdict.batch and verdict.fits(self.schedule(lead.space, (place, *point[1:]))):
                point = (place, *point[1:])
                break
        schedule, steady = self.schedule(lead.space, point), self._steady(lead.space, point)
        return replace(lead, point=point, schedule=schedule, steady=steady)

    def _climbed(self, lead: Lead, floor: float) -> Lead:
        """Move to better neighbours until there are none, in smaller steps after larger ones.

        A neighbour must exceed the lead and `floor`.
        """
        for ratio in STEPS:
            better: Lead | None = lead
            while better:
                lead, better = better, None
                bar = replace(lead, goodput=max(lead.goodput, floor))
                points = neighbours(lead.space, lead.point, ratio)
                for place, point in enumerate(points):
                    if place % self.threads == 0:
                        self._look_ahead(bar, points[place : place + self.threads])
                    better = self._challenge(bar, lead.space, point, COUNTS[1], PRECISION)
                    if better:
                        break
        return lead

    def _look_ahead(self, bar: Lead, points: Sequence[Point]) -> None:
        """Replay the points that will next challenge a lead, in parallel."""
        above = bar.goodput * (1 + PRECISION)
        fit = [p for p in points if self._fits(bar.space, p) and self._steady(bar.space, p) * BEYOND > above]
        self.meter.look_ahead([self.schedule(bar.space, point) for point in fit], above, COUNTS[1])

    def around(self, lead: Lead) -> list[Lead]:
        """Return the neighbours of a lead along one variable that may be better.

        Each gets the lead's goodput as a first value.
        """
        points = (
            point
            for ratio in AROUND
            for point in neighbours(lead.space, lead.point, ratio)
            if sum(a != b for a, b in zip(point, lead.point, strict=True)) == 1
        )
        return [
            Lead(lead.space, point, self.schedule(lead.space, point), self._steady(lead.space, point), lead.goodput)
            for point in points
            if self._fits(lead.space, point) and self._steady(lead.space, point) * BEYOND > lead.goodput
        ]

    # ---- a point ----

    def _challenge(
        self, best: Lead | None, space: Candidates, point: Point, count: int, precision: float
    ) -> Lead | None:
        """Return the point as a lead if it is better than the best by more than the precision."""
        above = best.goodput * (1 + precision) if best else 0.0
        if not self._fits(space, point) or self._steady(space, point) * BEYOND <= above:
            return None
        return self._lead(space, point, above, count, precision)

    def _lead(self, space: Candidates, point: Point, above: float, count: int, precision: float) -> Lead | None:
        """Return the point with its goodput if that is at least `above`."""
        steady = self._steady(space, point)
        if not self.meter.limit(steady) >= above:
            return None
        schedule, limit = self.schedule(space, point), self.meter.limit(steady)
        start = min(max(above, LEAST_LOAD * steady), limit)
        if above <= LEAST_LOAD * steady and not self.meter.holds(schedule, start, GLANCE):
            return None
        if not self.meter.holds(schedule, start, count):
            return None
        reached = self.meter.highest(schedule, start, limit, count, precision)
        return Lead(space, point, schedule, steady, reached)

    def schedule(self, space: Candidates, point: Point) -> Schedule:
        """Return the Schedule of a point; it is made once."""
        if (space, point) not in self._schedules:
            made = schedule_of(space, space.values(point), self.problem.limits)
            if self.caching:
                blocks, workload = self._room(space, point), self.caching.without_requests
                made = replace(made, prefix_caching=True, kv_blocks=blocks, workload=workload)
            self._schedules[space, point] = made
        return self._schedules[space, point]

    def steady(self, lead: Lead) -> Estimate:
        """Return a lead's steady state, with the blocks of its schedule."""
        space, values = lead.space, lead.space.values(lead.point)
        outcome, watched = space.outcome(values), space.where.watched()
        return estimate_of(watched, replace(outcome, demand=replace(outcome.demand, blocks=lead.schedule.kv_blocks)))

    def _room(self, space: Candidates, point: Point) -> int:
        """Return the KV blocks that memory holds: with prefix caching, all of them are used."""
        return space.where.replica.room(space.outcome(space.values(point)).demand.step)

    def _steady(self, space: Candidates, point: Point) -> float:
        """Return the steady throughput in sequences/s, or an upper bound for all smaller batches if that is higher."""
        return self._rate(space.size_of(space.values(point)).throughput)

    def _rate(self, tokens_s: float) -> float:
        return tokens_s / self.problem.load.workload.output.mean

    def _fits(self, space: Candidates, point: Point) -> bool:
        """Return whether a point meets every constraint that is not a time, and an engine accepts it."""
        values = space.values(point)
        budget = space.budget(values)
        if budget is not None and values[0] > budget:
            return False  # vLLM refuses a token budget below the number of sequences
        if self.caching and self._room(space, point) < self.meter.arrivals.most_blocks:
            return False
        return max(space.shares_of(values)) <= 1.0

    def _by_ceiling(self) -> Iterator[Candidates]:
        """Yield the spaces by falling ceilings.

        A family's spaces are made when its ceiling is next. Spaces whose queries are always late are left out.
        """
        order = itertools.count()
        bound = self.problem.limits.latency_s
        heap = [(-member.ceiling, next(order), member) for member in self.members]
        heapq.heapify(heap)
        while heap:
            *_, member = heapq.heappop(heap)
            if member.ceiling <= 0.0 or (bound is not None and member.quickest_s > bound):
                continue
            if isinstance(member, CandidateFamily):
                for space in member.spaces:
                    assert isinstance(space, Candidates)
                    heapq.heappush(heap, (-space.ceiling, next(order), space))
            else:
                self.opened.append(member)
                yield member


def _full_at(point: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the place at which a figure that is linear through two points reaches 1."""
    (value, full), (second, fuller) = point, other
    if fuller == full or math.inf in (full, fuller):
        return value
    return second + (1 - fuller) * (second - value) / (fuller - full)


def coarse(values: Sequence[int], ratio: float) -> list[int]:
    """Return the indices of values that are `ratio` times each other, including both ends; values rise or fall."""
    rising = values[0] <= values[-1]
    places = range(len(values)) if rising else range(len(values) - 1, -1, -1)
    kept: list[int] = []
    for place in places:
        if not kept or values[place] >= ratio * values[kept[-1]] or place == places[-1]:
            kept.append(place)
    return kept


def _middle_first(places: list[int]) -> list[int]:
    """Return the indices in an order in which each index halves a gap between earlier ones."""
    if len(places) < 3:
        return places
    middle = len(places) // 2
    halves = _middle_first(places[:middle]), _middle_first(places[middle + 1 :])
    both = (place for pair in itertools.zip_longest(*halves) for place in pair if place is not None)
    return [places[middle], *both]


def neighbours(space: Candidates, point: Point, ratio: float) -> list[Point]:
    """Return the points with each variable moved up or down by about a ratio, or unchanged.

    Points with the fewest changes come first.
    """
    moves = [
        (place, *(_moved(v.values, place, r) for r in (ratio, 1 / ratio)))
        for v, place in zip(space.variables, point, strict=True)
    ]
    neighbours = (p for p in dict.fromkeys(itertools.product(*moves)) if p != point)
    return sorted(neighbours, key=lambda p: sum(a != b for a, b in zip(p, point, strict=True)))


def _moved(values: Sequence[int], place: int, ratio: float) -> int:
    """Return the index of the value closest to `ratio` times this one, different from `place` if possible."""
    asked = values[place] * ratio
    rising = values[0] <= values[-1]
    step = 1 if (ratio > 1) == rising else -1
    moved = place + step
    while 0 <= moved + step < len(values) and abs(values[moved + step] - asked) <= abs(values[moved] - asked):
        moved += step
    return moved if 0 <= moved < len(values) else place
