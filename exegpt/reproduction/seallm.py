"""SeaLLM's evaluation: sixteen services on 32 A800, SeaLLM beside dedicated GPUs, AlpaServe, MuxServe and its own
ablations.

Iterations take what the stock roofline says under the engine vLLM. Placements are searched on requests of the past,
drawn like those that are replayed. Loads are requests/s, and multiples of the highest rate at which dedicated GPUs
serve nine tenths of Poisson requests in time: what saturates the paper's cluster need not saturate a roofline.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from exegpt.app.processes import Processes
from exegpt.builtin_models import builtin_model
from exegpt.quantity import figure_text, percent_text
from exegpt.report.sections import Section
from exegpt.reproduction.seallm_replacement import Changing, Replacements, adaptive, first_placement, fixed
from exegpt.reproduction.seallm_systems import (
    RULES,
    SCALES,
    Figures,
    History,
    Rule,
    block_bytes_of,
    dedicated_engine,
    even_split,
    figures_of,
    merged_engine,
    mux_engines,
    replay_of,
    two_stage,
)
from exegpt.reproduction.seallm_workload import Asked, Traffic, services, traffic_of
from xscheduler.multimodel.two_stage import Group

STANDS_ON = (
    "Simulated: stock rooflines of A800-80GB under the engine vllm, fp16; log-normal lengths with the paper's means, "
    "Gamma arrivals; nothing here was run on a GPU."
)
NODES = 4
MULTIPLES = (0.5, 1.0, 2.0)
VARIATIONS = (1.0, 4.0, 8.0)
RATES = (2.0, 10.0, 25.0, 50.0)
"""The paper's range, requests/s."""
SWEPT = 20.0
REPLAYED, REPLAYED_S = 2000, 120.0
"""At least so many requests, and so many seconds, are replayed."""
PAST, PAST_S = 640, 60.0
"""And so many simulated for a placement."""
SUSTAINED = 0.9
"""Share of requests in time."""
PRECISION = 0.03
DENSITIES = {0.5: 8, 0.67: 6, 1.0: 4, 2.0: 2}
"""Nodes by the paper's densities."""
RUNS = (1, 2, 4, 8, 16)
NOISES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
OURS = "SeaLLM"
OWN = {
    OURS: "seallm, prompts first",
    "SeaLLM, by the letter": "seallm",
    "SeaLLM-F": "fcfs, prompts first",
    "SeaLLM-M": "mlfq",
    "SeaLLM, true lengths": "oracle, prompts first",
}
"""Rules on SeaLLM's placement. Algorithm 2 by the letter lets prompts wait for residents of their own service. MLFQ is
FastServe's, which sorts prompts and residents by one key.
"""
BASELINES = ("vLLM", "AlpaServe", "MuxServe")
PAPER = {
    "vLLM": (10.38, 12.13, 1.82),
    "AlpaServe": (9.52, 5.80, 3.64),
    "MuxServe": (13.60, 18.69, 2.11),
    "SeaLLM-F": (4.17, None, 1.37),
    "SeaLLM-M": (4.17, None, 1.37),
}
"""By how much SeaLLM's L_N, 99th percentile and share in time are better, at most; both orders together in one."""
PAIRS = (
    ("llama-2-7b", "llama-2-7b"),
    ("llama-2-7b", "llama-2-13b"),
    ("llama-2-13b", "llama-2-7b"),
    ("llama-2-7b", "opt-6.7b"),
    ("llama-2-70b", "llama-2-13b"),
)
KINDS = ("fixed", "adaptive", "restart")
CHANGING = Changing(10.0, 4.0, 4, 300.0)
AT_ONCE = 4
"""Pieces of work between two reports of progress."""


@dataclass(frozen=True)
class Scenario:
    """One load on one cluster."""

    name: str
    rate_seq_s: float
    variation: float
    nodes: int = NODES
    noise: float = 0.0
    run: int = 1

    @property
    def traffic(self) -> Traffic:
        """What is replayed."""
        seconds = max(REPLAYED_S, REPLAYED / self.rate_seq_s)
        return Traffic(self.rate_seq_s, self.variation, seconds, 1, self.noise, self.run)

    @property
    def past(self) -> Traffic:
        """What placements are searched on."""
        return replace(self.traffic, seconds=max(PAST_S, PAST / self.rate_seq_s), seed=2)


@dataclass(frozen=True)
class Measured:
    """A scenario under all systems; None where one has no placement."""

    scenario: Scenario
    systems: dict[str, Figures | None]
    placements: dict[str, str]
    """Groups by their sizes, of AlpaServe and SeaLLM."""


@dataclass(frozen=True)
class Blocks:
    """Two LLMs that share a cache."""

    pair: str
    slots: int
    """Blocks of the first in a merged block."""
    wasted: float
    """Share of a merged block that its slots leave."""
    merged_entries: int
    """Of its table, for a block: the merged block's number, and the slot."""
    split_entries: int
    """One for every head of every layer."""


