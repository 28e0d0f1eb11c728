"""Hermes' raw samples: all that its repository publishes of each unit, in place of the ten that its graphs have."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from xcore.applications.demand_graph import END, LLM, DemandGraph, DemandStep
from xcore.document import read_json
from xcore.errors import InputError

FILE = "task_models_skewnorm.json"
NEXTS = 1000
"""Next units by which a published share is written."""


def with_raw_samples(graphs: Sequence[DemandGraph], path: Path) -> tuple[DemandGraph, ...]:
    """Return demand graphs with the samples of Hermes' fitted models: 23 to 223 of each LLM unit.

    A call of another backend takes as long as the gap before the LLM unit that follows it. Shares of next units are the
    published ones where they name the same LLM units as the graph, else those of the graph.

    Raises:
        InputError: The file lacks an application or a unit.
    """
    data = read_json(path)
    return tuple(_application(graph, data, path) for graph in graphs)


def _application(graph: DemandGraph, data: Any, path: Path) -> DemandGraph:
    units = data.get(graph.application) if isinstance(data, dict) else None
    if not isinstance(units, dict):
        raise InputError(f"'{path}' has no samples of '{graph.application}': name a file with all applications.")
    return replace(graph, units=tuple(_unit(graph, step, units, path) for step in graph.units))


def _unit(graph: DemandGraph, step: DemandStep, units: dict[str, Any], path: Path) -> DemandStep:
    if step.backend != LLM:
        (following,) = {*step.next_units} if len({*step.next_units}) == 1 else {END}
        gaps_ms = units[following]["stage_gap"] if following in units else ()
        return replace(step, seconds=tuple(ms / 1000 for ms in gaps_ms)) if gaps_ms else step
    if step.name not in units:
        raise InputError(f"'{path}' has no unit '{step.name}' of '{graph.application}': name the published file.")
    samples = units[step.name]
    inputs, outputs = tuple(samples["input_len"]), tuple(samples["output_len"])
    parallel = tuple(islice(cycle(samples["parallelism"]), len(inputs)))
    nexts = _next_units(graph, step, samples["next_stages"])
    return replace(step, input_tokens=inputs, output_tokens=outputs, parallel=parallel, next_units=nexts)


def _next_units(graph: DemandGraph, step: DemandStep, shares: dict[str, float]) -> tuple[str, ...]:
    """Return a unit's next units by the published shares of the LLM units behind them."""
    behind = {name: _llm_behind(graph, name) for name in dict.fromkeys(step.next_units)}
    if {*behind.values()} - {END} != {*shares}:
        return step.next_units
    ends = max(0.0, 1.0 - sum(shares.values()))
    nexts = [name for name, llm in behind.items() for _ in range(round(NEXTS * shares.get(llm, ends)))]
    return tuple(nexts[:NEXTS]) or step.next_units


def _llm_behind(graph: DemandGraph, name: str) -> str:
    """Return the LLM unit to which a unit of another backend leads; a unit of an LLM and the end are their own."""
    while name != END and graph.unit(name).backend != LLM:
        name = graph.unit(name).next_units[0]
    return name
