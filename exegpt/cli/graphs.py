"""`exegpt graphs`: learn the demand graphs of applications from logs of their calls, and print them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from exegpt.options.option_record import argument, command, required
from exegpt.options.shared_options import JsonOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xcore.applications.demand_graph import DemandGraph, DemandStep


@dataclass(frozen=True, kw_only=True)
class LearnOptions(JsonOption):
    """The log of calls, and the file of the graphs."""

    log: Path = argument("A JSONL file with a line for each call: application, run, unit, next or parent, and sizes.")
    out: Path = required("Write the demand graphs to this file (JSON).", "-o")


@dataclass(frozen=True, kw_only=True)
class ShowGraphsOptions(JsonOption):
    """The file of the graphs."""

    file: Path = argument("A file of demand graphs, written by `exegpt graphs learn`.")


@command
def learn(options: LearnOptions) -> None:
    """Learn a demand graph of each application in a log of calls. A run's calls are in order; runs may be mixed.

    Example: exegpt graphs learn calls.jsonl --out graphs.json
    """
    from xcore import document
    from xcore.console import output
    from xcore.files import check_distinct, check_output
    from xcore.quantity import counted
    from xmulti.files.call_log import learn as learned
    from xmulti.files.call_log import read_calls

    check_output(options.out)
    check_distinct((options.out,), (options.log,))
    graphs = learned(read_calls(options.log))
    document.write_text(options.out, document.dumps([document.to_dict(graph) for graph in graphs], indent=None) + "\n")
    if options.json:
        return output.emit({"applications": _facts(graphs), "provenance": output.provenance()})
    _print(graphs)
    print(f"{counted(len(graphs), 'demand graph')} written to {options.out}.")


@command
def show(options: ShowGraphsOptions) -> None:
    """Print demand graphs: each application's units with their mean demand and the units that follow.

    Example: exegpt graphs show graphs.json
    """
    from xcore.applications.demand_graph import read_demand_graphs
    from xcore.console import output

    graphs = read_demand_graphs(options.file)
    if options.json:
        return output.emit({"applications": _facts(graphs), "provenance": output.provenance()})
    _print(graphs)


class _UnitFacts(TypedDict):
    """The figures of a unit; None: it has no such samples."""

    unit: str
    backend: str
    calls: int
    input_tokens: float | None
    output_tokens: float | None
    parallel: float | None
    seconds: float | None
    next: dict[str, float]
    predicts: dict[str, list[str]]


class _ApplicationFacts(TypedDict):
    """The figures of an application."""

    application: str
    start: dict[str, float]
    mean_service_s: float
    service_deviation: float
    units: list[_UnitFacts]


def _facts(graphs: "Sequence[DemandGraph]") -> list[_ApplicationFacts]:
    """Return the figures of each application."""
    from collections import Counter

    from xcore.applications.demand import ApplicationDemand, ServiceRates

    facts: list[_ApplicationFacts] = []
    for graph in graphs:
        service_s = ApplicationDemand(graph, ServiceRates()).prior.total_s
        shares = {name: count / len(graph.start) for name, count in Counter(graph.start).most_common()}
        facts.append(
            {
                "application": graph.application,
                "start": shares,
                "mean_service_s": float(service_s.mean()),
                "service_deviation": float(service_s.std() / service_s.mean()) if service_s.any() else 0.0,
                "units": [_unit(graph, step) for step in graph.units],
            }
        )
    return facts


def _unit(graph: "DemandGraph", step: "DemandStep") -> _UnitFacts:
    from collections import Counter
    from statistics import fmean

    from xcore.applications.demand import Correlations

    predicts = {
        joint.downstream: sorted(f"{up} → {variable}" for variable, up in Correlations(joint).mask)
        for joint in graph.joint
        if joint.upstream == step.name
    }
    nexts = Counter(step.next_units).most_common()
    return {
        "unit": step.name,
        "backend": step.backend,
        "calls": len(step.next_units),
        "input_tokens": fmean(step.input_tokens) if step.input_tokens else None,
        "output_tokens": fmean(step.output_tokens) if step.output_tokens else None,
        "parallel": fmean(step.parallel) if step.parallel else None,
        "seconds": fmean(step.seconds) if step.seconds else None,
        "next": {name: count / len(step.next_units) for name, count in nexts},
        "predicts": {unit: edges for unit, edges in predicts.items() if edges},
    }


def _print(graphs: "Sequence[DemandGraph]") -> None:
    from xcore.console import output
    from xcore.quantity import figure_text

    for facts in _facts(graphs):
        columns = ("unit", "backend", "calls", "input tokens", "output tokens", "parallel", "seconds", "next")
        rows = []
        for unit in facts["units"]:
            figures = (unit["input_tokens"], unit["output_tokens"], unit["parallel"], unit["seconds"])
            means = [figure_text(figure) for figure in figures]
            rows.append((unit["unit"], unit["backend"], f"{unit['calls']:,}", *means, _shares(unit["next"])))
        output.table(columns, rows, f"{facts['application']}, begins with {_shares(facts['start'])}")
        for unit in facts["units"]:
            for following, edges in unit["predicts"].items():
                print(f"A call of {unit['unit']} predicts the next one of {following}: {', '.join(edges)}.")


def _shares(shares: dict[str, float]) -> str:
    """Return names with their shares in percent, if there are several."""
    from xcore.quantity import percent_text

    return ", ".join(name if share == 1 else f"{name} {percent_text(share)}" for name, share in shares.items())
