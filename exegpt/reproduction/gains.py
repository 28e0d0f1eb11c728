"""Figures 6 and 8: ExeGPT's throughput over FasterTransformer's in all scenarios, each under four bounds.

In addition, the further gain of later policies and replicas.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from exegpt.report import svg
from exegpt.report.sections import Section
from exegpt.reproduction.faster_transformer import StaticBatch, best_under, bounds, static_batches
from exegpt.reproduction.setup import WAA, WITHOUT_WAA, Reached, Setup, deviation, paper_mode, reached, setup, today
from xcore.errors import InputError
from xcore.processes import process_pool
from xcore.quantity import figure_text, signed_percent
from xcore.usable_cpus import usable_cpus
from xscheduler.setting_search import series

SMALL_TO_MID = (
    ("t5-11b", "8xA40"),
    ("opt-13b", "4xA40"),
    ("gpt3-39b", "2x8xA40"),
    ("gpt3-101b", "2x8xA100-80GB"),
)
LARGE = (
    ("gpt3-101b", "2x8xA100-80GB"),
    ("gpt3-175b", "2x8xA100-80GB"),
    ("gpt3-175b", "4x8xA40"),
    ("gpt3-341b", "6x8xA40"),
)
FIGURES = {"figure6": (SMALL_TO_MID, ("S", "T", "C1")), "figure8": (LARGE, ("G", "C1", "C2"))}
"""Models on clusters, and tasks."""
PAPER = {
    "figure6": {"mean": 2.0, "largest": 5.4},
    "figure8": {"mean": 3.2, "largest": 15.2, "smallest": 1.1, "mean_unbounded": 2.2},
    "over all": {"mean": 2.9},
}
QUICK = "two of four bounds, the tightest and none; no search over today's policies and replicas"
"""What `quick` leaves out."""
SERIES = (("FT", "#8a8f98"), ("RRA", series("rra").colour), ("WAA", series("waa-c").colour))


@dataclass(frozen=True)
class GainsRow:
    """One scenario under one bound."""

    figure: str
    model: str
    cluster: str
    task: str
    bound_s: float | None
    ft: Reached
    rra: Reached | None
    waa: Reached | None
    """The better of WAA-C and WAA-M."""
    waa_counts: bool
    """Whether the paper ran WAA in this scenario."""
    gain: float
    """Throughput of the better of RRA and, where it counts, WAA over FT's."""
    gain_with_waa: float
    """The same ratio, with WAA wherever memory holds it."""
    today: Reached | None
    """The best of all policies and replicas; None too if it wasn't searched for."""
    today_over_paper: float | None
    """Its throughput over that of the better of RRA and WAA."""


@dataclass(frozen=True)
class Summary:
    """Arithmetic means over (model, task, bound)."""

    name: str
    pairs: int
    mean: float
    largest: float
    smallest: float
    mean_unbounded: float
    mean_with_waa: float
    waa_ahead: dict[str, float]
    """Task → share of (model, finite bound) in which WAA reaches more than RRA, where the paper ran it."""
    today_mean: float | None
    today_smallest: float | None
    paper: dict[str, float]


@dataclass(frozen=True)
class Gains:
    """All rows, and their summaries by figure."""

    rows: tuple[GainsRow, ...]
    summaries: tuple[Summary, ...]


def reproduce(
    figures: Sequence[str],
    model: str | None = None,
    task: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    quick: bool = False,
) -> Gains:
    """Search all scenarios of the figures, or only those of one model or task; `quick` as in `QUICK`.

    Raises InputError if no scenario matches.
    """
    cases = scenarios(figures, model, task)
    rows: list[GainsRow] = []
    for done, scenario_rows in enumerate(_searched(cases, quick), 1):
        rows += scenario_rows
        progress(done, len(cases))
    groups = [(name, [row for row in rows if row.figure == name]) for name in figures]
    if len(figures) > 1:
        groups.append(("over all", rows))
    part = model is not None or task is not None  # the paper has no figures for a part
    return Gains(
        tuple(rows),
        tuple(summary(name, group, {} if part else PAPER[name]) for name, group in groups if group),
    )


def scenarios(figures: Sequence[str], model: str | None, task: str | None) -> list[tuple[str, str, str, str]]:
    """Return (figure, model, cluster, task) of each matching scenario."""
    all_cases = [(f, m, c, t) for f in figures for m, c in FIGURES[f][0] for t in FIGURES[f][1]]
    cases = [case for case in all_cases if model in (None, case[1]) and task in (None, case[3])]
    if not cases:
        models, tasks = (", ".join(dict.fromkeys(case[place] for case in all_cases)) for place in (1, 3))
        raise InputError(
            f"{figures[0]} has no model '{model}' with task '{task}': its models are {models}, its tasks {tasks}."
            if model and task
            else f"{figures[0]} has no model '{model}': its models are {models}."
            if model
            else f"{figures[0]} has no task '{task}': its tasks are {tasks}."
        )
    return cases


def _searched(cases: list[tuple[str, str, str, str]], quick: bool) -> Iterator[list[GainsRow]]:
    """Yield the rows of all scenarios, in order; scenarios are searched in parallel."""
    if len(cases) == 1:
        yield scenario_rows(cases[0], quick)
        return
    with process_pool(min(len(cases), usable_cpus())) as pool:
        yield from pool.map(partial(scenario_rows, quick=quick), cases)


def scenario_rows(case: tuple[str, str, str, str], quick: bool = False) -> list[GainsRow]:
    """Return the rows of one scenario under its four bounds."""
    name, *asked = case
    where = setup(*asked)
    batches = static_batches(where)
    all_bounds = bounds(batches)
    searched = (all_bounds[0], all_bounds[-1]) if quick else all_bounds
    return [_row(name, where, bound_s, best_under(batches, bound_s), quick) for bound_s in searched]


