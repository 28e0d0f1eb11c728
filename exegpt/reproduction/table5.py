"""Table 5: violations of monotonicity of throughput and latency by control variable, GPT-3 39B on 2x8 A40s.

One variable is swept with the others fixed, for all combinations of the others on a thinned grid. RRA's stages and
WAA's decoding stages have T_P from all devices to none; WAA-C's encoding devices are all in groups.

A point of a sweep is non-monotone if its figure lies more than the tolerance below that of an earlier point. At such
points, a search that judges a box by its corners would be wrong. Points that don't fit in memory are left out, and so
are saturated ones of WAA, which the paper's space does not have: its B_D is B_E times a mean, not what memory holds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from exegpt.report.sections import Section
from exegpt.reproduction.setup import Setup, setup
from xcore.arrays import Array
from xcore.specs.schedule import Stage
from xscheduler.allocation import Layout, both_stages, layer_speeds, partial_layouts, side_stages
from xsimulator.estimates import outcome
from xsimulator.steady.outcome import latency, memory_share
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.waa import WAA

TOLERANCES = (0.02, 0.05, 0.10)
ENCODE_BATCHES = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
DECODE_ITERATIONS = (128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
MICRO_BATCHES = (16, 12, 8, 6, 4, 3, 2, 1)
"""N_D and B_m in falling order, which makes throughput and latency rise (docs/theory.md)."""
VARIABLES = {"rra": ("T_P", "B_E", "N_D"), "waa-c": ("T_P", "B_E", "B_m")}
"""The variables by policy, in the order of a grid's axes; T_P counts devices in tensor-parallel groups, falling."""
PAPER = {  # (task, tolerance): RRA's B_E and N_D, WAA's B_E, T_P and B_m, each (latency, throughput) in percent
    ("S", 0.02): ((0.6, 2.3), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.8, 0.0)),
    ("S", 0.05): ((0.6, 0.3), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.5, 0.0)),
    ("S", 0.10): ((0.3, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.4, 0.0)),
    ("T", 0.02): ((0.2, 0.1), (0.0, 0.0), (0.1, 0.0), (1.2, 0.0), (10.9, 0.0)),
    ("T", 0.05): ((0.2, 0.0), (0.0, 0.0), (0.0, 0.0), (0.8, 0.0), (10.6, 0.0)),
    ("T", 0.10): ((0.2, 0.0), (0.0, 0.0), (0.0, 0.0), (0.4, 0.0), (10.4, 0.0)),
}
_COLUMNS = (("rra", "B_E"), ("rra", "N_D"), ("waa-c", "B_E"), ("waa-c", "T_P"), ("waa-c", "B_m"))


@dataclass(frozen=True)
class Cell:
    """Shares of non-monotone points along one variable."""

    task: str
    tolerance: float
    policy: str
    variable: str
    points: int
    latency: float
    throughput: float
    paper: tuple[float, float] | None
    """(latency, throughput) as shares; None if the paper has no such cell."""


@dataclass(frozen=True)
class Table5:
    """All cells."""

    cells: tuple[Cell, ...]


def non_monotone(figures: Array, axis: int, tolerance: float) -> tuple[int, int]:
    """Return the number of points more than `tolerance` below an earlier one along `axis`, and of all points.

    NaN marks a missing point.
    """
    highest = np.fmax.accumulate(figures, axis=axis)
    return int(np.sum(figures < highest * (1 - tolerance))), int(np.sum(~np.isnan(figures)))


def reproduce(progress: Callable[[int, int], None] = lambda done, total: None) -> Table5:
    """Simulate the grids of both policies and tasks, and count violations."""
    asked = [(task, policy) for task in ("S", "T") for policy in VARIABLES]
    cells: list[Cell] = []
    for done, (task, policy) in enumerate(asked, 1):
        cells += _cells(task, policy, list(grids(setup("gpt3-39b", "2x8xA40", task), policy)))
        progress(done, len(asked))
    return Table5(tuple(cells))


def _cells(task: str, policy: str, grids: list[Array]) -> Iterator[Cell]:
    for tolerance in TOLERANCES:
        for axis, variable in enumerate(VARIABLES[policy]):
            shares = []
            for kind in range(2):
                counts = [non_monotone(grid[..., kind], axis, tolerance) for grid in grids]
                points = sum(there for _, there in counts)
                shares.append(sum(broken for broken, _ in counts) / points)
            place = (policy, variable)
            paper = PAPER[task, tolerance][_COLUMNS.index(place)] if place in _COLUMNS else None
            said = (paper[0] / 100, paper[1] / 100) if paper else None
            yield Cell(task, tolerance, policy, variable, points, shares[0], shares[1], said)


