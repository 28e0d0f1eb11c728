"""Hermes' workload: nine applications in the published mix, their runs drawn with correlated demands, in bursts."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np

from exegpt.reproduction.hermes_samples import FILE, with_raw_samples
from xcore.applications.demand import MOST_HOPS
from xcore.applications.demand_graph import END, LLM, DemandGraph, DemandStep, read_demand_graphs
from xcore.errors import InputError
from xmulti.applications.submission import Call, Submission
from xmulti.files.call_log import LoggedCall, learn, read_calls

MIX = {
    "got_docmerge": 1,
    "langchain_mapreduce": 1,
    "code_feedback": 13,
    "hugginggpt": 13,
    "factool_code": 22,
    "factool_kbqa": 22,
    "factool_math": 3,
    "react_fever": 3,
    "react_alfw": 22,
}
"""Percent of all applications.

They are document merging, map-reduce summaries, code generation, plan and execution, checks of code, of answers, of
equations and of facts, and ALFWorld.
"""
CORRELATION = 0.8
"""Correlation of any two variables of a run, on the normal scale.

The published data has ten samples of each variable, without their joint distribution.
"""
BINS = 30
"""Number of parts of the submission window.

The number of arrivals in each part is exponential, and arrivals are uniform within a part.
"""
PROFILED_RUNS = 1000
"""Runs of each application from which demand graphs are learned."""
_NORMAL = NormalDist()

Sizes = tuple[str, str, tuple[int, int, int] | float, dict[str, int]]

BUILT_IN: dict[str, tuple[Sizes, ...]] = {
    "got_docmerge": (
        ("generate1", LLM, (1300, 800, 2), {"score1": 1}),
        ("score1", LLM, (1900, 300, 20), {"score1": 1, "aggregate": 1}),
        ("aggregate", LLM, (2900, 800, 2), {"score2": 1}),
        ("score2", LLM, (1900, 300, 20), {"score2": 1, "generate2": 1}),
        ("generate2", LLM, (2200, 800, 1), {"score3": 1}),
        ("score3", LLM, (1900, 300, 20), {END: 1}),
    ),
    "langchain_mapreduce": (
        ("summarise", LLM, (450, 150, 20), {"collapse": 7, "conclude": 3}),
        ("collapse", LLM, (1500, 600, 3), {"conclude": 8, "collapse": 2}),
        ("conclude", LLM, (1700, 670, 1), {END: 1}),
    ),
    "code_feedback": (
        ("generate", LLM, (1300, 250, 1), {"execute": 6, END: 4}),
        ("execute", "docker", 12.0, {"generate": 1}),
    ),
    "hugginggpt": (
        ("plan", LLM, (1800, 110, 1), {"infer": 1}),
        ("infer", "dnn", 25.0, {"respond": 1}),
        ("respond", LLM, (600, 500, 1), {END: 1}),
    ),
    "factool_code": (
        ("query", LLM, (360, 65, 1), {"solve": 1}),
        ("solve", LLM, (300, 180, 3), {"execute": 1}),
        ("execute", "docker", 1.0, {END: 1}),
    ),
    "factool_kbqa": (
        ("claims", LLM, (700, 70, 1), {"query": 1}),
        ("query", LLM, (350, 16, 4), {"search": 1}),
        ("search", "search", 1.3, {"verify": 1}),
        ("verify", LLM, (600, 140, 4), {END: 1}),
    ),
    "factool_math": (
        ("claims", LLM, (790, 80, 1), {"query": 1}),
        ("query", LLM, (240, 25, 3), {END: 1}),
    ),
    "react_fever": (
        ("think", LLM, (1100, 37, 1), {"search": 1, END: 1}),
        ("search", "search", 1.7, {"think": 1}),
    ),
    "react_alfw": (("think", LLM, (2300, 12, 1), {"think": 9, END: 1}),),
}
"""Round sizes of the same nine applications, for use without the published samples.

