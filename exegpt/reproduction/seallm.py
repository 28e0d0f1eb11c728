"""SeaLLM's evaluation: sixteen services on 32 A800, compared with dedicated GPUs, AlpaServe, MuxServe and ablations.

Iteration times are those of the stock roofline under engine vLLM. Placements are searched on past requests, drawn from
the same distributions as the replayed ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from exegpt.report.sections import Section
from exegpt.reproduction import seallm_arrivals, seallm_placement
from exegpt.reproduction.seallm_arrivals import RealComparison, RealLoad, real_loads
from exegpt.reproduction.seallm_placement import PlacementTime, placement_times
from exegpt.reproduction.seallm_systems import (
    BASELINES,
    OURS,
    RULES,
    SCALES,
    Figures,
    History,
    alone_replay,
    dedicated_engines,
    figures_of,
    merged_engines,
    mux_engines,
    replay_of,
    two_stage,
)
from exegpt.reproduction.seallm_workload import NODES, Traffic, kv_block, services, traffic_of
from xcore.batching.shared_pool import merged_bytes
from xcore.processes import Processes
from xcore.quantity import figure_text, percent_text
from xcore.specs.builtin_models import builtin_model
from xmulti.sharing.cluster_replay import SharedEngine
from xmulti.sharing.iteration_cost import sharing_overhead

STANDS_ON = (
    "Simulated: stock rooflines of A800-80GB under the engine vllm, fp16; log-normal lengths with the paper's means, "
    "Gamma arrivals; nothing here was run on a GPU."
)
RATES = (2.0, 10.0, 25.0, 50.0)
"""The paper's range, requests/s."""
VARIATIONS = (1.0, 4.0, 8.0)
USUAL, SWEPT = 4.0, 20.0
"""The arrivals' coefficient of variation in ablations, SLO scales and sweeps, and the rate of the sweeps."""
REPLAYED, REPLAYED_S = 2000, 120.0
"""Minimum requests, and minimum seconds, that are replayed."""
PAST, PAST_S = 640, 60.0
"""Minimum requests, and minimum seconds, that are simulated for a placement."""
DENSITIES = {0.5: 8, 0.67: 6, 1.0: 4, 2.0: 2}
"""Nodes for each of the paper's densities."""
RUNS = (1, 4, 16)
NOISES = (1.0, 4.0, 16.0)
ALONE = "each service alone there"
"""Each service on SeaLLM's placement, as if the others in its group had no requests: a lower bound for any order."""
ORDERS, LEVEL = ("SeaLLM-F", "SeaLLM-M"), (3.0, 0.9)
TABLE_2 = {OURS: 1.60, "AlpaServe": 11.18, "vLLM": 13.05, "MuxServe": 19.39}
"""The paper's L_N at one load, simulated."""
PAPER = {
    "vLLM": (10.38, 12.13, 1.82),
    "AlpaServe": (9.52, 5.80, 3.64),
    "MuxServe": (13.60, 18.69, 2.11),
    "SeaLLM-F": (4.17, None, 1.37),
    "SeaLLM-M": (4.17, None, 1.37),
}
"""Maximum factors by which SeaLLM's L_N, 99th percentile and share in time are better; both orders combined."""
PAIRS = (
    ("llama-2-7b", "llama-2-7b"),
    ("llama-2-7b", "llama-2-13b"),
    ("llama-2-13b", "llama-2-7b"),
    ("llama-2-7b", "opt-6.7b"),
    ("llama-2-70b", "llama-2-13b"),
)
QUICK = (
    "two rates (2 and 10/s) of four and one burstiness (CV 4) of three; 1,000 requests of each trace at one rate of "
    "three; no drift; one placement's time; one sweep value of each kind"
)
QUICK_RATES = RATES[:2]
"""What `quick` leaves out, and the rates that it runs."""
AT_ONCE = 4
"""Number of tasks between two reports of progress."""


@dataclass(frozen=True)
class SeaLLMScenario:
    """One load on one cluster."""

    name: str
    rate_seq_s: float
    variation: float
    nodes: int = NODES
    noise: float = 0.0
    run: int = 1
    ablated: bool = False

    @property
    def traffic(self) -> Traffic:
        """The replayed requests."""
        seconds = max(REPLAYED_S, REPLAYED / self.rate_seq_s)
        return Traffic(self.rate_seq_s, self.variation, seconds, 1, self.noise, self.run)

    @property
    def past(self) -> Traffic:
        """The requests that placements are searched on."""
        return replace(self.traffic, seconds=max(PAST_S, PAST / self.rate_seq_s), seed=2)


