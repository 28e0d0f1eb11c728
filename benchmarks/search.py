"""Branch and bound beside the exhaustive search and Optuna: what each one reaches, and what it costs.

Two hundred random monotone spaces, where branch and bound must be exact; then the spaces of all policies made from
profiles (rooflines, and measured ones: the demo model's where there is one, or --profile FILE), which are monotone only
nearly so.

    python -m benchmarks.search
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.spaces import LARGE, SMALL, random_space
from exegpt.builtin_models import builtin_model
from exegpt.cli.inputs import find_setting
from exegpt.cluster import parse_cluster
from exegpt.workload import task
from xprofiler.roofline import roofline_profile
from xscheduler.candidates import Limits, spaces
from xscheduler.monotonicity import violations
from xscheduler.search import Found, search
from xscheduler.space import Evaluation, Space, Variable
from xscheduler.tune import POLICIES
from xsimulator.allocation import uniform_stages
from xsimulator.scenario import Scenario

ROOFLINES = (  # model, cluster, tensor-parallel degree, task, the engine's overhead per iteration in seconds
    ("opt-13b", "4xA40", 4, "S", 0.0),
    ("opt-13b", "4xA40", 1, "T", 0.0),
    ("llama-3.1-8b", "1xH100-SXM", 1, "C1", 2e-3),
    ("gpt3-39b", "2x8xA40", 8, "G", 0.0),
)
PLACES = (0.25, 0.5, 0.75, 1.0)
"""Bounds, geometrically between the lowest latency (0) and the unbounded optimum's (1)."""
TOLERANCES = (0.0, 0.05)
MOST, ITERATIONS = 96, 160
"""Sequences and N_D up to which an exhaustive search is affordable here."""


@dataclass(frozen=True)
class Reach:
    """What one search did, summed over a case's bounds."""

    throughput: float
    """Least share of the exhaustive throughput, over the bounds."""
    simulated: float
    """Share of the points simulated."""
    evaluations: int
    seconds: float


@dataclass(frozen=True)
class Case:
    """Spaces from one profile."""

    name: str
    points: int
    bounds_s: tuple[float, ...]
    searches: dict[str, Reach]
    non_monotone: dict[str, float]
    """Tolerance → share of the neighbouring points that break the order of throughput or latency by more."""


def random_spaces(count: int) -> dict[str, Any]:
    """Exact matches, and the shares of the points simulated, over `count` spaces: half small, half large."""
    exact, simulated, points = 0, [0, 0], [0, 0]
    for seed in range(count):
        large = seed % 2
        found = search([random_space(seed, LARGE if large else SMALL)], "bnb")
        oracle = search([random_space(seed, LARGE if large else SMALL)], "exhaustive")
        exact += found.throughput == oracle.throughput
        simulated[large] += found.search.evaluations
        points[large] += found.search.space
    halves = {name: simulated[i] / points[i] for i, name in enumerate(("small", "large"))}
    return {"spaces": count, "exact": exact, "simulated": halves}


def tabulated(name: str, scenario: Scenario) -> list[Space]:
    """The spaces of every policy, each point simulated once for all searches that follow; no bound yet."""
    made: list[Space] = []
    for policy in POLICIES:
        for space in spaces(policy, scenario, Limits(latency_s=float("inf")), {}):
            variables = tuple(_shortened(v) for v in space.variables)
            table: dict[tuple[int, ...], Evaluation] = {}

            def simulate(
                at: tuple[int, ...],
                table: dict[tuple[int, ...], Evaluation] = table,
                inner: Callable[[tuple[int, ...]], Evaluation] = space.simulate,
            ) -> Evaluation:
                if at not in table:
                    table[at] = inner(at)
                return table[at]

            made.append(Space(f"{name} {space.name}", variables, space.constraints, simulate))
    return made


def _shortened(variable: Variable) -> Variable:
    most = ITERATIONS if variable.name == "decode_iterations" else MOST
    return replace(variable, values=tuple(v for v in variable.values if v <= most))


def under(bound_s: float, made: Sequence[Space]) -> list[Space]:
    """Fresh spaces with a bound on the latency."""
    return [
        replace(
            space,
            constraints=tuple(replace(c, limit=bound_s) if c.name == "latency" else c for c in space.constraints),
            known={},
        )
        for space in made
    ]


def latency(space: Space, point: tuple[int, ...]) -> float:
    """A point's latency in seconds."""
    place = [c.name for c in space.constraints].index("latency")
    return space.at(point).figures[place]


