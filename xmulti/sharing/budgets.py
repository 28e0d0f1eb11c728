"""Budgets: how many devices each of several models gets alone, so that each meets its own bound at its own rate.

A model's frontier is its performance on each number of devices. More devices are never worse. So each model has a
smallest budget for a level that all models should reach. A level can be reached exactly if these budgets fit on the
nodes together. The best level is found by bisection over the values that occur in the frontiers.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """A model's performance on a number of devices."""

    devices: int
    headroom: float = math.inf
    """Goodput within its bound / rate, at least 1 if the rate is sustained; infinite for a model without a rate."""
    seconds: float = 0.0
    """Seconds until its requests are done.

    0 for a model without a number of requests, infinite if the model doesn't fit.
    """


Frontier = Sequence[Budget]
"""By rising devices; headroom rises, and seconds fall, along it. Not empty."""


@dataclass(frozen=True)
class Level:
    """A level that all models should reach.

    Criteria in this order: rates sustained, last model done early, high headroom.
    """

    headroom: float
    seconds: float

    def least(self, frontier: Frontier) -> Budget | None:
        """Return the budget with the fewest devices on which a model reaches the level; None if there is none."""
        reached = (b for b in frontier if b.headroom >= self.headroom and b.seconds <= self.seconds)
        return next(reached, None)


@dataclass(frozen=True)
class Budgets:
    """Each model's budget, and its devices: whole nodes, or some of one node."""

    budgets: tuple[Budget, ...]
    devices: tuple[tuple[int, ...], ...]

    @property
    def level(self) -> Level:
        """The level that all models reach."""
        return Level(min(b.headroom for b in self.budgets), max(b.seconds for b in self.budgets))


def rising(budgets: Sequence[Budget]) -> Frontier:
    """Return a frontier of measured budgets.

    A budget that is worse than a smaller one is replaced by the smaller one; extra devices stay idle.
    """
    frontier: list[Budget] = []
    for budget in sorted(budgets, key=lambda b: b.devices):
        before = frontier[-1] if frontier else budget
        better = budget.headroom > before.headroom or budget.seconds < before.seconds
        worse = budget.headroom < before.headroom or budget.seconds > before.seconds
        if not frontier or (better and not worse):
            frontier.append(budget)
    return frontier


def best_budgets(frontiers: Sequence[Frontier], nodes: int, devices_per_node: int) -> Budgets | None:
    """Return the budgets of the best level, with as few devices as possible.

    Return None if the models don't fit all at once.
    """

    def reach(headroom: float, seconds: float) -> Budgets | None:
        least = [Level(headroom, seconds).least(frontier) for frontier in frontiers]
        budgets = [budget for budget in least if budget]
        placed = place([b.devices for b in budgets], nodes, devices_per_node) if len(budgets) == len(least) else None
        return Budgets(tuple(budgets), placed) if placed else None

    every = [budget for frontier in frontiers for budget in frontier]
    shares = sorted({min(1.0, budget.headroom) for budget in every})
    share = _highest(shares, lambda value: reach(value, _finite(every)) is not None)
    if share is None:
        return None
    times = sorted({budget.seconds for budget in every if budget.seconds < math.inf}, reverse=True)
    seconds = _highest(times, lambda value: reach(share, value) is not None)
    assert seconds is not None, "the longest time is that of the share"
    highs = sorted({budget.headroom for budget in every if budget.headroom >= share})
    headroom = _highest(highs, lambda value: reach(value, seconds) is not None)
    assert headroom is not None, "the share itself is one of them"
    return reach(headroom, seconds)


Search = Callable[[list[tuple[int, int]]], list["Budget | None"]]
"""The performance of models, by index, on numbers of devices; None where a model can't run."""