@dataclass(frozen=True)
class ScenarioResult:
    """The results of a scenario under all systems; None if a system has no placement."""

    scenario: SeaLLMScenario
    systems: dict[str, Figures | None]


@dataclass(frozen=True)
class SeaLLM:
    """Loads, real arrivals and the time of placements, or sweeps."""

    loads: tuple[ScenarioResult, ...] = ()
    real: tuple[RealComparison, ...] = ()
    placements: tuple[PlacementTime, ...] = ()
    sweeps: tuple[ScenarioResult, ...] = ()


def load_scenarios(quick: bool = False) -> list[SeaLLMScenario]:
    """Return the paper's rates, in three kinds of bursts, one of them with the ablations."""
    rates, variations = (QUICK_RATES, (USUAL,)) if quick else (RATES, VARIATIONS)
    return [SeaLLMScenario("load", rate, cv, ablated=cv == USUAL) for rate in rates for cv in variations]


def sweep_scenarios(quick: bool = False) -> list[SeaLLMScenario]:
    """Return densities, runs of one service, and noise in lengths, at the middle of the paper's rates."""
    last = -1 if quick else None
    return [
        *(
            SeaLLMScenario(f"density {density:g}", SWEPT, USUAL, nodes)
            for density, nodes in [*DENSITIES.items()][last:]
        ),
        *(SeaLLMScenario(f"runs of {run}", SWEPT, 1.0, run=run) for run in RUNS[last:]),
        *(SeaLLMScenario(f"noise {noise:g}x", SWEPT, USUAL, noise=noise) for noise in NOISES[last:]),
    ]


def measure(scenario: SeaLLMScenario) -> ScenarioResult:
    """Replay a scenario under all systems."""
    asked, past = traffic_of(scenario.traffic, services()), traffic_of(scenario.past, services())
    history = History(services(), past, scenario.nodes, scenario.rate_seq_s)
    engines: dict[str, list[SharedEngine] | None] = dict.fromkeys(BASELINES)
    engines["vLLM"], engines["MuxServe"] = dedicated_engines(services(), scenario.nodes), mux_engines(history)
    placed = {name: two_stage(history, RULES[name]) for name in ("AlpaServe", OURS)}
    for name in [*RULES] if scenario.ablated else [*placed]:
        where = placed.get(name, placed[OURS])
        engines[name] = merged_engines(where.groups, history.by_name, RULES[name]) if where else None
    figures = {name: figures_of(asked, replay_of(asked, of), of) if of else None for name, of in engines.items()}
    ours, where = engines[OURS], placed[OURS]
    if scenario.name == "load" and ours and where:
        figures[ALONE] = figures_of(asked, alone_replay(asked, where.groups, history, RULES[OURS]), ours)
    return ScenarioResult(scenario, figures)


def work(what: SeaLLMScenario | RealLoad) -> ScenarioResult | RealComparison:
    """Run one task of a process."""
    return seallm_arrivals.compare(what) if isinstance(what, RealLoad) else measure(what)


def reproduce(
    progress: Callable[[int, int], None] = lambda done, total: None, sweeps: bool = False, quick: bool = False
) -> SeaLLM:
    """Run all loads, the ablations, and real arrivals; or, with `sweeps`, densities, runs and noise."""
    scenarios = sweep_scenarios(quick) if sweeps else load_scenarios(quick)
    falling = sorted(scenarios, key=lambda scenario: -scenario.rate_seq_s)
    tasks: list[SeaLLMScenario | RealLoad] = [*([] if sweeps else real_loads(quick)), *falling]  # the longest first
    results: dict[SeaLLMScenario | RealLoad, ScenarioResult | RealComparison] = {}
    with Processes() as processes:
        for first in range(0, len(tasks), AT_ONCE):
            progress(first, len(tasks))
            some = tasks[first : first + AT_ONCE]
            results |= zip(some, processes.each(work, [(task,) for task in some]), strict=True)
    measured = tuple(entry for each in scenarios if isinstance(entry := results[each], ScenarioResult))
    if sweeps:
        return SeaLLM(sweeps=measured)
    compared = tuple(entry for entry in results.values() if isinstance(entry, RealComparison))
    sizes = seallm_placement.QUICK_SIZES if quick else seallm_placement.SIZES
    return SeaLLM(measured, compared, placement_times(sizes))