def _row(name: str, where: Setup, bound_s: float | None, ft: StaticBatch, quick: bool) -> GainsRow:
    searched = paper_mode(where, bound_s)
    rra, waa = reached(searched, ("rra",)), reached(searched, WAA)
    best = None if quick else today(where, bound_s)
    counts = where.model.name not in WITHOUT_WAA
    rates = [point.throughput_seq_s if point else 0.0 for point in (rra, waa)]
    now = reached(best, tuple(a.policy for a in best.alternatives)) if best else None
    with_waa = max(rates)
    return GainsRow(
        name,
        where.model.name,
        where.cluster.name,
        where.workload.name,
        bound_s,
        Reached(ft.throughput_seq_s, ft.latency_s, f"batch {ft.batch}"),
        rra,
        waa,
        counts,
        (with_waa if counts else rates[0]) / ft.throughput_seq_s,
        with_waa / ft.throughput_seq_s,
        now,
        None if quick else (now.throughput_seq_s if now else 0.0) / with_waa if with_waa else 1.0,
    )


def summary(name: str, rows: Sequence[GainsRow], paper: dict[str, float]) -> Summary:
    """Return the statistics quoted in the paper's text."""
    gains = [row.gain for row in rows]
    ahead: dict[str, list[bool]] = {}
    for row in rows:
        if row.bound_s is not None and row.waa_counts:
            ahead.setdefault(row.task, []).append(_ahead(row))
    now = [row.today_over_paper for row in rows if row.today_over_paper is not None]
    return Summary(
        name,
        len(rows),
        float(np.mean(gains)),
        max(gains),
        min(gains),
        float(np.mean([row.gain for row in rows if row.bound_s is None])),
        float(np.mean([row.gain_with_waa for row in rows])),
        {task: float(np.mean(shares)) for task, shares in ahead.items()},
        float(np.mean(now)) if now else None,
        min(now, default=None),
        paper,
    )


def _ahead(row: GainsRow) -> bool:
    return row.waa is not None and (row.rra is None or row.waa.throughput_seq_s > row.rra.throughput_seq_s)


def sections(gains: Gains) -> list[Section]:
    """Return charts, the scenarios, and our means next to the paper's."""
    rendered = []
    for gain in gains.summaries:
        rows = [row for row in gains.rows if row.figure == gain.name]
        if rows:
            rendered.append(_scenario_section(gain.name, rows))
    return rendered + [_summary_section(gain) for gain in gains.summaries]


def _scenario_section(name: str, rows: list[GainsRow]) -> Section:
    cells = []
    for row in rows:
        waa = figure_text(row.waa.throughput_seq_s if row.waa else None) + ("" if row.waa_counts else " *")
        winner = max((r for r in (row.rra, row.waa if row.waa_counts else None) if r), key=lambda r: r.throughput_seq_s)
        cells.append(
            (
                f"{row.model} {row.cluster} {row.task}",
                _bound(row),
                f"{figure_text(row.ft.throughput_seq_s)} ({row.ft.schedule})",
                figure_text(row.rra.throughput_seq_s if row.rra else None),
                waa,
                figure_text(row.gain),
                figure_text(row.today.throughput_seq_s if row.today else None),
                winner.schedule,
            )
        )
    return Section(
        f"{name}: throughput with FasterTransformer's latencies as bounds, sequences/s",
        ("scenario", "bound", "FT", "RRA", "WAA", "gain", "today", "the better of RRA and WAA"),
        tuple(cells),
        (
            "–: no schedule meets the bound. *: the paper has no figure for WAA here, so the gain excludes it.",
            "today: the best of all policies and replicas, under the same bound.",
        ),
        svg.panels(_panels(rows), SERIES, "sequences/s"),
    )


def _bound(row: GainsRow) -> str:
    return "∞" if row.bound_s is None else f"{figure_text(row.bound_s)} s"


def _panels(rows: list[GainsRow]) -> list[svg.Panel]:
    places = dict.fromkeys((row.model, row.cluster, row.task) for row in rows)
    return [
        svg.Panel(
            " ".join(place),
            tuple(
                (_bound(row), tuple(point.throughput_seq_s if point else None for point in (row.ft, row.rra, row.waa)))
                for row in rows
                if (row.model, row.cluster, row.task) == place
            ),
        )
        for place in places
    ]


_NAMES = {
    "mean": "mean gain over FT",
    "largest": "largest gain",
    "smallest": "smallest gain",
    "mean_unbounded": "mean gain without a bound",
    "mean_with_waa": "mean gain, WAA wherever it fits",
}


def _summary_section(gain: Summary) -> Section:
    rows = []
    for key, title in _NAMES.items():
        value, paper = float(getattr(gain, key)), gain.paper.get(key)
        rows.append(
            (title, figure_text(value), figure_text(paper), signed_percent(deviation(value, paper) if paper else None))
        )
    said = {"S": "WAA", "C1": "WAA", "T": "RRA", "G": "RRA"}
    rows += [
        (f"WAA ahead of RRA, {task}", f"{share:.0%}", said.get(task, "–"), "") for task, share in gain.waa_ahead.items()
    ]
    rows.append(("today's policies over RRA and WAA, mean", figure_text(gain.today_mean), "–", ""))
    rows.append(("today's policies over RRA and WAA, least", figure_text(gain.today_smallest), "–", ""))
    title = f"{gain.name}: {gain.pairs} pairs of scenario and bound"
    note = "WAA ahead: share of (model, finite bound); the paper names the policy that is generally ahead."
    return Section(title, ("", "here", "paper", "deviation"), tuple(rows), (note,))
