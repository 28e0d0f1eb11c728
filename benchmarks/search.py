"""Branch and bound beside the exhaustive search and Optuna: what each one reaches, and what it costs.

Two hundred random monotone spaces, where branch and bound must be exact; then the spaces of all policies made from
profiles (rooflines, and measured ones: the demo model's where there is one, or --profile FILE), which are monotone only
nearly so. With `--points N` instead the ExeGPT paper's scenarios, each policy whose space has at most N points, under
three bounds and none, with the roofline's tables and with 2 % of noise in them.

    python -m benchmarks.search
    python -m benchmarks.search --points 1000000
    python -m benchmarks.search --points 1000000 --oracle 10
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.monotonicity import violations
from benchmarks.spaces import LARGE, SMALL, random_space
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.profile import LayerTables, Profile, Table
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.search import SearchResult, search
from xscheduler.search_problem import Limits, SearchProblem
from xscheduler.settings import find_setting
from xscheduler.space import Evaluation, Space, Variable, all_spaces
from xscheduler.spaces import POLICIES, spaces
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady.load import Load

ROOFLINES: tuple[tuple[str, str, str, float, dict[str, int]], ...] = (
    ("opt-13b", "4xA40", "S", 0.0, {"replicas": 1, "tp_degree": 4}),
    ("opt-13b", "4xA40", "T", 0.0, {"replicas": 1, "tp_degree": 1}),
    ("llama-3.1-8b", "1xH100-SXM", "C1", 2e-3, {}),
    ("gpt3-39b", "2x8xA40", "G", 0.0, {"replicas": 1, "tp_degree": 8, "tp_gpus": 16}),
)
"""Model, cluster, task, the engine's overhead per iteration in seconds, fixed variables."""
PAPER = (  # model, cluster, tasks: the paper's figures 6 and 8
    ("t5-11b", "8xA40", "S T C1"),
    ("opt-13b", "4xA40", "S T C1"),
    ("gpt3-39b", "2x8xA40", "S T C1"),
    ("gpt3-101b", "2x8xA100-80GB", "S T C1 G C2"),
    ("gpt3-175b", "2x8xA100-80GB", "G C1 C2"),
    ("gpt3-175b", "4x8xA40", "G C1 C2"),
    ("gpt3-341b", "6x8xA40", "G C1 C2"),
)
PAPER_POLICIES = ("rra", "waa-c", "waa-m")
NOISE = 0.02
PLACES = (0.25, 0.5, 0.75, 1.0)
"""Bounds, geometrically between the lowest latency (0) and the unbounded optimum's (1)."""
METHODS = ("bnb 0%", "bnb 5%", "optuna")
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
        pruned = search([random_space(seed, LARGE if large else SMALL)], "bnb")
        oracle = search([random_space(seed, LARGE if large else SMALL)], "exhaustive")
        exact += pruned.throughput == oracle.throughput
        simulated[large] += pruned.search.evaluations
        points[large] += pruned.search.space
    halves = {name: simulated[i] / points[i] for i, name in enumerate(("small", "large"))}
    return {"spaces": count, "exact": exact, "simulated": halves}


@dataclass
class Tabulated:
    """The spaces of some policies, each point simulated once for all searches and bounds."""

    cost_model: CostModel
    load: Load
    policies: tuple[str, ...]
    fixed: dict[str, int]
    shortened: bool
    """Whether batches and N_D end where an exhaustive search of everything is affordable."""
    tables: dict[tuple[int, tuple[int, ...]], Evaluation] = field(default_factory=dict)

    def under(self, bound_s: float) -> list[Space]:
        """Fresh spaces with a bound on the latency, and the ceilings that go with it."""
        question = SearchProblem(self.cost_model, self.load, Limits(latency_s=bound_s), self.fixed)
        fresh = [space for policy in self.policies for space in all_spaces(spaces(policy, question))]
        return [self._tabulated(number, space) for number, space in enumerate(fresh)]

    def _tabulated(self, number: int, space: Space) -> Space:
        def simulate(at: tuple[int, ...]) -> Evaluation:
            if (number, at) not in self.tables:
                self.tables[number, at] = space.simulate(at)
            return self.tables[number, at]

        variables = tuple(_shortened(v) for v in space.variables) if self.shortened else space.variables
        return Space(f"{space.name}-{number}", variables, space.constraints, simulate, space.ceiling)


def _shortened(variable: Variable) -> Variable:
    most = ITERATIONS if variable.name == "decode_iterations" else MOST
    return replace(variable, values=tuple(v for v in variable.values if v <= most))


def latency(space: Space, point: tuple[int, ...]) -> float:
    """A point's latency in seconds."""
    place = [c.name for c in space.constraints].index("latency")
    return space.at(point).figures[place]


def measure(name: str, scenario: Tabulated, methods: Sequence[str], oracle: str = "exhaustive") -> Case:
    """All searches over the spaces of one scenario; `methods` are tolerances of branch and bound, or optuna, and
    `oracle` is the one that they are held against.
    """
    unbounded = scenario.under(float("inf"))
    free = _found(oracle, unbounded)
    if free.space is None:
        raise SystemExit(f"{name}: nothing fits in memory")
    low, high = min(latency(space, space.lowest) for space in unbounded), latency(free.space, free.point)
    bounds = tuple(low ** (1 - place) * max(high, low) ** place for place in PLACES)
    optima = [_found(oracle, scenario.under(bound)) for bound in bounds]
    searches = {}
    for method in methods:
        results = [_found(method, scenario.under(bound)) for bound in bounds]
        evaluations = sum(f.search.evaluations for f in results)
        searches[method] = Reach(
            min(f.throughput / o.throughput for f, o in zip(results, optima, strict=True) if o.throughput),
            evaluations / sum(f.search.space for f in results),
            evaluations,
            sum(f.search.seconds for f in results),
        )
    counted_out = (0.0, 0.02, 0.05) if oracle == "exhaustive" else ()
    broken = {f"{tolerance:.0%}": non_monotone(unbounded, tolerance) for tolerance in counted_out}
    return Case(name, free.search.space, bounds, searches, broken)


