"""Token budgets between those of the grid: around the best one of every layout, in steps that no longer matter.

Throughput has a peak along the budget for each number of even chunks that prompts are cut into, so that powers of two
miss the best by up to a tenth. The grid shows which layouts may be best; around each one's budget the batch is followed
from one budget to the next, for it hardly changes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from xscheduler.candidates import Candidates
from xscheduler.exhaustive import exhaustive
from xscheduler.search import Method, SearchResult, search
from xscheduler.space import Incumbent, Space

STEPS = (1.05, 1.015)
"""Ratios of neighbouring budgets, one pass around the best after the other."""
NEAR = 0.93
"""Layouts are looked at whose best on the grid reaches this share of the best of all."""
AROUND = 0.06
"""Share of the best batch within which every batch is tried at last: figures may rise and fall by steps."""

AtBudget = Callable[[Candidates, int], Candidates | None]
"""The space like another one at another budget; None where memory holds none."""


def refined(
    members: Sequence[Candidates], result: SearchResult, at_budget: AtBudget, method: Method, tolerance: float
) -> tuple[list[Candidates], SearchResult]:
    """The spaces of a policy with those at more budgets, and the best point of all of them."""
    best, added = Incumbent(result.throughput, result.space, result.point), []
    started = time.perf_counter()
    for group in _groups(members) if best.space else ():
        found = search(group, method, tolerance, NEAR * result.throughput)
        if not isinstance(found.space, Candidates):
            continue
        local = Incumbent(found.throughput, found.space, found.point)
        added += _around(local, [budget_of(space) for space in group], at_budget)
        if local.throughput > best.throughput:
            best = local
    if method == "exhaustive":
        exhaustive(added, best)
    everything, cost = [*members, *added], result.search
    looked_at = replace(
        cost,
        evaluations=sum(len(space.known) for space in everything),
        space=cost.space + sum(space.size for space in added),
        seconds=cost.seconds + time.perf_counter() - started,
    )
    return everything, SearchResult(best.space, best.point, best.throughput, looked_at)


def budget_of(space: Candidates) -> int:
    """The tokens of an iteration at most."""
    tokens: int = space.constants["max_num_batched_tokens"]
    return tokens


def _groups(members: Sequence[Candidates]) -> list[list[Candidates]]:
    """Spaces that differ in their budgets alone, these rising."""
    groups: dict[tuple[object, object], list[Candidates]] = {}
    for space in sorted(members, key=budget_of):
        groups.setdefault((space.where, space.constants["admission"]), []).append(space)
    return list(groups.values())


def _around(best: Incumbent, grid: list[int], at_budget: AtBudget) -> list[Candidates]:
    """Look at budgets between the grid's neighbours of the best one, then closer around the best, and at last at every
    batch near its batch; the spaces that were looked at.
    """
    added: list[Candidates] = []
    place = grid.index(_budget(best))
    low, high = float(grid[max(place - 1, 0)]), float(grid[min(place + 1, len(grid) - 1)])
    for ratio in STEPS:
        start, batch = best.space, best.point[0]
        assert isinstance(start, Candidates)
        for step in (ratio, 1 / ratio):
            seed, budget = start.variables[0].values[batch], budget_of(start) * step
            while low <= budget <= high:
                space = at_budget(start, round(budget))
                if space:
                    added.append(space)
                    seed = _follow(space, seed, best) or seed
                budget *= step
        low, high = _budget(best) / ratio, _budget(best) * ratio
    _near(best)
    return added


def _budget(best: Incumbent) -> int:
    assert isinstance(best.space, Candidates)
    return budget_of(best.space)


def _follow(space: Space, seed: int, best: Incumbent) -> int | None:
    """The largest batch from a neighbour's on that keeps to the bounds, as far as it may be better than the best; None
    where it isn't.
    """
    values = space.variables[0].values
    low, high = -1, min(max(seed - values[0], 0), len(values) - 1)
    step = 1
    while space.meets((high,)):  # up, in steps that double
        low, high, step = high, min(high + step, len(values) - 1), 2 * step
        if low == high:
            break
    if low < 0:
        low = _below(space, high, best)
        if low < 0:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if space.meets((middle,)) else (low, middle)
    best.offer(space, (low,))
    return values[low]


def _below(space: Space, high: int, best: Incumbent) -> int:
    """A batch below one that keeps to the bounds and may be better than the best, in steps that double; -1 for none."""
    step = 1
    while high > 0:
        high = max(high - step, 0)
        if space.at((high,)).throughput <= best.throughput:
            return -1
        if space.meets((high,)):
            return high
        step *= 2
    return -1


def _near(best: Incumbent) -> None:
    """Try every batch around the best one."""
    space, point = best.space, best.point[0]
    assert space is not None
    reach = max(2, round(AROUND * space.values(best.point)[0]))
    for place in range(max(0, point - reach), min(len(space.variables[0].values), point + reach + 1)):
        best.offer(space, (place,))
