"""Run any search method on spaces: return the best feasible point and the cost of the search.

Optuna is the black-box alternative that the paper names: it makes no use of monotonicity.
"""

import time
import warnings
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


def total(searches: Sequence[Search]) -> Search:
    """Return the cost of several searches by the same method."""
    return Search(
        searches[0].method,
        sum(search.evaluations for search in searches),
        sum(search.space for search in searches),
        sum(search.seconds for search in searches),
        sum(search.replays for search in searches),
    )


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
        if spaces:
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


TRIALS = 200


def black_box(spaces: list[Space], incumbent: Incumbent) -> None:
    """Search all spaces together with a limited number of trials and leave the best feasible point in `incumbent`."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: "optuna.Trial") -> float:
        space = spaces[trial.suggest_int("space", 0, len(spaces) - 1)]
        point = tuple(
            trial.suggest_int(f"{space.name}.{v.name}", 0, len(v.values) - 1) if len(v.values) > 1 else 0
            for v in space.variables
        )
        incumbent.offer(space, point)
        evaluated = space.at(point)
        excess = [f - c.limit for f, c in zip(evaluated.figures, space.constraints, strict=True)]
        trial.set_user_attr("excess", [max(min(e, 1e30), -1e30) for e in excess] + [0.0] * (most - len(excess)))
        return evaluated.throughput

    most = max(len(space.constraints) for space in spaces)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Optuna 5 recommends another API, which Optuna 4 lacks
        sampler = optuna.samplers.TPESampler(seed=0, constraints_func=lambda trial: trial.user_attrs["excess"])
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=min(TRIALS, sum(space.size for space in spaces)))
