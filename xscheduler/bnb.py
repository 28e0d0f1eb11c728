"""Monotone branch and bound over integer boxes (paper Algorithm 1; docs/theory.md)."""

import heapq
import itertools
from collections.abc import Sequence
from math import inf

from xscheduler.space import Constraint, Family, Incumbent, Point, Space

Box = tuple[Point, Point]
"""The lowest and the highest corner, both included."""


def boxes(space: Space) -> list[Box]:
    """Return boxes that cover a space, cut at the first variable's peaks."""
    (lowest, *low), (highest, *high) = space.lowest, space.highest
    ends = (*(peak for peak in space.variables[0].peaks if lowest <= peak < highest), highest)
    begins = (lowest, *(end + 1 for end in ends[:-1]))
    return [((begin, *low), (end, *high)) for begin, end in zip(begins, ends, strict=True)]


def branch_and_bound(
    members: Sequence[Space | Family], tolerance: float, incumbent: Incumbent, most: float = inf
) -> None:
    """Search all spaces and leave the best feasible point in `incumbent`; stop after about `most` evaluations.

    `tolerance` is the share by which neighbours may break monotonicity: a box is kept while its bounds are within it.
    If throughput isn't trusted to rise along a variable, boxes are first cut to single values of it. Until then only
    their constraints can prune them. The paper's listing loops forever on boxes of one point and never tries a lowest
    corner. Here both cases are handled when a box is made.
    """
    queue: list[tuple[float, int, Space | Family, Box | None]] = []
    order = itertools.count()

    def add(space: Space, box: Box) -> None:
        low, high = box
        # The lowest corner can prove a box infeasible, the highest corner too slow: the likelier test comes first.
        if not incumbent.throughput and _excluded(space, box, tolerance):
            return
        bound = _bound(space, box)
        if bound * (1 + tolerance) <= incumbent.throughput or _excluded(space, box, tolerance):
            return
        incumbent.offer(space, high)
        incumbent.offer(space, low)  # already evaluated, and the better corner if the box is not quite monotone
        if low == high or _ends_alone(box) or (tolerance == 0 and not _uncertain(space, box) and _crowned(space, box)):
            return  # nothing in the box is better than its corners
        heapq.heappush(queue, (-bound, next(order), space, box))

    def put(members: Sequence[Space | Family]) -> None:
        """Queue members: a space or family is opened only when its ceiling is the best bound in the queue."""
        for member in members:
            heapq.heappush(queue, (-member.ceiling, next(order), member, None))

    put(members)
    evaluations = 0
    while queue and evaluations < most:
        bound, _, space, box = heapq.heappop(queue)
        known = 0 if isinstance(space, Family) else len(space.known)
        if -bound * (1 + tolerance) <= incumbent.throughput:
            return  # best bound first: no remaining box can be better
        if isinstance(space, Family):
            put(space.spaces)
        elif box is None:
            for part in boxes(space):
                add(space, part)
        else:
            for half in _split(space, box, incumbent):
                add(space, half)
        evaluations += 0 if isinstance(space, Family) else len(space.known) - known


def _ends_alone(box: Box) -> bool:
    """Return whether a box of one variable has no points except its ends."""
    (first, *others), (last, *_) = box
    return not others and last - first <= 1


def _uncertain(space: Space, box: Box) -> list[int]:
    """Return the variables that the box spans and along which throughput can't be trusted to rise."""
    return [k for k, v in enumerate(space.variables) if not v.throughput_rises and box[0][k] < box[1][k]]


def _bound(space: Space, box: Box) -> float:
    """Return a throughput that no point of the box exceeds."""
    if _uncertain(space, box):
        return space.ceiling
    highest = space.at(box[1])
    return min(max(highest.throughput, highest.best_below), space.ceiling)


def _lowest(box: Box, constraint: Constraint) -> Point:
    """Return the corner of a box where a constraint's figure is lowest."""
    return tuple(low if up else high for low, high, up in zip(*box, constraint.rises, strict=True))


def _excluded(space: Space, box: Box, tolerance: float) -> bool:
    """Return whether a constraint fails even at the corner with its lowest figure."""
    for number, constraint in enumerate(space.constraints):
        if constraint.never_meets(space.at(_lowest(box, constraint)).figures[number], tolerance):
            return True
    return False


def _crowned(space: Space, box: Box) -> bool:
    """Return whether a corner is the best point of the box.

    The lowest corner is best if throughput falls from there. The highest is best if it meets the bounds.
    """
    low, high = space.at(box[0]), space.at(box[1])
    return low.no_better_above or (high.best_below <= high.throughput and space.meets(box[1]))


def _split(space: Space, box: Box, incumbent: Incumbent) -> tuple[Box, Box]:
    """Cut the box in two across the variable that the paper's heuristic picks.

    The heuristic compares the highest corner's neighbours along an edge, each with one variable at its lowest value. It
    picks the feasible neighbour with the highest throughput, or the longest side if none is feasible. Variables along
    which throughput isn't trusted come first. The halves of a line share their common point, so each cut evaluates one.
    """
    low, high = box
    if len(low) == 1:
        half = ((low[0] + high[0]) // 2,)
        return (low, half), (half, high)
    sides = _uncertain(space, box)[:1] or [k for k in range(len(low)) if high[k] > low[k]]
    best, axis = 0.0, max(sides, key=lambda k: high[k] - low[k])
    if len(sides) > 1:
        for k in sides:
            corner = (*high[:k], low[k], *high[k + 1 :])
            incumbent.offer(space, corner)
            if space.meets(corner) and space.at(corner).throughput > best:
                best, axis = space.at(corner).throughput, k
    middle = (low[axis] + high[axis]) // 2
    lower = (low, (*high[:axis], middle, *high[axis + 1 :]))
    upper = ((*low[:axis], middle + 1, *low[axis + 1 :]), high)
    return lower, upper