@dataclass(frozen=True)
class Described:
    """A service, its mean lengths in tokens, and what its requests take alone."""

    name: str
    llm: str
    input: float
    output: float
    mean_s: float
    sd_s: float
    popularity: float


@dataclass(frozen=True)
class SeaLLM:
    """All of it."""

    sustained_seq_s: float
    services: tuple[Described, ...]
    loads: tuple[Measured, ...]
    rates: tuple[Measured, ...]
    replacements: dict[str, Replacements]
    blocks: tuple[Blocks, ...]
    sweeps: tuple[Measured, ...] = ()


def measure(scenario: Scenario) -> Measured:
    """Replay a scenario under all systems."""
    asked = traffic_of(scenario.traffic, services())
    history = History(services(), traffic_of(scenario.past, services()), scenario.nodes, scenario.rate_seq_s)
    systems: dict[str, Figures | None] = {"vLLM": dedicated(asked, scenario.nodes)}
    placements = {}
    for name, rule in (("AlpaServe", "fcfs, prompts first"), (OURS, OWN[OURS])):
        placed = two_stage(history, RULES[rule])
        placements[name] = _sizes(placed.groups)
        systems[name] = _replayed(asked, placed.groups, RULES[rule])
    mux = mux_engines(history)
    systems["MuxServe"] = figures_of(services(), asked, replay_of(asked, mux)) if mux else None
    for name, rule in OWN.items():
        if name != OURS:
            systems[name] = _replayed(asked, placed.groups, RULES[rule])
    return Measured(scenario, systems, placements)


def dedicated(asked: dict[str, Asked], nodes: int) -> Figures | None:
    """On devices of their own, in equal parts; None where they don't suffice."""
    groups = even_split(services(), nodes)
    if groups is None:
        return None
    by_name = {service.name: service for service in services()}
    return figures_of(services(), asked, replay_of(asked, [dedicated_engine(group, by_name) for group in groups]))


def _replayed(asked: dict[str, Asked], groups: tuple[Group, ...], rule: Rule) -> Figures:
    by_name = {service.name: service for service in services()}
    engines = [merged_engine(group, by_name, rule) for group in groups if group.services]
    return figures_of(services(), asked, replay_of(asked, engines))


def _sizes(groups: tuple[Group, ...]) -> str:
    """Like `4 × 2, 24 × 1`."""
    sizes = [len(group.devices) for group in groups]
    return ", ".join(f"{sizes.count(size)} × {size}" for size in sorted(set(sizes), reverse=True))


def sustained() -> float:
    """The highest rate of Poisson arrivals that dedicated GPUs serve in time for nine tenths, by bisection."""

    def holds(rate: float) -> bool:
        found = dedicated(traffic_of(Scenario("", rate, 1.0).traffic, services()), NODES)
        return found is not None and found.in_time >= SUSTAINED

    low, high = 0.25, 0.5
    while holds(high):
        low, high = high, 2 * high
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def replaced(kind: str) -> Replacements:
    """SeaLLM while popularities change: `fixed`, `adaptive` or `restart`."""
    rule = RULES[OWN[OURS]]
    placed = first_placement(CHANGING, rule)
    if kind == "fixed":
        return fixed(CHANGING, rule, placed)
    return adaptive(CHANGING, rule, placed, restart=kind == "restart")


def work(scenario: Scenario | str) -> Measured | Replacements:
    """A piece of work for a process."""
    return replaced(scenario) if isinstance(scenario, str) else measure(scenario)


def reproduce(progress: Callable[[int, int], None] = lambda done, total: None, sweeps: bool = False) -> SeaLLM:
    """All loads, the ablations, and replacement; with `sweeps` also densities, runs and noise."""
    progress(0, 100)
    base = sustained()
    loads = [Scenario(f"{k:g}x", k * base, cv) for cv in VARIATIONS for k in MULTIPLES]
    rates = [Scenario(f"{rate:g}/s", rate, 4.0) for rate in RATES]
    varied = sweep_scenarios() if sweeps else []
    tasks: list[Scenario | str] = [*sorted([*loads, *rates, *varied], key=lambda s: -s.rate_seq_s)]
    tasks = [*KINDS, *tasks]  # the longest first
    found: dict[Scenario | str, Measured | Replacements] = {}
    with Processes() as processes:
        for first in range(0, len(tasks), AT_ONCE):
            progress(first, len(tasks))
            some = tasks[first : first + AT_ONCE]
            found |= zip(some, processes.each(work, [(task,) for task in some]), strict=True)

    def of(scenarios: list[Scenario]) -> tuple[Measured, ...]:
        return tuple(entry for each in scenarios if isinstance(entry := found[each], Measured))

    replacements = {kind: entry for kind in KINDS if isinstance(entry := found[kind], Replacements)}
    return SeaLLM(base, described(), of(loads), of(rates), replacements, blocks(), of(varied))


