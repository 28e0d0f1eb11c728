"""Evaluate every point of every space: the reference result for tests of the other searches."""

import itertools
from collections.abc import Iterable

from xscheduler.space import Incumbent, Space


def exhaustive(spaces: Iterable[Space], incumbent: Incumbent) -> None:
    """Evaluate all points of all spaces and leave the best feasible one in `incumbent`."""
    for space in spaces:
        for point in itertools.product(*(range(len(v.values)) for v in space.variables)):
            incumbent.offer(space, point)