def _found(method: str, spaces_searched: list[Space]) -> SearchResult:
    if method == "optuna":
        return search(spaces_searched, "optuna")
    if method == "exhaustive":
        return search(spaces_searched, "exhaustive")
    return search(spaces_searched, "bnb", float(method.removeprefix("bnb ").removesuffix("%")) / 100)


def non_monotone(searched: Sequence[Space], tolerance: float) -> float:
    """Share of the neighbouring points, along any variable, whose throughput or latency break the order by more."""
    broken = pairs = 0.0
    for space in searched:
        place = [c.name for c in space.constraints].index("latency")
        for violation, variable in zip(violations(space, tolerance), space.variables, strict=True):
            count = space.size * (1 - 1 / len(variable.values))
            broken += count * max(violation.throughput, violation.figures[place])
            pairs += count
    return broken / pairs


def _load(model: ModelSpec, workload: Workload) -> Load:
    return Load(workload, model.encoder_layers > 0)


def cases(directory: Path, profile: str | None) -> list[tuple[str, Tabulated]]:
    """Scenarios from rooflines, and from the profile of a model directory on this machine where there is one."""
    scenarios = []
    for name, text, workload, overhead_s, fixed in ROOFLINES:
        model, cluster = builtin_model(name), parse_cluster(text)
        tables = roofline_profile(model, cluster, overhead_s=overhead_s)
        inputs = CostModel(model, cluster, tables, "fp16", watched=False), _load(model, task(workload))
        scenarios.append((f"{name} {text} {workload}", Tabulated(*inputs, POLICIES, dict(fixed), True)))
    if not directory.is_dir():
        print(f"skipped: there is no model '{directory}' with measured layers; exegpt demo makes one", file=sys.stderr)
        return scenarios
    for workload in ("S", "T"):
        s = find_setting(str(directory), "local", workload, profile, device="cpu")
        inputs = CostModel(s.model, s.cluster, s.profile, s.kv_dtype, watched=False), _load(s.model, s.workload)
        scenarios.append(
            (f"{s.model.name} local {s.profile.source} {workload}", Tabulated(*inputs, POLICIES, {}, True))
        )
    return scenarios


def paper_cases(points: int, only: str | None) -> Iterator[tuple[str, Tabulated]]:
    """The paper's scenarios, each policy whose space has at most so many points, without noise and with it."""
    for name, text, tasks in PAPER:
        model, cluster = builtin_model(name), parse_cluster(text, 0.95)
        stock = roofline_profile(model, cluster)
        for workload in tasks.split() if only in (None, name) else ():
            for policy in PAPER_POLICIES:
                for noise, tables in (("", stock), (f" +-{NOISE:.0%}", noisy(stock, NOISE))):
                    cost_model = CostModel(model, cluster, tables, "fp16", watched=False)
                    scenario = Tabulated(cost_model, _load(model, task(workload)), (policy,), {"replicas": 1}, False)
                    if 0 < sum(space.size for space in scenario.under(float("inf"))) <= points:
                        yield f"{name} {text} {workload} {policy}{noise}", scenario


def noisy(profile: Profile, share: float) -> Profile:
    """A profile every value of whose tables is off by up to this share."""
    rng = np.random.default_rng(0)

    def table(lookup: Table) -> Table:
        off = 1 + share * rng.uniform(-1, 1, size=len(lookup.values))
        return replace(lookup, values=tuple((np.array(lookup.values) * off).tolist()))

    def layer(tables: LayerTables) -> LayerTables:
        return replace(
            tables, **{f.name: table(v) for f in fields(tables) if isinstance(v := getattr(tables, f.name), Table)}
        )

    degrees = tuple(
        replace(
            d,
            decoder=layer(d.decoder),
            encoder=layer(d.encoder) if d.encoder else None,
            embedding=table(d.embedding),
            head=table(d.head),
        )
        for d in profile.degrees
    )
    return replace(profile, degrees=degrees)


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
    parser.add_argument("--points", type=int, help="the paper's scenarios, spaces of at most so many points")
    parser.add_argument("--only", help="of the paper's scenarios those of one model")
    parser.add_argument(
        "--oracle", type=float, help="hold against branch and bound at so many percent, where counting out takes hours"
    )
    args = parser.parse_args()
    oracle = "exhaustive" if args.oracle is None else f"bnb {args.oracle:g}%"
    exact = random_spaces(args.spaces)
    rows = []
    for name, scenario in paper_cases(args.points, args.only) if args.points else cases(args.model, args.profile):
        print(f"{name} ...", file=sys.stderr)
        rows.append(measure(name, scenario, METHODS[: 2 if args.points else None], oracle))
        print(f"  {rows[-1].searches}", file=sys.stderr)
    if args.json:
        print(json.dumps({"random": exact, "cases": [asdict(row) for row in rows]}, indent=2))
    else:
        show(exact, rows)


if __name__ == "__main__":
    main()
