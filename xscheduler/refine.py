"""Refine a variable between the values of the grid, around every layout's best value, until steps no longer matter.

Each space has one value of this variable. Along the token budget, throughput has a peak for each number of even chunks
that prompts are cut into. So powers of two miss the best by up to 10 %. The grid shows which layouts may be best.
Around the best value of each layout, the batch of one value is the first guess for the next, because it hardly changes.

Equal prompts that stay in step have a low TTFT only with certain budgets. Such a budget holds all decoding sequences,
and in addition a whole number of prompts or an even part of one. So batches are searched together with the matching
budget.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from xcore.policies import TRAITS
from xscheduler.candidates import Candidates
from xscheduler.exhaustive import exhaustive
from xscheduler.search import Method, SearchResult, search
from xscheduler.space import Incumbent, Space

STEPS = (1.05, 1.015)
"""Ratios of neighbouring values: one pass around the best for each ratio."""
NEAR, GAIN = 0.95, 1.12
"""A layout is refined if its best on the grid reaches NEAR times the grid's best, and the best so far divided by GAIN.

GAIN is the largest ratio that refining is expected to gain.
"""
ABOVE, BELOW = 0.06, 0.02
"""Shares of the best batch: in the end, every batch up to this far above and below it is tried.

Figures may rise and fall in steps.
"""

PARTS = (*(1 / parts for parts in (16, 12, 8, 6, 5, 4, 3, 2)), 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Numbers of prompts per iteration that are tried if equal prompts stay in step."""

AtValue = Callable[[Candidates, int], Candidates | None]
"""Returns the same space at another value of the variable; None if it doesn't fit in memory."""


def refined(
    members: Sequence[Candidates],
    name: str,
    at_value: AtValue,
    method: Method,
    tolerance: float,
    floor: float = 0.0,
    steps: Sequence[float] = STEPS,
) -> tuple[list[Candidates], SearchResult]:
    """Return the spaces of a policy, with those at more values of the variable `name`, and their best point.

    Only throughputs above `floor` are of interest.
    """
    best, added, groups = Incumbent(), list[Candidates](), _groups(members, name)
    started, in_step = time.perf_counter(), list[Candidates]()
    budgets = bool(members) and name == TRAITS[members[0].policy].name_of("tokens")
    for group in sorted(groups, key=lambda group: -group[0].ceiling):
        promising = group[0].ceiling > max(best.throughput, floor)  # the values of a group have one ceiling
        if budgets and promising and any(constraint.slack for constraint in group[0].constraints):
            in_step += _in_step(group, at_value, best, floor)
    added += [space for space in in_step if space is best.space]
    result = search(members, method, tolerance, max(best.throughput, floor / GAIN))
    if result.space:
        best.offer(result.space, result.point)
    reached = best.throughput
    for group in sorted(groups, key=lambda group: result.space not in group) if best.space else ():
        found = search(group, method, tolerance, max(NEAR * reached, best.throughput / GAIN, floor / GAIN))
        if not isinstance(found.space, Candidates):
            continue
        local = Incumbent(found.throughput, found.space, found.point)
        added += around(local, [space.constants[name] for space in group], name, at_value, steps)
        if local.throughput > best.throughput:
            best = local
    if method == "exhaustive":
        exhaustive(added, best)
    everything = [*members, *added]
    looked_at = replace(
        result.search,
        evaluations=sum(len(space.known) for space in {*everything, *in_step}),
        space=sum(space.size for space in everything),
        seconds=time.perf_counter() - started,
    )
    return everything, SearchResult(best.space, best.point, best.throughput, looked_at)


def _groups(members: Sequence[Candidates], name: str) -> list[list[Candidates]]:
    """Group the spaces that differ only in this variable, in rising order of it."""
    groups: dict[tuple[object, ...], list[Candidates]] = {}
    for space in sorted(members, key=lambda space: space.constants[name]):
        others = {key: value for key, value in space.constants.items() if key != name}
        groups.setdefault((space.where, *others.values()), []).append(space)
    return list(groups.values())


