"""SamuLLM's evaluation: its greedy search compared with Max- and Min-heuristics on four applications.

Plans are made with sampled output lengths and run with others. No plan ran on a GPU: plans run on the simulator that
planned them, with new outputs drawn from the same distributions. So errors are due to lengths only. The paper's errors,
of real runs, are printed next to them.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from exegpt.report import gantt
from exegpt.report.sections import Section
from exegpt.reproduction.samullm_applications import (
    HOST,
    chain_summary,
    cost_table,
    data_folder,
    ensembling,
    routing,
    stand_ins,
)
from exegpt.reproduction.samullm_points import PointErrors, point_errors
from xcore.quantity import figure_text, percent_text, signed_percent
from xcore.specs.cost_table import CostTable
from xmulti.files.call_graph import CallGraph
from xmulti.files.stage_plan import ExecutionStage, StagePlan
from xmulti.stages.application import Application, draw
from xmulti.stages.greedy_stages import PlannedStage, greedy_stage, makespan, plan_stages
from xmulti.stages.running_phase import execute
from xmulti.stages.stage_heuristics import max_stage, min_stage
from xmulti.stages.stage_planning import PLANS, SEARCHED
from xmulti.stages.stage_search import best_stages
from xmulti.stages.stage_variations import varied_stages

STANDS_ON = (
    "Simulated with SamuLLM's published timings, and rooflines where it has none; plans run on outputs drawn anew. "
    "Nothing here was run on a GPU."
)
Planner = Callable[[Application], tuple[PlannedStage, ...]]
METHODS: dict[str, Planner] = {
    "samullm": lambda application: plan_stages(application, HOST, greedy_stage),
    "samullm, no preemption": lambda application: plan_stages(application, HOST, greedy_stage, preempt=False),
    "max": lambda application: plan_stages(application, HOST, max_stage),
    "min": lambda application: plan_stages(application, HOST, min_stage),
    "min, no preemption": lambda application: plan_stages(application, HOST, min_stage, preempt=False),
}
SEARCHES: dict[str, Planner] = {
    "branch and bound": lambda application: best_stages(application, HOST, SEARCHED, PLANS),
    "one stage varied": lambda application: varied_stages(application, HOST, SEARCHED),
}
"""Searches beyond the greedy one, for the smaller cases."""
QUICK = (
    "the smallest case of each application and routing with known outputs, of 22 cases; no search beyond the greedy one"
)
"""What is left of the evaluation with `quick`."""
CAPS, REQUESTS, DOCUMENTS = (256, 512), (1000, 2000, 5000, 10000), (100, 300, 500)


@dataclass(frozen=True)
class PaperGains:
    """The paper's gains over the two heuristics, from the least to the greatest."""

    over_max: tuple[float, float]
    over_min: tuple[float, float]
    tolerance: float | None = None
    """Allowed deviation; None: any gain counts."""

    def holds(self, gain: float, paper: tuple[float, float]) -> bool:
        """Return whether a gain is in the paper's range, within the tolerance.

        Without a range, return whether there is a gain.
        """
        if self.tolerance is None:
            return gain >= 1.0
        return paper[0] * (1 - self.tolerance) <= gain <= paper[1] * (1 + self.tolerance)


PAPER = {
    "ensembling": PaperGains((1.1, 2.4), (1.0, 1.6), 0.25),
    "routing": PaperGains((1.4, 1.8), (1.0, 1.1)),
    "chain summary": PaperGains((1.0, 1.3), (1.0, 1.4)),
    "mixed": PaperGains((1.2, 1.4), (1.2, 1.4)),
}
DRAWN: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "Figure 9": ("routing", True, ("max", "min", "samullm")),
    "Figure 13": ("mixed", False, ("max", "min", "samullm")),
    "Figure 15": ("mixed", False, ("samullm", "samullm, no preemption")),
}
"""The drawn timelines, by the paper's figure: the application, whether its outputs are known, and the methods."""
PAPER_PREEMPTION = {"samullm": "1.0–1.2", "min": "1.3–1.4"}
PAPER_JOINT, PAPER_SEARCH, PAPER_ERROR = "1.0–1.2", 0.105, (0.065, 0.387)