def sweep_scenarios() -> list[Scenario]:
    """Densities, runs of one service, and noise in lengths, at the paper's middle rate."""
    return [
        *(Scenario(f"density {density:g}", SWEPT, 4.0, nodes) for density, nodes in DENSITIES.items()),
        *(Scenario(f"runs of {run}", SWEPT, 1.0, run=run) for run in RUNS),
        *(Scenario(f"noise {noise:g}x", SWEPT, 4.0, noise=noise) for noise in NOISES),
    ]


def described() -> tuple[Described, ...]:
    """The services."""
    return tuple(
        Described(s.name, s.llm, float(s.inputs.mean()), float(s.outputs.mean()), s.mean_s, s.sd_s, s.popularity)
        for s in services()
    )


def blocks() -> tuple[Blocks, ...]:
    """Pairs of the paper's Figures 9 and 15, and 70B beside 13B."""
    found = []
    for first, second in PAIRS:
        own, largest = block_bytes_of(first), max(map(block_bytes_of, (first, second)))
        slots = largest // own
        spec = builtin_model(first)
        found.append(
            Blocks(f"{first} beside {second}", slots, 1 - slots * own / largest, 2, spec.layers * spec.kv_heads)
        )
    return tuple(found)


def sections(result: SeaLLM) -> list[Section]:
    """Services, loads, ablations, SLO scales, replacement, blocks, and sweeps where there are any."""
    columns = ("requests/s", "CV", "requests", "system", "L_N", "in time", "99 %, s", "TTFT, s", "TPOT, ms", "groups")
    measured = (*result.rates, *result.loads)
    loads = tuple(row for each in measured for row in _rows(each, result.sustained_seq_s))
    shown = [
        _services(result),
        Section("SeaLLM: 16 services on 32 A800", columns, loads, (*_targets(measured), *_gains(measured))),
        Section(
            "what it is that requests meet, in L_N",
            ("requests/s", "CV", "system", "waiting", "to the first token", "decoding", "busy", "preempted", "late"),
            tuple(row for each in result.loads for row in _timeline(each)),
            ("busy: share of the engines' time; late: services of which fewer than 90 % are in time.",),
        ),
        Section(
            "share in time by SLO scale, over each service's mean time alone",
            ("requests/s", "CV", "system", *(f"{scale:g}x" for scale in SCALES)),
            tuple(row for each in result.rates for row in _scales(each)),
        ),
        _replacement(result),
        Section(
            "KV blocks of two LLMs over one memory",
            ("LLM", "slots", "wasted", "table entries, merged", "split"),
            tuple(
                (b.pair, str(b.slots), percent_text(b.wasted), str(b.merged_entries), f"{b.split_entries:,}")
                for b in result.blocks
            ),
            ("Iterations are charged 4 % where blocks of two services are alike, 8 % where they differ.",),
        ),
    ]
    if result.sweeps:
        rows = tuple(row for each in result.sweeps for row in _sweep_rows(each))
        shown.append(Section("sweeps", ("sweep", "system", "L_N", "in time", "TPOT, ms"), rows))
    return shown


def _services(result: SeaLLM) -> Section:
    rows = tuple(
        (
            s.name,
            s.llm,
            f"{s.input:,.0f}",
            f"{s.output:,.0f}",
            figure_text(s.mean_s),
            figure_text(s.sd_s),
            percent_text(s.popularity),
        )
        for s in result.services
    )
    note = f"Dedicated GPUs serve 90 % in time up to {figure_text(result.sustained_seq_s)} Poisson requests/s."
    columns = ("service", "LLM", "prompt", "output", "alone, s", "deviation, s", "of requests")
    return Section("services", columns, rows, (note,))


def _rows(measured: Measured, base: float) -> list[tuple[str, ...]]:
    scenario, rows = measured.scenario, []
    load = f"{figure_text(scenario.rate_seq_s)} ({figure_text(scenario.rate_seq_s / base)}x)"
    for system, own in measured.systems.items():
        head = (load, f"{scenario.variation:g}")
        if own is None:
            rows.append((*head, "–", system, *["–"] * 5, "no placement"))
            continue
        figures = (own.normalised, own.tail_s, own.ttft_s, 1e3 * own.tpot_s)
        normalised, tail, ttft, tpot = map(figure_text, figures)
        groups = measured.placements.get(system, "")
        rows.append(
            (*head, f"{own.requests:,}", system, normalised, percent_text(own.in_time), tail, ttft, tpot, groups)
        )
    return rows


