"""Table 7: variance of encoding and decoding times, OPT-13B on four A40s, task S, at the schedules of Table 6.

The paper prints means and 99th-percentile ranges of a single stage's times, and doesn't say which of a policy's two
schedules they are of. Here requests that are all there at once are replayed, with and without dynamic adjustment. A
range is half of the distance between the 0.5th and the 99.5th percentile.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from exegpt.report.sections import Section
from exegpt.reproduction.evenness import TimeSpread, evenness
from exegpt.reproduction.setup import Setup, setup
from exegpt.reproduction.table6 import PAPER, Published
from xcore.policies.adjustment import USUAL_SHARE
from xcore.specs.schedule import Schedule
from xscheduler.tune import tune
from xsimulator.replay.event_simulator import replay

RANGES = {"rra": ("± 0.12 (7.1%)", "± 0.001 (2.4%)"), "waa-c": ("± 0.10 (11.8%)", "± 0.002 (5.5%)")}
"""The paper's ranges of encoding and of a decoding iteration, in seconds."""
STAGES = {
    "rra": {"tp_degree": 4, "encode_micro_batches": 1},
    "waa-c": {"tp_degree": 2, "encode_tp_degree": 2, "encode_devices": 2},
}
REQUESTS, QUICK_REQUESTS = 12_000, 3_000
QUICK = f"{QUICK_REQUESTS:,} of {REQUESTS:,} requests in each replay"
"""What `quick` leaves out."""
SEED = 3


@dataclass(frozen=True)
class Table7Row:
    """One schedule, with or without adjustment."""

    paper: Published
    adjusted: bool
    encode_s: TimeSpread
    iteration_s: TimeSpread
    throughput_seq_s: float


@dataclass(frozen=True)
class Table7:
    """All rows."""

    rows: tuple[Table7Row, ...]


def reproduce(progress: Callable[[int, int], None] = lambda done, total: None, quick: bool = False) -> Table7:
    """Replay every schedule of Table 6, without and with adjustment."""
    where, rows = setup("opt-13b", "4xA40", "S"), []
    cases = [(paper, share) for paper in PAPER for share in (None, USUAL_SHARE)]
    for done, (paper, share) in enumerate(cases, 1):
        rows.append(row(where, paper, share, QUICK_REQUESTS if quick else REQUESTS))
        progress(done, len(cases))
    return Table7(tuple(rows))


def schedule_of(where: Setup, paper: Published) -> Schedule:
    """Return the schedule with the variables and stages of a row of Table 6."""
    fixed = {"replicas": 1, **STAGES[paper.policy], **paper.controls}
    best = tune(*where.specs, policies=(paper.policy,), fixed=fixed).schedule
    assert best, "the paper's schedules fit into memory"
    return best


def row(where: Setup, paper: Published, share: float | None, requests: int) -> Table7Row:
    """Replay one schedule with adjustment within a share, or without."""
    schedule = replace(schedule_of(where, paper), adjust=share)
    run = replay(schedule, where.profile, where.workload.draw(requests, seed=SEED))
    even = evenness(schedule, run.timeline, run.served)
    return Table7Row(paper, share is not None, even.encode_s, even.iteration_s, even.throughput_seq_s)


def sections(table: Table7) -> list[Section]:
    """Return the table with the paper's figures beside ours."""
    heads = ("schedule", "adjusted", "encoding, s", "paper", "decoding iteration, s", "paper", "seq/s")
    return [
        Section(
            "table7: variance of encoding and decoding times, OPT-13B on 4xA40, task S",
            heads,
            tuple(_cells(row) for row in table.rows),
            (
                "±: half of the range of 99 % of a stage's times. The paper doesn't say which of a policy's two "
                "schedules it describes, nor how its range is taken.",
                "Iterations of RRA vary within a phase too, since sequences end and none join until the next.",
            ),
        )
    ]


def _cells(row: Table7Row) -> tuple[str, ...]:
    encode, iteration = RANGES[row.paper.policy]
    controls = " ".join(f"{name}={value}" for name, value in row.paper.controls.items())
    return (
        f"{row.paper.policy} {controls}",
        "yes" if row.adjusted else "no",
        _text(row.encode_s),
        f"{row.paper.encode_s} {encode}",
        _text(row.iteration_s),
        f"{row.paper.decode_iteration_s} {iteration}",
        f"{row.throughput_seq_s:.3g}",
    )


def _text(spread: TimeSpread) -> str:
    return f"{spread.mean:.3g} ± {spread.half_range:.2g} ({spread.half_range / spread.mean:.1%})"