@dataclass(frozen=True)
class MethodRun:
    """The result of a method's plan."""

    method: str
    planned_s: float
    seconds: float
    """The time on the actual outputs."""
    search_s: float
    stages: int
    idle: float
    """Share of GPU seconds without computing or loading."""
    not_computing: float
    moves: int

    @property
    def error(self) -> float:
        """Error of the planned time, relative to the actual time."""
        return self.planned_s / self.seconds - 1

    @property
    def search_share(self) -> float:
        """The search's share of the time since its start."""
        return self.search_s / (self.search_s + self.seconds)


@dataclass(frozen=True)
class DrawnRun:
    """The stages of a method's run, as they were executed."""

    figure: str
    """The paper's figure that has them."""
    method: str
    stages: tuple[ExecutionStage, ...]


@dataclass(frozen=True)
class ApplicationCase:
    """One application under all methods."""

    application: str
    what: str
    known: bool
    """Whether the outputs of the run are known to the plan."""
    methods: dict[str, MethodRun]
    sequential_s: float | None = None
    """For a mix: the time of its applications one after the other, by the greedy search."""
    drawn: tuple[DrawnRun, ...] = ()

    def gain(self, over: str, method: str = "samullm") -> float:
        """Return the time under another method over the time under this one."""
        return self.methods[over].seconds / self.methods[method].seconds


@dataclass(frozen=True)
class Samullm:
    """The whole evaluation."""

    cases: tuple[ApplicationCase, ...]
    points: PointErrors
    stand_ins: dict[str, str]

    def of(self, application: str, known: bool | None = None) -> list[ApplicationCase]:
        """Return the cases of one application."""
        return [c for c in self.cases if c.application == application and known in (None, c.known)]


def reproduce(progress: Callable[[int, int], None] = lambda done, total: None, quick: bool = False) -> Samullm:
    """Run every application, or as in `QUICK`; InputError if SamuLLM's files are missing."""
    folder = data_folder()
    table = cost_table(folder)
    work = _cases(table, quick)
    cases = []
    for done, make in enumerate(work, 1):
        cases.append(make())
        progress(done, len(work))
    return Samullm(tuple(cases), point_errors(folder), dict(stand_ins()))


def _cases(table: CostTable, quick: bool) -> list[Callable[[], ApplicationCase]]:
    """Return all cases, as functions that compute them."""
    least = 1 if quick else None
    caps, requests, documents_of, evaluations = CAPS[:least], REQUESTS[:least], DOCUMENTS[:least], (1, 4)[:least]

    def case(
        application: str, what: str, graph: CallGraph, *parts: CallGraph, known: bool = False, search: bool = False
    ) -> Callable[[], ApplicationCase]:
        return lambda: _case(table, application, what, graph, parts, known, search and not quick)

    ensembles = [
        case("ensembling", f"{n:,} requests, cap {cap}", ensembling(n, cap), search=n <= REQUESTS[1])
        for cap in caps
        for n in requests
    ]
    routes = [case("routing", "6,856 requests", routing(), known=known, search=True) for known in (False, True)]
    chains = [
        case(
            "chain summary",
            f"{n} documents, cap 900, {times} evaluation{'s'[: times - 1]}",
            chain_summary(n, 900, times),
            search=True,
        )
        for n in documents_of
        for times in evaluations
    ]
    mixes = []
    for documents, cap in (*((n, 256) for n in DOCUMENTS), (500, 512))[:least]:
        parts = (chain_summary(documents, 900, 4), ensembling(5000, cap))
        what = f"{documents} documents, 5,000 requests, cap {cap}"
        for known in (False, True)[: 2 if documents == DOCUMENTS[-1] else 1]:
            mixes.append(case("mixed", what, parts[0].joined(parts[1]), *parts, known=known, search=True))
    return [*ensembles, *routes, *chains, *mixes]