def sections(result: SeaLLM) -> list[Section]:
    """Return services, loads, SLO scales, real arrivals, blocks and the time of placements; or sweeps."""
    if result.sweeps:
        rows = tuple(row for each in result.sweeps for row in _sweep_rows(each))
        heads = ("sweep", "system", "L_N", "in time", "TPOT, ms")
        return [Section("sweeps", heads, rows, tuple(_firsts(result.sweeps)))]
    usual = [each for each in result.loads if each.scenario.variation == USUAL]
    columns = ("requests/s", "CV", "system", "L_N", "waiting", "to the first token", "decoding", "in time", "99 %, s")
    more = ("TTFT, s", "TPOT, ms", "busy", "preempted", "late", "devices")
    return [
        _services(),
        Section(
            "SeaLLM: 16 services on 32 A800",
            (*columns, *more),
            tuple(row for each in result.loads for row in _rows(each)),
            (
                "L_N is the sum of the next three columns. busy: share of the engines' time. late: services with fewer "
                "than 90 % of their requests in time.",
                *_targets(result.loads),
                *_gains(result.loads),
            ),
        ),
        Section(
            f"share in time by SLO scale, over each service's mean time alone, CV {USUAL:g}",
            ("requests/s", "system", *(f"{scale:g}x" for scale in SCALES)),
            tuple(
                (figure_text(each.scenario.rate_seq_s), system, *map(percent_text, figures.in_time_at))
                for each in usual
                for system in (*BASELINES, OURS)
                if (figures := each.systems[system])
            ),
        ),
        seallm_arrivals.section(result.real),
        _blocks(),
        seallm_placement.section(result.placements),
    ]


def _services() -> Section:
    rows = tuple(
        (
            s.name,
            s.llm,
            f"{s.inputs.mean():,.0f}",
            f"{s.outputs.mean():,.0f}",
            figure_text(s.mean_s),
            figure_text(s.sd_s),
            percent_text(s.popularity),
        )
        for s in services()
    )
    return Section("services", ("service", "LLM", "prompt", "output", "alone, s", "deviation, s", "of requests"), rows)


def _rows(measured: ScenarioResult) -> list[tuple[str, ...]]:
    scenario, rows = measured.scenario, []
    for system, figures in measured.systems.items():
        head = (figure_text(scenario.rate_seq_s), f"{scenario.variation:g}", system)
        if figures is None:
            rows.append((*head, *["–"] * 11, "no placement"))
            continue
        parts = (
            figures.normalised,
            figures.waiting,
            figures.first,
            figures.normalised - figures.waiting - figures.first,
        )
        times = (figures.tail_s, figures.ttft_s, 1e3 * figures.tpot_s)
        counts = (percent_text(figures.busy), f"{figures.preemptions:,}", str(figures.services_late), figures.groups)
        rows.append((*head, *map(figure_text, parts), percent_text(figures.in_time), *map(figure_text, times), *counts))
    return rows