def around(best: Incumbent, grid: list[int], name: str, at_value: AtValue, steps: Sequence[float]) -> list[Candidates]:
    """Try values around the best one, then closer values, and finally every batch near the best batch.

    The lowest value tried is the second grid value below the best: peaks are narrow and close if prompts have many
    chunks. The highest is the next grid value above, or twice the last one. Returns the spaces tried.
    """
    added: dict[int, Candidates | None] = {}
    edges = [*grid, 2 * grid[-1] if len(grid) > 1 else grid[0]]
    place = grid.index(_value(best, name))
    low, high = float(edges[max(place - 2, 0)]), float(edges[place + 1])
    for ratio in steps:
        start, batch, first = best.space, best.point[0], _value(best, name)
        assert isinstance(start, Candidates)
        for step in (ratio, 1 / ratio):
            seed = start.variables[0].values[batch]
            for value in _stepped(first, step, low, high):
                if value in added or value in grid:
                    continue
                space = added[value] = at_value(start, value)
                if space:
                    seed = _follow(space, seed, best) or seed
        low, high = _value(best, name) / ratio, _value(best, name) * ratio
    _near(best)
    return [space for space in added.values() if space]


def _in_step(group: Sequence[Candidates], at_value: AtValue, best: Incumbent, floor: float) -> list[Candidates]:
    """Return new spaces for some numbers of equal prompts per iteration.

    Each has the token budget for these prompts in addition to the largest batch that keeps the bounds. Only throughputs
    above `floor` are of interest.
    """
    like, added = group[-1], list[Candidates]()
    length, batches = like.where.load.workload.input.mean, like.variables[0].values
    rows = like.where.replica.cost_model.rows  # of a decoding sequence: several with draft tokens

    def at(place: int, tokens: int) -> Candidates | None:
        space = at_value(like, rows * batches[place] + tokens)
        added.extend([space] if space else [])
        return space

    for part in PARTS:
        tokens, low, high = math.ceil(length * part), 0, len(batches) - 1
        first = at(low, tokens)
        while first and low < high and first.meets((0,)):
            middle = (low + high + 1) // 2
            space = at(middle, tokens)
            if space:
                best.offer(space, (middle,))
            if space and space.meets((middle,)):
                low = middle
            elif space and space.at((middle,)).throughput <= max(best.throughput, floor):
                break  # no smaller batch gives more
            else:
                high = middle - 1
    return added


def _value(best: Incumbent, name: str) -> int:
    assert isinstance(best.space, Candidates)
    value: int = best.space.constants[name]
    return value


def _stepped(first: int, step: float, low: float, high: float) -> Iterator[int]:
    """Yield values in steps of a ratio up or down from the first one; each step is at least 1."""
    exact = max(first * step, first + 1.0) if step > 1 else min(first * step, first - 1.0)
    while low <= exact <= high:
        yield round(exact)
        exact = max(exact * step, exact + 1.0) if step > 1 else min(exact * step, exact - 1.0)


def _follow(space: Space, seed: int, best: Incumbent) -> int | None:
    """Return the largest batch that keeps the bounds, starting from a neighbour's batch.

    Stops if the space can't be better than the best; then returns None.
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
    while high - low > 1 and space.at((high,)).throughput > best.throughput:
        middle = (low + high) // 2
        low, high = (middle, high) if space.meets((middle,)) else (low, middle)
    best.offer(space, (low,))
    return values[low]


def _below(space: Space, high: int, best: Incumbent) -> int:
    """Return a batch below `high` that keeps the bounds and may be better than the best; -1 if there is none.

    The steps double.
    """
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
    batch = space.values(best.point)[0]
    below, above = (max(2, round(share * batch)) for share in (BELOW, ABOVE))
    for place in range(max(0, point - below), min(len(space.variables[0].values), point + above + 1)):
        best.offer(space, (place,))
