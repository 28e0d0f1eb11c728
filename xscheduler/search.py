"""One door to all searches: spaces in, the best feasible point and what it cost out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from xcore.errors import InputError
from xscheduler.bnb import branch_and_bound
from xscheduler.space import Family, Incumbent, Point, Space, all_spaces, made_spaces

Method = Literal["bnb", "exhaustive", "optuna"]


@dataclass(frozen=True)
class Search:
    """What a search did."""

    method: str
    evaluations: int
    """Configurations simulated."""
    space: int
    """Configurations in all."""
    seconds: float
    replays: int = 0
    """Lists of requests that were followed event by event, to their end or until a bound was broken."""


@dataclass(frozen=True)
class SearchResult:
    """The best feasible point, where there is one."""

    space: Space | None
    point: Point
    throughput: float
    search: Search


def search(
    spaces: Sequence[Space | Family], method: Method = "bnb", tolerance: float = 0.0, floor: float = 0.0
) -> SearchResult:
    """The best feasible point of all spaces.

    `tolerance` is the share by which monotonicity may be broken; `floor` a throughput that only better points are of
    interest above, from searches made before. Raises InputError for an unknown method.
    """
    started = time.perf_counter()
    incumbent = Incumbent(floor)
    if method == "bnb":
        branch_and_bound(spaces, tolerance, incumbent)
    elif method == "exhaustive":
        from xscheduler.exhaustive import exhaustive

        exhaustive(all_spaces(spaces), incumbent)
    elif method == "optuna":
        from xscheduler.black_box import black_box

        black_box(all_spaces(spaces), incumbent)
    else:
        raise InputError(f"There is no search method '{method}': use bnb, exhaustive or optuna.")
    return SearchResult(
        incumbent.space,
        incumbent.point,
        incumbent.throughput if incumbent.space else 0.0,
        Search(
            method,
            sum(len(space.known) for space in made_spaces(spaces)),
            sum(space.size for space in spaces),
            time.perf_counter() - started,
        ),
    )