def _case(
    table: CostTable,
    application: str,
    what: str,
    graph: CallGraph,
    parts: tuple[CallGraph, ...],
    known: bool,
    search: bool,
) -> ApplicationCase:
    runs_on = draw(graph, table, seed=1)
    planned_on = runs_on if known else draw(graph, table)
    planners = METHODS | SEARCHES if search else METHODS
    runs = {method: _ran(method, planner, planned_on, runs_on) for method, planner in planners.items()}
    methods = {method: ran for method, (ran, _) in runs.items()}
    greedy = METHODS["samullm"]
    sequential = [
        _ran("samullm", greedy, draw(part, table, seed=int(known)), draw(part, table, seed=1))[0].seconds
        for part in parts
    ]
    drawn = tuple(
        DrawnRun(figure, method, runs[method][1])
        for figure, (of, outputs_known, drawn_methods) in DRAWN.items()
        for method in drawn_methods
        if (of, outputs_known) == (application, known)
    )
    return ApplicationCase(application, what, known, methods, sum(sequential) if parts else None, drawn)


def _ran(
    method: str, planner: Planner, planned_on: Application, runs_on: Application
) -> tuple[MethodRun, tuple[ExecutionStage, ...]]:
    began = time.perf_counter()
    stages = planner(planned_on)
    search_s = time.perf_counter() - began
    executed = execute(runs_on, HOST, stages)
    shares = (executed.idle, executed.not_computing, executed.moves)
    run = MethodRun(method, makespan(stages), executed.seconds, search_s, len(stages), *shares)
    return run, executed.stages


def sections(result: Samullm) -> list[Section]:
    """Return the gains of each application, then preemption, joint plans, searches and errors."""
    notes = {
        "ensembling": ("Eight of the paper's nine models: stablelm-tuned-alpha-7b has no published timings.",),
        "routing": tuple(f"{name}: {what}." for name, what in result.stand_ins.items()),
        "chain summary": ("Chunks per document: log-normal quantiles with median 3; the largest of 100 is 60.",),
    }
    gains = [_gains(result, application, notes.get(application, ())) for application in PAPER]
    others = [_idle(result), _preemption(result), _joint(result), _searches(result), _errors(result)]
    return [*gains, *_timelines(result), *others]


def _timelines(result: Samullm) -> list[Section]:
    """Return the charts of the paper's figures, each of the first case that has its runs."""
    first: dict[tuple[str, str], tuple[ApplicationCase, DrawnRun]] = {}
    for case in result.cases:
        for drawn in case.drawn:
            first.setdefault((drawn.figure, drawn.method), (case, drawn))
    sections = []
    for case, drawn in first.values():
        plan = StagePlan(StagePlan.VERSION, drawn.method, HOST.devices, HOST.linked, drawn.stages, 0.0)
        chart = gantt.of_stages(plan)
        row = (_name(case), figure_text(case.methods[drawn.method].seconds), str(len(drawn.stages)))
        title = f"{drawn.figure}: {case.application} by {drawn.method}"
        sections.append(
            Section(title, ("case", "seconds", "stages"), (row,), (), gantt.drawing(chart), gantt.text(chart))
        )
    return sections


def _name(case: ApplicationCase) -> str:
    return f"{case.what}, outputs known" if case.known else case.what


def _gains(result: Samullm, application: str, notes: tuple[str, ...]) -> Section:
    paper, cases = PAPER[application], result.of(application)
    known = {"max": paper.over_max, "min": paper.over_min}
    rows = []
    for case in cases:
        cells = [_name(case), figure_text(case.methods["samullm"].seconds)]
        for over, published in known.items():
            gain = case.gain(over)
            cells += [f"{gain:.2f}", _range(published), "yes" if paper.holds(gain, published) else "no"]
        rows.append(tuple(cells))
    reached = {over: [case.gain(over) for case in cases] for over in known}
    ranges = [(_range((min(gains), max(gains))), _range(known[over])) for over, gains in reached.items()]
    rows.append(("all of them", "", *ranges[0], "", *ranges[1], ""))
    holds = "a gain" if paper.tolerance is None else f"within {paper.tolerance:.0%}"
    columns = ("case", "seconds", "over Max", "paper", holds, "over Min", "paper", holds)
    return Section(f"samullm: {application}", columns, tuple(rows), notes)


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.3g}–{ends[1]:.3g}"