def _timeline(measured: Measured) -> list[tuple[str, ...]]:
    scenario, rows = measured.scenario, []
    for system, own in measured.systems.items():
        if own:
            parts = (own.waiting, own.first, own.normalised - own.waiting - own.first)
            rows.append(
                (
                    figure_text(scenario.rate_seq_s),
                    f"{scenario.variation:g}",
                    system,
                    *map(figure_text, parts),
                    percent_text(own.busy),
                    f"{own.preemptions:,}",
                    str(own.services_late),
                )
            )
    return rows


def _scales(measured: Measured) -> list[tuple[str, ...]]:
    head = (figure_text(measured.scenario.rate_seq_s), f"{measured.scenario.variation:g}")
    return [
        (*head, system, *map(percent_text, own.in_time_at))
        for system, own in measured.systems.items()
        if own and system in (*BASELINES, OURS)
    ]


def _sweep_rows(measured: Measured) -> list[tuple[str, ...]]:
    rows = []
    for system in (*BASELINES, OURS):
        own = measured.systems[system]
        cells = (figure_text(own.normalised), percent_text(own.in_time), figure_text(1e3 * own.tpot_s)) if own else None
        rows.append((measured.scenario.name, system, *(cells or ("no placement", "–", "–"))))
    return rows


def _targets(measured: tuple[Measured, ...]) -> list[str]:
    """The paper's level, and the order of the systems."""
    count, level, first, orders = len(measured), 0, {"L_N": 0, "in time": 0}, {"SeaLLM-F": 0, "SeaLLM-M": 0}
    for each in measured:
        ours = each.systems[OURS]
        assert ours, "SeaLLM has a placement"
        others = [own for name in BASELINES if (own := each.systems[name])]
        level += ours.normalised < 3 and ours.in_time > 0.9
        first["L_N"] += all(ours.normalised <= own.normalised for own in others)
        first["in time"] += all(ours.in_time >= own.in_time for own in others)
        for name in orders:
            own = each.systems[name]
            orders[name] += own is not None and ours.normalised <= own.normalised
    below = [
        e.scenario.rate_seq_s for e in measured if (o := e.systems[OURS]) and (o.normalised >= 3 or o.in_time <= 0.9)
    ]
    fails = f" (not at {', '.join(figure_text(rate) for rate in sorted(set(below)))}/s)" if below else ""
    return [
        f"L_N below 3 and over 90 % in time: in {level} of {count}{fails} (paper: throughout).",
        *(
            f"SeaLLM is before all baselines by {metric} in {n} of {count} (paper: in all)."
            for metric, n in first.items()
        ),
        *(f"SeaLLM's L_N is no higher than {name}'s in {n} of {count} (paper: in all)." for name, n in orders.items()),
    ]


def _gains(measured: tuple[Measured, ...]) -> list[str]:
    """The largest factors, beside the paper's."""
    notes = []
    for system, published in PAPER.items():
        pairs = [(own, ours) for e in measured if (own := e.systems[system]) and (ours := e.systems[OURS])]
        factors = (
            max(own.normalised / ours.normalised for own, ours in pairs),
            max(own.tail_s / ours.tail_s for own, ours in pairs),
            max(ours.in_time / own.in_time for own, ours in pairs),
        )
        texts = ", ".join(
            f"{what} {figure_text(own)}" + ("" if theirs is None else f" ({theirs:g})")
            for what, own, theirs in zip(("L_N", "99 %", "in time"), factors, published, strict=True)
        )
        notes.append(f"At most, over {system} (paper): {texts}.")
    ttft = max(
        own.ttft_s / o.ttft_s for e in measured for n in BASELINES if (own := e.systems[n]) and (o := e.systems[OURS])
    )
    return [*notes, f"TTFT at most {figure_text(ttft)} times shorter than a baseline's (paper: 51.98)."]


def _replacement(result: SeaLLM) -> Section:
    rows = tuple(
        (
            kind,
            figure_text(r.figures.normalised),
            percent_text(r.figures.in_time),
            figure_text(r.figures.ttft_s),
            ", ".join(f"{seconds:.0f}" for seconds in r.intervals_s) or "–",
            ", ".join(figure_text(error) for error in r.errors) or "–",
            str(r.moved),
        )
        for kind, r in result.replacements.items()
    )
    ratio = result.replacements["fixed"].figures.normalised / result.replacements["adaptive"].figures.normalised
    notes = (
        f"SeaLLM-A, the fixed placement, has {figure_text(ratio)} times the L_N (paper: up to 2.44).",
        f"{CHANGING.phases} phases of {CHANGING.phase_s:g} s at {CHANGING.rate_seq_s:g} requests/s, CV "
        f"{CHANGING.variation:g}; popularities move to other services after each.",
    )
    columns = ("placement", "L_N", "in time", "TTFT, s", "intervals, s", "error", "engines changed")
    return Section("replacement while popularities change", columns, rows, notes)