Each entry is (unit, backend, (input, output tokens, parallel requests) or seconds, next units by frequency).
"""


def find_graphs(path: Path | None = None) -> tuple[str, tuple[DemandGraph, ...]]:
    """Return the demand graphs and their source.

    The source is `path` (graphs, or a log of calls), otherwise EXEGPT_DATA's folder, otherwise the built-in sizes.
    Beside published graphs, of ten samples a unit, all published samples are used if they are there. The built-in
    sizes' ten samples are the middles of ten equal parts of a log-normal distribution (sigma 0.3). Raises InputError if
    an application of the mix is missing.
    """
    folder = os.environ.get("EXEGPT_DATA")
    public = Path(folder) / "hermes" / "pdgraphs.json" if folder else None
    source = path or (public if public and public.is_file() else None)
    if source is None:
        return "built-in sizes of the nine applications (set EXEGPT_DATA for the published samples)", built_in()
    graphs = learn(read_calls(source)) if source.suffix == ".jsonl" else read_demand_graphs(source)
    missing = sorted(set(MIX) - {graph.application for graph in graphs})
    if missing:
        raise InputError(f"'{source}' has no demand graph of {', '.join(missing)}: name a file with all nine.")
    raw = source.parent / FILE
    if source.suffix != ".jsonl" and raw.is_file():
        return f"the graphs of {source.name} with all samples of {raw.name}", with_raw_samples(graphs, raw)
    return f"the samples of each unit's variables in {source.name}", graphs


def built_in() -> tuple[DemandGraph, ...]:
    """Return the graphs of the built-in sizes."""
    factors = [math.exp(0.3 * _NORMAL.inv_cdf((i + 0.5) / 10)) for i in range(10)]
    graphs = []
    for application, sizes in BUILT_IN.items():
        units = []
        for name, backend, size, following in sizes:
            nexts = tuple(unit for unit, times in following.items() for _ in range(times))
            if isinstance(size, tuple):
                columns = [tuple(max(1, round(value * factor)) for factor in factors) for value in size]
                units.append(DemandStep(name, backend, nexts, *columns))
            else:
                units.append(DemandStep(name, backend, nexts, seconds=tuple(size * factor for factor in factors)))
        graphs.append(DemandGraph(DemandGraph.VERSION, application, (sizes[0][0],), tuple(units)))
    return tuple(graphs)


def draw_calls(graph: DemandGraph, random: np.random.Generator, spread: float = 0.0) -> tuple[Call, ...]:
    """Draw the calls of one run: next units by their frequency, and each variable as a quantile of its samples.

    The run's common level contributes CORRELATION to the quantile, and chance contributes the rest. Outputs and other
    backends' seconds are multiplied by one log-normal factor of the run, of mean 1, whose logarithm has the deviation
    `spread`.
    """
    level, calls = float(random.standard_normal()), list[Call]()
    factor = math.exp(spread * float(random.standard_normal()) - spread**2 / 2) if spread else 1.0
    units = {unit.name: unit for unit in graph.units}
    name = graph.start[random.integers(len(graph.start))]
    while name != END and len(calls) < MOST_HOPS:
        unit = units[name]
        draws = [_quantile(s, level, random) for s in (unit.input_tokens, unit.output_tokens, unit.parallel) if s]
        if unit.backend == LLM:
            sizes = [draws[0], factor * draws[1], draws[2]]
            calls.append(Call(name, LLM, *(max(1, round(value)) for value in sizes)))
        else:
            calls.append(Call(name, unit.backend, seconds=factor * _quantile(unit.seconds, level, random)))
        name = unit.next_units[random.integers(len(unit.next_units))]
    return tuple(calls)


def _quantile(samples: Sequence[float], level: float, random: np.random.Generator) -> float:
    """Return a quantile by linear interpolation between two samples."""
    normal = math.sqrt(CORRELATION) * level + math.sqrt(1 - CORRELATION) * random.standard_normal()
    rising = sorted(samples)
    whole, part = divmod(_NORMAL.cdf(normal) * (len(rising) - 1), 1)
    low, high = rising[int(whole)], rising[min(int(whole) + 1, len(rising) - 1)]
    return low + part * (high - low)


def learn_graphs(graphs: Sequence[DemandGraph], seed: int, spread: float = 0.0) -> dict[str, DemandGraph]:
    """Return the demand graphs learned from a log of PROFILED_RUNS of each application, by its name."""
    random = np.random.default_rng(seed)
    return {graph.application: learn(_logged(graph, random, spread))[0] for graph in graphs}


def _logged(graph: DemandGraph, random: np.random.Generator, spread: float) -> Iterator[LoggedCall]:
    for run in range(PROFILED_RUNS):
        calls = draw_calls(graph, random, spread)
        for call, following in zip(calls, [*(later.unit for later in calls[1:]), END], strict=True):
            where = graph.application, run, call.unit, following
            if call.on_llm:
                yield LoggedCall(*where, call.input_tokens, call.output_tokens, call.parallel, backend=call.backend)
            else:
                yield LoggedCall(*where, seconds=call.seconds, backend=call.backend)


def draw_submissions(
    graphs: Sequence[DemandGraph],
    count: int,
    window_s: float,
    seed: int,
    adapters: int | None = None,
    spread: float = 0.0,
) -> tuple[Submission, ...]:
    """Draw `count` applications in the mix, submitted in bursts over `window_s`.

    The number of each application is rounded to a whole number.
    """
    random = np.random.default_rng((seed, 1))
    by_name = {graph.application: graph for graph in graphs}
    shares = np.cumsum([0, *MIX.values()]) * count / 100
    names = [name for name, a, b in zip(MIX, shares, shares[1:], strict=False) for _ in range(round(b) - round(a))]
    random.shuffle(names)
    weights = random.exponential(size=BINS)
    bins = random.choice(BINS, count, p=weights / weights.sum())
    arrivals = np.sort((bins + random.random(count)) * window_s / BINS)
    return tuple(
        Submission(
            index,
            name,
            float(arrival_s),
            draw_calls(by_name[name], random, spread),
            adapter=None if adapters is None else int(random.integers(adapters)),
        )
        for index, (name, arrival_s) in enumerate(zip(names, arrivals, strict=True))
    )
