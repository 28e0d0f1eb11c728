"""Every point of every space: the oracle that the other searches are held against."""

import itertools
from collections.abc import Iterable

from xscheduler.space import Incumbent, Space


def exhaustive(spaces: Iterable[Space], incumbent: Incumbent) -> None:
    """The best feasible point of all spaces, left in `incumbent`."""
    for space in spaces:
        for point in itertools.product(*(range(len(v.values)) for v in space.variables)):
            incumbent.offer(space, point)
