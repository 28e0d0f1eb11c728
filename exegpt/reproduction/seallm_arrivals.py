"""SeaLLM's main comparison at real arrivals, with replacement: Azure's public traces, and popularities that drift.

A trace's requests are clustered by their lengths into sixteen services, as the paper clusters its data sets (section
6.1), and each arrives when it did, with time stretched to the rate. So a service's bursts, and the drift of its
popularity, are the trace's. Placements are made for the first requests, which are not measured.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exegpt.report.sections import Section
from exegpt.reproduction.hermes_arrivals import TRACES
from exegpt.reproduction.seallm_replacement import (
    PHASE_S,
    PHASES,
    RATE_SEQ_S,
    VARIATION,
    DriftingTraffic,
    Replacements,
    adaptive,
    drift,
    fixed,
    history_of,
)
from exegpt.reproduction.seallm_systems import (
    BASELINES,
    OURS,
    RULES,
    Figures,
    dedicated_engines,
    figures_of,
    merged_engines,
    mux_engines,
    replay_of,
    two_stage,
)
from exegpt.reproduction.seallm_workload import NODES, SeaService, ServiceArrays, clustered, within_context
from xcore.quantity import figure_text, percent_text
from xcore.specs.workload import RequestLengths
from xcore.traces.trace import read_trace
from xmulti.sharing.cluster_replay import SharedEngine
from xmulti.sharing.replacement import FIRST_S, SHORTEST_S

PAST = 640
"""Requests of a trace for which the first placement is made."""
INTERVALS = 6
"""Least number of first intervals in a trace: at high rates, intervals begin shorter than 300 s."""
RATES, QUICK_RATES = (2.0, 5.0, 10.0), (5.0,)
"""Mean rates of a trace, requests/s. At higher ones, the code trace's longest prompts overload every group."""
QUICK_REQUESTS = 1000
"""Requests of each trace that `quick` replays."""
DRIFT = "drift"
_SEED = 5


@dataclass(frozen=True)
class RealLoad:
    """One trace, or the drift, at one rate."""

    arrivals: str
    """The trace's name, or `DRIFT`."""
    file: str | None
    """The trace's file."""
    rate_seq_s: float
    requests: int | None = None
    """The trace's first requests that count; None: all."""

    @property
    def traffic(self) -> DriftingTraffic:
        """The requests."""
        if self.file is None:
            return drift()
        rows = sorted(read_trace(self.file), key=lambda row: row.arrival_s)
        return of_trace(rows[: self.requests and self.requests + PAST], self.rate_seq_s)


@dataclass(frozen=True)
class RealComparison:
    """All systems under one load; None if a system has no placement."""

    load: RealLoad
    systems: dict[str, Figures | None]
    """The baselines, whose placements are fixed."""
    replaced: dict[str, Replacements]
    """SeaLLM's, by kind of replacement."""


def real_loads(quick: bool = False) -> list[RealLoad]:
    """Return each trace that is in the folder `azure` of EXEGPT_DATA, at each rate, and the drift."""
    folder = os.environ.get("EXEGPT_DATA")
    paths = {name: Path(folder) / "azure" / file for name, file in TRACES.items()} if folder else {}
    there = {name: str(path) for name, path in paths.items() if path.is_file()}
    rates, requests = (QUICK_RATES, QUICK_REQUESTS) if quick else (RATES, None)
    traces = [RealLoad(name, file, rate, requests) for name, file in there.items() for rate in rates]
    return traces if quick else [*traces, RealLoad(DRIFT, None, RATE_SEQ_S)]


def of_trace(rows: Sequence[RequestLengths], rate_seq_s: float) -> DriftingTraffic:
    """Return a trace's requests, sorted by arrival, as those of sixteen services at a mean rate."""
    arrival_s = np.array([row.arrival_s for row in rows])
    arrival_s = (arrival_s - arrival_s[0]) * (len(rows) - 1) / ((arrival_s[-1] - arrival_s[0]) * rate_seq_s)
    lengths = np.maximum(1.0, np.array([(row.input, row.output) for row in rows]))
    clusters, llms = clustered(lengths, np.random.default_rng(_SEED))
    past, asked, start_s = {}, {}, float(arrival_s[PAST])
    services = []
    for place, llm in enumerate(llms):
        of_service = clusters == place
        inputs, outputs = within_context(llm, *lengths[of_service].T)
        service = SeaService(f"s{place:02d}", llm, float(of_service.mean()), inputs, outputs)
        requests = ServiceArrays(service, arrival_s[of_service], inputs, outputs, outputs)
        before = requests.arrival_s < start_s
        past[service.name], asked[service.name] = requests.only(before), requests.only(~before).later(-start_s)
        services.append(service)
    seconds = float(arrival_s[-1]) - start_s
    first_s = min(FIRST_S, max(SHORTEST_S, seconds / INTERVALS))
    return DriftingTraffic(history_of(services, past, start_s), asked, seconds, first_s)