def _sweep_rows(measured: ScenarioResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for system in (*BASELINES, OURS):
        figures = measured.systems[system]
        cells = (
            (figure_text(figures.normalised), percent_text(figures.in_time), figure_text(1e3 * figures.tpot_s))
            if figures
            else None
        )
        rows.append((measured.scenario.name, system, *(cells or ("no placement", "–", "–"))))
    return rows


def _targets(loads: tuple[ScenarioResult, ...]) -> list[str]:
    """Return sentences that compare our L_N and our order of the systems with the paper's."""
    ours = [(each.scenario, figures) for each in loads if (figures := each.systems[OURS])]
    missed = [scenario for scenario, figures in ours if figures.normalised >= LEVEL[0] or figures.in_time <= LEVEL[1]]
    where = ", ".join(f"{figure_text(s.rate_seq_s)}/s with CV {s.variation:g}" for s in missed)
    return [
        f"L_N is below 3, with over 90 % in time, in {len(ours) - len(missed)} of {len(loads)} loads"
        f"{f', not at {where}' if where else ''} (paper: in all).",
        *_bursts(loads, missed),
        *_firsts(loads),
        f"L_N rises from {' to '.join(TABLE_2)} in {sum(map(_in_order, loads))} of {len(loads)} loads (paper's Table "
        f"2: {', '.join(map(figure_text, TABLE_2.values()))}).",
        *(
            f"SeaLLM's L_N is no higher than {name}'s in {_count(loads, (name,), lambda figures: figures.normalised)}."
            for name in ORDERS
        ),
        f"SeaLLM's TPOT is no higher than AlpaServe's in {_count(loads, ('AlpaServe',), lambda ours: ours.tpot_s)}.",
    ]


def _bursts(loads: tuple[ScenarioResult, ...], missed: list[SeaLLMScenario]) -> list[str]:
    """Return how many of the missed scenarios are missed even if each service runs alone."""
    alone = [figures for each in loads if each.scenario in missed and (figures := each.systems.get(ALONE))]
    if not alone:
        return []
    late = sum(figures.normalised >= LEVEL[0] or figures.in_time <= LEVEL[1] for figures in alone)
    return [f"In {late} of the other {len(alone)}, this is missed even if services share GPUs with idle services only."]


def _in_order(measured: ScenarioResult) -> bool:
    """Return whether the systems with a placement are in the order of the paper's Table 2."""
    reached = [figures.normalised for name in TABLE_2 if (figures := measured.systems[name])]
    return reached == sorted(reached)


def _firsts(measured: tuple[ScenarioResult, ...]) -> list[str]:
    """Return how often SeaLLM is better than all baselines."""
    by: dict[str, Callable[[Figures], float]] = {
        "L_N": lambda figures: figures.normalised,
        "share in time": lambda figures: -figures.in_time,
    }
    return [
        f"SeaLLM is ahead of all baselines by {what} in {_count(measured, BASELINES, of)}." for what, of in by.items()
    ]


def _count(measured: tuple[ScenarioResult, ...], others: tuple[str, ...], of: Callable[[Figures], float]) -> str:
    """Return in how many scenarios SeaLLM's figure is at most that of every other system that has a figure."""
    beats = [
        all(of(ours) <= of(figures) for name in others if (figures := each.systems[name]))
        for each in measured
        if (ours := each.systems[OURS]) and others[-1] in each.systems
    ]
    return f"{sum(beats)} of {len(beats)} loads (paper: in all)"


def _gains(loads: tuple[ScenarioResult, ...]) -> list[str]:
    """Return the largest factors, next to the paper's."""
    notes = []
    for system, published in PAPER.items():
        pairs = [
            (figures, ours) for each in loads if (figures := each.systems.get(system)) and (ours := each.systems[OURS])
        ]
        if not pairs:
            notes.append(f"{system} has no placement.")
            continue
        factors = (
            max(figures.normalised / ours.normalised for figures, ours in pairs),
            max(figures.tail_s / ours.tail_s for figures, ours in pairs),
            max(ours.in_time / figures.in_time for figures, ours in pairs),
        )
        texts = ", ".join(
            f"{what} {figure_text(factor)}" + ("" if theirs is None else f" ({theirs:g})")
            for what, factor, theirs in zip(("L_N", "99 %", "in time"), factors, published, strict=True)
        )
        ttft = max(figures.ttft_s / ours.ttft_s for figures, ours in pairs)
        notes.append(f"Largest factors over {system} (paper): {texts}; TTFT {figure_text(ttft)}.")
    return [*notes, "The paper's TTFT is at most 51.98 times shorter than a baseline's."]


def _blocks() -> Section:
    """Return pairs of the paper's Figures 9 and 15, and 70B with 13B."""
    rows = []
    for pair in PAIRS:
        specs = [builtin_model(llm) for llm in pair]
        sizes = [kv_block(spec) for spec in specs]
        (block, _), merged = sizes[0], merged_bytes(sizes)
        slots, heads = merged // block, specs[0].layers * specs[0].kv_heads
        overhead = sharing_overhead([size for size, _ in sizes]) - 1
        cells = (percent_text(1 - slots * block / merged), percent_text(overhead), "2", f"{heads:,}")
        rows.append((f"{pair[0]} beside {pair[1]}", str(slots), *cells))
    return Section(
        "KV blocks of two LLMs over one memory",
        ("LLM", "slots", "wasted", "iterations longer", "table entries, merged", "split"),
        tuple(rows),
        ("A merged block has two table entries, its number and its slot; a split one has one per head and layer.",),
    )