def _idle(result: Samullm) -> Section:
    rows = []
    for application in PAPER:
        for case in result.of(application, known=False):
            shares = [case.methods[method] for method in ("samullm", "max", "min")]
            ratios = [_ratio(ran.not_computing, shares[0].not_computing) for ran in shares[1:]]
            idle = [percent_text(ran.idle) for ran in shares]
            computing = [percent_text(ran.not_computing) for ran in shares]
            rows.append((f"{application}: {case.what}", *idle, *computing, *ratios))
    columns = ("case", "idle", "Max", "Min", "idle or loading", "Max", "Min", "Max over ours", "Min over ours")
    note = "The paper, chain summary: Max 0.9–1.6 (mean 1.2) and Min 1.1–1.9 (mean 1.5) times the idle time of ours."
    return Section("Share of GPU time without computing", columns, tuple(rows), (note,))


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other > 0 else "–"


def _preemption(result: Samullm) -> Section:
    rows = []
    for application in PAPER:
        for case in result.of(application, known=False):
            gains = [case.gain(f"{method}, no preemption", method) for method in PAPER_PREEMPTION]
            rows.append((f"{application}: {case.what}", *(f"{gain:.2f}" for gain in gains)))
    columns = ("case", "samullm", "Min")
    paper = ", ".join(f"{method} {gain}" for method, gain in PAPER_PREEMPTION.items())
    return Section(
        "Preemption: time without it over time with it",
        columns,
        tuple(rows),
        (f"The paper reports, for two mixes: {paper}.",),
    )


def _joint(result: Samullm) -> Section:
    rows = []
    for case in result.of("mixed"):
        joint = case.methods["samullm"].seconds
        assert case.sequential_s is not None, "a mix has parts"
        cells = (figure_text(joint), figure_text(case.sequential_s), f"{case.sequential_s / joint:.2f}", PAPER_JOINT)
        rows.append((_name(case), *cells))
    columns = ("case", "together, s", "one after the other, s", "gain", "paper")
    return Section("Two applications together", columns, tuple(rows))


def _searches(result: Samullm) -> Section:
    rows = []
    for case in result.cases:
        ran = case.methods["samullm"]
        cells = [figure_text(ran.search_s), percent_text(ran.search_share), figure_text(ran.planned_s)]
        for search in SEARCHES:
            found = case.methods.get(search)
            gains = (ran.planned_s / found.planned_s, ran.seconds / found.seconds) if found else ()
            cells += [figure_text(found.search_s if found else None)]
            cells += [f"{gain:.3f}" for gain in gains] or ["–", "–"]
        rows.append((f"{case.application}: {_name(case)}", *cells))
    heads = [head for search in SEARCHES for head in (f"{search}, s", "planned gain", "run gain")]
    columns = ("case", "search, s", "share of all", "planned, s", *heads)
    notes = (
        f"The paper's greedy search takes up to {percent_text(PAPER_SEARCH)} of the total time.",
        f"Gains are relative to the greedy search. Both searches try the {SEARCHED} best stages of a state; branch and "
        f"bound completes up to {PLANS} plans.",
    )
    return Section("Searches", columns, tuple(rows), notes)


def _errors(result: Samullm) -> Section:
    points = result.points
    unknown = [abs(ran.error) for case in result.cases if not case.known for ran in case.methods.values()]
    known = [abs(ran.error) for case in result.cases if case.known for ran in case.methods.values()]
    rows = [
        (f"{points.prefill_points:,} timed prefills, lines through the extremes", *_shares(points.prefill)),
        (f"{points.decode_points:,} timed decode iterations, lines through the extremes", *_shares(points.decode)),
        ("timed decode iterations between the extremes, not on the lines", *_shares(points.between)),
        ("batches left out and interpolated from their neighbours", *_shares(points.left_out)),
        (f"{len(unknown)} plans, run with other output lengths than planned", *_shares((mean(unknown), max(unknown)))),
        (f"{len(known)} plans, run with the planned output lengths", *_shares((mean(known), max(known)))),
    ]
    low, high = (signed_percent(share) for share in PAPER_ERROR)
    note = (
        f"The paper, for real runs: {low} to {high}, mean 25.6%; with known outputs, mean 17.0%. No published data has "
        "whole runs together with their requests, so this error can't be reproduced."
    )
    return Section("Errors", ("of", "mean", "greatest"), tuple(rows), (note,))


def _shares(pair: tuple[float, float]) -> tuple[str, str]:
    assert all(math.isfinite(share) for share in pair), "errors are finite"
    return percent_text(pair[0]), percent_text(pair[1])