def compare(load: RealLoad) -> RealComparison:
    """Replay a load under all systems."""
    traffic = load.traffic
    past, rule = traffic.past, RULES["AlpaServe"]
    placed = two_stage(past, rule)
    engines: dict[str, list[SharedEngine] | None] = {
        "vLLM": dedicated_engines(past.services, NODES),
        "AlpaServe": merged_engines(placed.groups, past.by_name, rule) if placed else None,
        "MuxServe": mux_engines(past),
    }
    systems = {
        name: figures_of(traffic.asked, replay_of(traffic.asked, of), of) if of else None
        for name, of in engines.items()
    }
    kinds: dict[str, Callable[[], Replacements]] = {
        "fixed": lambda: fixed(traffic),
        "adaptive": lambda: adaptive(traffic),
    }
    if load.arrivals == DRIFT:
        kinds["restart"] = lambda: adaptive(traffic, restart=True)
    return RealComparison(load, systems, {kind: run() for kind, run in kinds.items()})


def section(compared: Sequence[RealComparison]) -> Section:
    """Return the table of all loads; without the traces, it says so."""
    rows = [row for each in compared for row in _rows(each)]
    best = sum(_ahead(each) for each in compared)
    notes = [
        f"{OURS}'s placement is replaced after adaptive intervals; {OURS}-A's is fixed, as the baselines' are. With "
        "restart, an engine that changes stops until its weights are loaded.",
        f"Azure's traces: clusters of their own lengths; the first {PAST} requests are the past. {DRIFT}: {PHASES} "
        f"phases of {PHASE_S:g} s, CV {VARIATION:g}; popularities move to other services after each.",
        f"{OURS} is ahead of all baselines by L_N in {best} of {len(compared)} loads (paper: in all).",
        *_factors(compared),
    ]
    if not any(each.load.file for each in compared):
        notes.append("Without Azure's traces: set EXEGPT_DATA to the folder that contains azure/.")
    columns = ("arrivals", "requests/s", "system", "L_N", "in time", "99 %, s", "TTFT, s", "TPOT, ms", "busy")
    more = ("intervals, s", "engines changed")
    return Section("SeaLLM at real arrivals, with replacement", (*columns, *more), tuple(rows), tuple(notes))


def _rows(compared: RealComparison) -> list[tuple[str, ...]]:
    names = {"fixed": f"{OURS}-A", "adaptive": OURS, "restart": f"{OURS}, restart"}
    rows = []
    entries = [(name, figures, None) for name, figures in compared.systems.items()]
    for name, figures, changes in [*entries, *((names[kind], r.figures, r) for kind, r in compared.replaced.items())]:
        head = (compared.load.arrivals, figure_text(compared.load.rate_seq_s), name)
        if figures is None:
            rows.append((*head, *["–"] * 6, "no placement", "–"))
            continue
        times = (figures.tail_s, figures.ttft_s, 1e3 * figures.tpot_s)
        cells = (figure_text(figures.normalised), percent_text(figures.in_time), *map(figure_text, times))
        ends = changes.intervals_s if changes else ()
        text = f"{len(ends)} of {ends[0]:.0f} to {ends[-1]:.0f}" if ends else "–"
        rows.append((*head, *cells, percent_text(figures.busy), text, str(changes.moved) if changes else "–"))
    return rows


def _ahead(compared: RealComparison) -> bool:
    ours = compared.replaced["adaptive"].figures.normalised
    return all(ours <= figures.normalised for figures in compared.systems.values() if figures)


def _factors(compared: Sequence[RealComparison]) -> list[str]:
    """Return the largest factors by which L_N is lower with replacement, per system."""
    notes = []
    for name in (*BASELINES, f"{OURS}-A"):
        factors = []
        for each in compared:
            figures = each.replaced["fixed"].figures if name not in each.systems else each.systems[name]
            if figures:
                factors.append(figures.normalised / each.replaced["adaptive"].figures.normalised)
        if factors:
            low, high = min(factors), max(factors)
            notes.append(f"{name}'s L_N is {figure_text(low)} to {figure_text(high)} times {OURS}'s.")
    return notes
