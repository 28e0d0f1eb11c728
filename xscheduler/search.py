"""Run any search method on spaces: return the best feasible point and the cost of the search."""

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
    """The cost of a search."""

    method: str
    evaluations: int
    """Number of simulated configurations."""
    space: int
    """Number of all configurations."""
    seconds: float
    replays: int = 0
    """Number of replayed lists of requests; a replay stops at its end or when a bound is broken."""


@dataclass(frozen=True)
class SearchResult:
    """The best feasible point, if there is one."""

    space: Space | None
    point: Point
    throughput: float
    search: Search


def search(
    spaces: Sequence[Space | Family], method: Method = "bnb", tolerance: float = 0.0, floor: float = 0.0
) -> SearchResult:
    """Return the best feasible point of all spaces.

    `tolerance` is the share by which monotonicity may be broken. `floor` is a throughput from earlier searches: only
    better points are of interest. Raises InputError for an unknown method.
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