def measure(name: str, scenario: Scenario) -> Case:
    """All searches over the spaces of one scenario."""
    made = tabulated(name, scenario)
    free = search(under(float("inf"), made), "exhaustive")
    if free.space is None:
        raise SystemExit(f"{name}: nothing fits in memory")
    low, high = min(latency(space, space.lowest) for space in made), latency(free.space, free.point)
    bounds = tuple(low ** (1 - place) * max(high, low) ** place for place in PLACES)
    oracle = [search(under(bound, made), "exhaustive") for bound in bounds]
    methods: dict[str, Callable[[float], Found]] = {
        f"bnb {tolerance:.0%}": lambda bound, tolerance=tolerance: search(under(bound, made), "bnb", tolerance)  # type: ignore[misc]
        for tolerance in TOLERANCES
    }
    methods["optuna"] = lambda bound: search(under(bound, made), "optuna")
    searches = {}
    for method, find in methods.items():
        found = [find(bound) for bound in bounds]
        evaluations = sum(f.search.evaluations for f in found)
        searches[method] = Reach(
            min(f.throughput / o.throughput for f, o in zip(found, oracle, strict=True) if o.throughput),
            evaluations / sum(f.search.space for f in found),
            evaluations,
            sum(f.search.seconds for f in found),
        )
    broken = {f"{tolerance:.0%}": non_monotone(made, tolerance) for tolerance in (0.0, 0.02, 0.05)}
    return Case(name, oracle[0].search.space, bounds, searches, broken)


def non_monotone(made: Sequence[Space], tolerance: float) -> float:
    """Share of the neighbouring points, along any variable, whose throughput or latency break the order by more."""
    broken = pairs = 0.0
    for space in made:
        place = [c.name for c in space.constraints].index("latency")
        for found, variable in zip(violations(space, tolerance), space.variables, strict=True):
            count = space.size * (1 - 1 / len(variable.values))
            broken += count * max(found.throughput, found.figures[place])
            pairs += count
    return broken / pairs


def cases(directory: Path, profile: str | None) -> list[tuple[str, Scenario]]:
    """Scenarios from rooflines, and from the profile of a model directory on this machine where there is one."""
    made = []
    for name, text, tp, workload, overhead_s in ROOFLINES:
        model, cluster = builtin_model(name), parse_cluster(text)
        tables = roofline_profile(model, cluster, overhead_s=overhead_s)
        stages = uniform_stages(model, cluster, tp)
        made.append(
            (f"{name} {text} tp={tp} {workload}", Scenario(model, cluster, task(workload), tables, stages, "fp16"))
        )
    if not directory.is_dir():
        print(f"skipped: there is no model '{directory}' with measured layers; exegpt demo makes one", file=sys.stderr)
        return made
    for workload in ("S", "T"):
        setting = find_setting(str(directory), "local", workload, profile)
        stages = uniform_stages(setting.model, setting.cluster, 1)
        scenario = Scenario(setting.model, setting.cluster, setting.workload, setting.profile, stages, setting.kv_dtype)
        made.append((f"{setting.model.name} local {setting.profile.source} {workload}", scenario))
    return made


def show(exact: dict[str, Any], rows: Sequence[Case]) -> None:
    """Print the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150, highlight=False)
    small, large = (f"{exact['simulated'][half]:.1%}" for half in ("small", "large"))
    console.print(
        f"Random monotone spaces: {exact['exact']} of {exact['spaces']} optima exact; simulated {small} of the points "
        f"of the small half, {large} of the large half's."
    )
    table = Table(
        title=f"Spaces from profiles, {len(PLACES)} bounds each: least share of the exhaustive throughput (cost)"
    )
    for column in ("case", "points", *rows[0].searches, *(f"non-monotone {t}" for t in rows[0].non_monotone)):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        reached = [
            f"{r.throughput:.1%} ({r.simulated:.2%})"
            if name != "optuna"
            else f"{r.throughput:.1%} ({r.evaluations} trials, {r.seconds:.1f} s)"
            for name, r in row.searches.items()
        ]
        table.add_row(row.name, f"{row.points:,}", *reached, *(f"{share:.2%}" for share in row.non_monotone.values()))
    console.print(table)


def main() -> None:
    """Run all of it and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("exegpt-demo/model"), help="a model directory")
    parser.add_argument("--profile", help="its measured profile; by default the stored one")
    parser.add_argument("--spaces", type=int, default=200, help="random spaces")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    exact = random_spaces(args.spaces)
    rows = []
    for name, scenario in cases(args.model, args.profile):
        print(f"{name} ...", file=sys.stderr)
        rows.append(measure(name, scenario))
    if args.json:
        print(json.dumps({"random": exact, "cases": [asdict(row) for row in rows]}, indent=2))
    else:
        show(exact, rows)


if __name__ == "__main__":
    main()
