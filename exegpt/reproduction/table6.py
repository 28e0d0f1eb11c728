"""Tables 6 and 7: OPT-13B on four A40s, task S, at the paper's four schedules, then the best schedules found.

The paper's schedules are simulated by its own formulas, without allowance for variation (docs/theory.md). WAA has one
stage of two encoding devices and one of two decoding devices.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from exegpt.report.sections import Section
from exegpt.reproduction.setup import PAPER_POLICIES, Reached, Setup, deviation, paper_mode, reached, setup, today
from xcore.quantity import figure_text, signed_percent
from xscheduler.allocation import Layout, layer_speeds, side_stages, uniform_stages
from xsimulator.estimates import outcome
from xsimulator.steady import rra
from xsimulator.steady.outcome import latency
from xsimulator.steady.residents import Form
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.waa import WAA

QUICK = "no search over today's policies and replicas"
"""What `quick` leaves out."""
FORMS: tuple[Form, ...] = ("paper", "exact")


@dataclass(frozen=True)
class Published:
    """A row of Table 6, with the times of Table 7 for its policy."""

    bound_s: float | None
    policy: str
    controls: dict[str, int]
    latency_s: float
    throughput_seq_s: float
    encode_s: float
    decode_iteration_s: float


PAPER = (
    Published(3.1, "waa-c", {"encode_batch": 4, "micro_batches": 1}, 3.01, 22.41, 0.85, 0.041),
    Published(5.9, "waa-c", {"encode_batch": 10, "micro_batches": 1}, 4.11, 23.76, 0.85, 0.041),
    Published(11.5, "rra", {"encode_batch": 52, "decode_iterations": 13}, 10.23, 25.23, 1.68, 0.038),
    Published(None, "rra", {"encode_batch": 49, "decode_iterations": 7}, 16.87, 26.15, 1.68, 0.038),
)


@dataclass(frozen=True)
class SimulatedFigures:
    """The simulated figures of a schedule."""

    latency_s: float
    throughput_seq_s: float
    encode_s: float
    """Time to encode one batch: RRA's phase through the pipeline, WAA's encoding stage."""
    decode_iteration_s: float
    """Mean time of a decode iteration over a phase (RRA), or over an encoding period (WAA)."""


@dataclass(frozen=True)
class FormFigures:
    """RRA's steady state at one schedule, by the paper's formulas or counted exactly."""

    decode_batch: float
    """B_D, sequences."""
    resident: float
    """Sequences decoding, averaged over a phase."""
    throughput_seq_s: float
    latency_s: float


@dataclass(frozen=True)
class Table6Row:
    """The paper's row, ours at the same schedule, their deviation, and the best schedules under the row's bound."""

    paper: Published
    simulated: SimulatedFigures
    deviation: SimulatedFigures
    """(here - paper) / paper of each figure."""
    found: Reached | None
    """The better of RRA and WAA, with one replica."""
    today: Reached | None
    forms: dict[str, FormFigures]
    """RRA's steady state by the paper's form and by the exact one, both with D(S) = S; empty for WAA."""


@dataclass(frozen=True)
class Table6:
    """All rows."""

    rows: tuple[Table6Row, ...]


def scenario(where: Setup, policy: str) -> Scenario:
    """Return the paper's stages for a policy: T_P = 4 for RRA, T_P = 2 on each of WAA's sides."""
    if policy == "rra":
        stages = uniform_stages(where.model, where.cluster, 4)
    else:
        speeds, pair = layer_speeds(where.workload, where.profile), Layout(2, 2, 2)
        sides = (side_stages(where.model, speeds, pair, phase, at) for phase, at in (("encode", 0), ("decode", 2)))  # type: ignore[arg-type]
        stages = tuple(stage for side in sides for stage in side)
    return where.scenario(stages, form="paper")


def simulate(where: Setup, row: Published) -> SimulatedFigures:
    """Simulate a row's own schedule."""
    at = scenario(where, row.policy)
    result = outcome(at, row.policy, row.controls)
    batch = row.controls["encode_batch"]
    if row.policy == "rra":
        phase = rra.phase(at, batch, row.controls["decode_iterations"]).times
        encode_s, decode_s = phase.encoded, float(phase.decoded[-1] - phase.encoded) / len(phase.decoded)
    else:
        longest = float(where.workload.p99_output)
        first, last = result.lifetime(np.array([1.0, longest])).seconds
        encode_s = WAA(at, row.controls["micro_batches"]).encoding(batch).period
        decode_s = float(last - first) / (longest - 1)
    return SimulatedFigures(latency(at, result), result.throughput, encode_s, decode_s)