def grids(where: Setup, policy: str) -> Iterator[Array]:
    """Return a grid for every tensor-parallel degree, [T_P, B_E, N_D or B_m, 2].

    The last axis holds latency in seconds and sequences per second; NaN beyond memory or, under WAA, in saturation.
    """
    per_node = where.cluster.devices_per_node
    degrees = sorted(tables.tp for tables in where.profile.degrees)
    for degree in degrees[1:]:
        encoding = encoding_devices(where, degree) if policy == "waa-c" else 0
        all_layouts = partial_layouts(where.model, where.cluster.devices - encoding, per_node, (1, degree))
        layouts = sorted(all_layouts, key=lambda layout: -layout.gpus)[:: max(1, len(all_layouts) // 4)]
        if policy == "rra":
            scenarios = [_rra_scenario(where, layout) for layout in layouts]
            yield np.stack([_grid(scenario, policy, "decode_iterations", DECODE_ITERATIONS) for scenario in scenarios])
        else:
            scenarios = [_waa_scenario(where, Layout(encoding, degree, encoding), layout) for layout in layouts]
            yield np.stack([_grid(scenario, policy, "micro_batches", MICRO_BATCHES) for scenario in scenarios])


def _grid(scenario: Scenario, policy: str, third: str, values: tuple[int, ...]) -> Array:
    grid = np.full((len(ENCODE_BATCHES), len(values), 2), np.nan)
    for column, value in enumerate(values):
        if third == "micro_batches" and value > len(scenario.replica.decode.stages):
            continue  # neither shortens an iteration nor fills the pipeline further
        sides = WAA(scenario, value) if third == "micro_batches" else None
        for row, batch in enumerate(ENCODE_BATCHES):
            if sides and sides.flow(batch).waits:
                continue
            result = outcome(scenario, policy, {"encode_batch": batch, third: value})
            if memory_share(scenario, result) > 1:
                break  # a larger batch needs more
            grid[row, column] = latency(scenario, result), result.throughput
    return grid


def _rra_scenario(where: Setup, layout: Layout) -> Scenario:
    speeds = layer_speeds(where.workload, where.profile)
    return _scenario(where, both_stages(where.model, speeds, layout))


def _waa_scenario(where: Setup, encode: Layout, decode: Layout) -> Scenario:
    speeds = layer_speeds(where.workload, where.profile)
    encoding = side_stages(where.model, speeds, encode, "encode")
    return _scenario(where, encoding + side_stages(where.model, speeds, decode, "decode", encode.devices))


def encoding_devices(where: Setup, degree: int) -> int:
    """Return WAA-C's encoding devices: encoding's share of the computing time, in groups of `degree`."""
    speed, groups = layer_speeds(where.workload, where.profile)[1], where.cluster.devices // degree
    return degree * min(max(1, round(groups * speed.encode / (speed.encode + speed.decode))), groups - 1)


def _scenario(where: Setup, stages: tuple[Stage, ...]) -> Scenario:
    return where.scenario(stages, watched=False)


def monotone(table: Table5, tolerance: float) -> tuple[float, float]:
    """Return the shares of points monotone in latency and in throughput, over the cells that are also in the paper."""
    cells = [cell for cell in table.cells if cell.tolerance == tolerance and cell.paper]
    points = sum(cell.points for cell in cells)
    broken = (sum(getattr(cell, kind) * cell.points for cell in cells) for kind in ("latency", "throughput"))
    latency, throughput = (1 - count / points for count in broken)
    return latency, throughput


def sections(table: Table5) -> list[Section]:
    """Return the paper's table with our figures next to it."""
    columns = list(dict.fromkeys((cell.policy, cell.variable) for cell in table.cells))
    rows = []
    for task, tolerance in dict.fromkeys((cell.task, cell.tolerance) for cell in table.cells):
        cells = {(c.policy, c.variable): c for c in table.cells if (c.task, c.tolerance) == (task, tolerance)}
        rows.append((task, f"{tolerance:.0%}", "here", *(_pair((c.latency, c.throughput)) for c in cells.values())))
        rows.append((task, f"{tolerance:.0%}", "paper", *(_pair(c.paper) for c in cells.values())))
    heads = (f"{'RRA' if policy == 'rra' else 'WAA'} {variable}" for policy, variable in columns)
    points = {f"{c.policy} {c.task}": c.points for c in table.cells}
    latency, throughput = monotone(table, 0.05)
    return [
        Section(
            "table5: non-monotone points of GPT-3 39B on 2x8xA40, (latency, throughput) in percent",
            ("task", "tolerance", "", *heads),
            tuple(rows),
            (
                "A point counts if it is lower than any earlier point of its sweep by more than the tolerance.",
                f"At 5 % tolerance {throughput:.1%} of the points in the paper's columns are monotone in throughput, "
                f"{latency:.1%} in latency; the paper says 97 % and 96 %.",
                "Points simulated: " + ", ".join(f"{name} {count}" for name, count in points.items()) + ".",
            ),
        )
    ]


def _pair(shares: tuple[float, float] | None) -> str:
    return f"({shares[0]:.1%}, {shares[1]:.1%})".replace("%", "") if shares else "–"