class Unsearched:
    """Frontiers that are searched only for numbers of devices that may be best.

    An unsearched number of devices counts with an upper estimate: the performance on the next larger searched number,
    and at most `OPTIMISM` times the proportional result of a smaller one. The best budgets under these estimates are
    then searched. The search ends when all of these budgets are known, or when the known level is within `TOLERANCE` of
    the level that others could reach.
    """

    OPTIMISM = 1.1
    """Replicas scale with their number; more devices for each may scale slightly better."""
    TOLERANCE = 0.03

    def __init__(
        self, models: int, search: Search, nodes: int, devices_per_node: int, sizes: Sequence[int] | None = None
    ):
        """Set up the frontiers; `sizes` are the possible sizes of a budget (None: all)."""
        self._search, self._nodes, self._each = search, nodes, devices_per_node
        self._sizes = sizes or counts(nodes, devices_per_node)
        self._known: list[dict[int, Budget]] = [{} for _ in range(models)]
        self.searched = 0
        """Numbers of devices searched so far."""

    def best(self, progress: Callable[[int, int], None]) -> Budgets | None:
        """Return the best budgets; None if the models don't all fit, with any performance."""
        while True:
            hoped = best_budgets([self._hoped(i) for i in range(len(self._known))], self._nodes, self._each)
            if hoped is None:
                return None
            known = self._best_known()
            if known and _near(known.level, hoped.level, self.TOLERANCE):
                return known
            unknown = [(i, b.devices) for i, b in enumerate(hoped.budgets) if b.devices not in self._known[i]]
            if not unknown:
                return hoped
            progress(self.searched, self.searched + len(unknown))
            self._find(unknown)

    def least(self, i: int) -> int | None:
        """Return the fewest devices on which a model can run; None if there are none. Searches if necessary."""
        for devices in self._sizes:
            if devices not in self._known[i]:
                self._find([(i, devices)])
            if self._does(self._known[i][devices]):
                return devices
        return None

    def _find(self, unknown: list[tuple[int, int]]) -> None:
        self.searched += len(unknown)
        for (i, devices), found in zip(unknown, self._search(unknown), strict=True):
            self._known[i][devices] = found or Budget(devices, 0.0, math.inf)

    def _does(self, budget: Budget) -> bool:
        return budget.headroom > 0 and budget.seconds < math.inf

    def _best_known(self) -> Budgets | None:
        frontiers = [rising(list(known.values())) for known in self._known]
        return best_budgets(frontiers, self._nodes, self._each) if all(frontiers) else None

    def _hoped(self, i: int) -> Frontier:
        return rising([self._at_most(i, devices) for devices in self._sizes])

    def _at_most(self, i: int, devices: int) -> Budget:
        known = self._known[i]
        if devices in known:
            return known[devices]
        headroom, seconds = math.inf, 0.0
        for other, budget in known.items():
            if other > devices:
                headroom, seconds = min(headroom, budget.headroom), max(seconds, budget.seconds)
            elif self._does(budget):
                more = self.OPTIMISM * devices / other
                headroom, seconds = min(headroom, budget.headroom * more), max(seconds, budget.seconds / more)
        return Budget(devices, headroom, seconds)


def _near(level: Level, other: Level, tolerance: float) -> bool:
    """Return whether a level is as good as another one, within a tolerance."""
    short = min(1.0, other.headroom) - min(1.0, level.headroom)
    slower = level.seconds - other.seconds * (1 + tolerance)
    return short <= 0 and slower <= 0 and level.headroom >= other.headroom * (1 - tolerance)


def _finite(budgets: Sequence[Budget]) -> float:
    """Return the longest finite time."""
    return max((b.seconds for b in budgets if b.seconds < math.inf), default=0.0)


def _highest(values: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """Return the last value that holds, if holding is monotone; None if none does."""
    low, high = -1, len(values) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(values[middle]) else (low, middle - 1)
    return values[low] if low >= 0 else None


def counts(nodes: int, devices_per_node: int) -> list[int]:
    """Return the possible sizes of a budget."""
    return [*range(1, devices_per_node + 1), *(k * devices_per_node for k in range(2, nodes + 1))]


def place(sizes: Sequence[int], nodes: int, devices_per_node: int) -> tuple[tuple[int, ...], ...] | None:
    """Return devices for budgets of these sizes, each within one node or in whole nodes; None if they don't fit."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    free, chosen = [devices_per_node] * nodes, dict[int, list[int]]()

    def fill(place_in_order: int) -> bool:
        if place_in_order == len(order):
            return True
        budget = order[place_in_order]
        size = sizes[budget]
        if size > devices_per_node:
            whole = [node for node in range(nodes) if free[node] == devices_per_node][: -(-size // devices_per_node)]
            tries = [whole] if len(whole) * devices_per_node >= size else []
        else:  # nodes with equal room are equivalent
            alike = {free[node]: [node] for node in reversed(range(nodes)) if free[node] >= size}
            tries = [alike[room] for room in sorted(alike)]
        for taken in tries:
            each = min(size, devices_per_node)
            for node in taken:
                free[node] -= each
            chosen[budget] = taken
            if fill(place_in_order + 1):
                return True
            for node in taken:
                free[node] += each
        return False

    if not fill(0):
        return None
    return _numbered(sizes, chosen, nodes, devices_per_node)


def _numbered(
    sizes: Sequence[int], chosen: dict[int, list[int]], nodes: int, devices_per_node: int
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of budgets whose nodes are chosen, numbered through the cluster."""
    rest = [itertools.count(node * devices_per_node) for node in range(nodes)]
    devices = []
    for budget, size in enumerate(sizes):
        each = min(size, devices_per_node)
        devices.append(tuple(next(rest[node]) for node in chosen[budget] for _ in range(each)))
    return tuple(devices)