def forms(where: Setup, row: Published) -> dict[str, FormFigures]:
    """Return RRA's steady state by both forms; WAA's is the mean of Little's law in both."""
    return {form: _by_form(where, row, form) for form in FORMS} if row.policy == "rra" else {}


def _by_form(where: Setup, row: Published, form: Form) -> FormFigures:
    at = scenario(where, row.policy)
    counted = replace(at, load=replace(at.load, encoder_decoder=True, form=form))
    steady, batch = counted.load.steady(row.controls["decode_iterations"]), row.controls["encode_batch"]
    result = outcome(counted, row.policy, row.controls)
    return FormFigures(
        batch * steady.batch_ratio, batch * float(steady.active.mean()), result.throughput, latency(counted, result)
    )


def reproduce(progress: Callable[[int, int], None] = lambda done, total: None, quick: bool = False) -> Table6:
    """Simulate and search all rows; `quick` as in `QUICK`."""
    where = setup("opt-13b", "4xA40", "S")
    rows = []
    for done, row in enumerate(PAPER, 1):
        simulated = simulate(where, row)
        names = SimulatedFigures.__dataclass_fields__
        deviations = SimulatedFigures(*(deviation(getattr(simulated, name), getattr(row, name)) for name in names))
        found, now = paper_mode(where, row.bound_s), None if quick else today(where, row.bound_s)
        best = reached(now, tuple(a.policy for a in now.alternatives)) if now else None
        rows.append(Table6Row(row, simulated, deviations, reached(found, PAPER_POLICIES), best, forms(where, row)))
        progress(done, len(PAPER))
    return Table6(tuple(rows))


def sections(table: Table6) -> list[Section]:
    """Return schedules, their phases, and the best schedules found."""
    return [
        _section(
            "table6: OPT-13B on 4xA40, task S, at the paper's schedules",
            table,
            (("throughput_seq_s", "seq/s"), ("latency_s", "latency, s")),
            "Computed as in the paper: B_D = B_E / E[1/c], D(S) = S, no allowance for variation.",
        ),
        _section(
            "table7: the same schedules' phases",
            table,
            (("encode_s", "encoding, s"), ("decode_iteration_s", "decoding iteration, s")),
            "Table 7 doesn't say which of a policy's two schedules it describes: its figures are printed for both.",
        ),
        Section(
            "RRA's steady state by the paper's form, active(u) = B_D · (1 - Σ P_D(U)), and counted exactly, D(S) = S",
            (
                "bound",
                "B_D, paper",
                "exact",
                "resident, paper",
                "exact",
                "seq/s, paper",
                "exact",
                "latency, s",
                "exact",
            ),
            tuple(_forms(row) for row in table.rows if row.forms),
            ("The paper's form omits residents, since it weighs 1/c by arriving queries (docs/theory.md).",),
        ),
        Section(
            "Results of searches under the same bounds, computed exactly and with the allowance for variation",
            ("bound", "paper", "RRA and WAA", "latency, s", "all policies and replicas", "latency, s", "schedules"),
            tuple(_found(row) for row in table.rows),
        ),
    ]


def _bound(row: Table6Row) -> str:
    return "∞" if row.paper.bound_s is None else f"{row.paper.bound_s:g} s"


def _section(title: str, table: Table6, columns: tuple[tuple[str, str], ...], note: str) -> Section:
    heads = [head for _, name in columns for head in (name, "paper", "deviation")]
    rows = []
    for row in table.rows:
        cells = [_bound(row), row.paper.policy, " ".join(f"{k}={v}" for k, v in row.paper.controls.items())]
        for key, _ in columns:
            values = [getattr(group, key) for group in (row.simulated, row.paper, row.deviation)]
            cells += [f"{values[0]:.4g}", f"{values[1]:g}", signed_percent(values[2])]
        rows.append(tuple(cells))
    return Section(title, ("bound", "policy", "schedule", *heads), tuple(rows), (note,))


def _forms(row: Table6Row) -> tuple[str, ...]:
    pairs = zip(*(asdict(row.forms[form]).values() for form in FORMS), strict=True)
    return (_bound(row), *(figure_text(value) for pair in pairs for value in pair))


def _found(row: Table6Row) -> tuple[str, ...]:
    cells = [_bound(row), f"{row.paper.throughput_seq_s:g}"]
    for point in (row.found, row.today):
        cells += [
            figure_text(point.throughput_seq_s if point else None),
            figure_text(point.latency_s if point else None),
        ]
    return (*cells, "; ".join(point.schedule for point in (row.found, row.today) if point))
