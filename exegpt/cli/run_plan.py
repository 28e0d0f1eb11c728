"""`exegpt run --plan`: run several models at once, and applications whose calls read each other's outputs."""

from typing import TYPE_CHECKING, Any

from exegpt.cli import options
from xcore.errors import InputError

if TYPE_CHECKING:
    from xmulti.plans.plan_run import PlannedModelRun, PlanRun

_OWN = (
    "plan model requests application in_turn out resume seed device attention threads json columns scale_to_context "
    "plugin"
).split()
"""Options that a run of a plan takes."""
_UNSET = (None, False, "inf")


def run_plan(typed: dict[str, Any]) -> None:
    """Run and print; InputError for options that the plan determines."""
    from xcore.choices import check_columns
    from xcore.console import output
    from xmulti.plans.plan_run import PlanRunOptions
    from xmulti.plans.plan_run import run_plan as run
    from xmulti.serving.planned_units import has_stages
    from xrunner.comm.ranks import ranks_started

    others = [name for name, value in typed.items() if name not in _OWN and value not in _UNSET]
    if others:
        raise InputError(f"--{others[0].replace('_', '-')} is for runs without --plan: leave one of the two out.")
    if typed["resume"] and typed["out"] is None:
        raise InputError("--resume needs --out: it continues that file.")
    check_columns(typed["columns"], typed["requests"], scale=typed["scale_to_context"])
    if ranks_started() > 1:
        raise InputError("A run of a plan starts its ranks itself: start it without mpirun.")
    typed = typed | {"directories": options.directories(typed["model"])}
    asked = options.build(PlanRunOptions, typed)
    if has_stages(asked.plan):
        from exegpt.cli.run_stages import run_stages

        return run_stages(asked, typed["json"])
    result = run(asked)
    if typed["json"]:
        output.emit({**_document(result), "provenance": output.provenance(seed=typed["seed"])})
        return
    _print(result)


def _document(result: "PlanRun") -> dict[str, Any]:
    from xmulti.plans.plan_run import figures

    models = [
        {"name": m.name, "measured": figures(m.measured), "predicted": figures(m.predicted) if m.predicted else None}
        for m in result.models
    ]
    return {
        "method": result.plan.method,
        "seconds": result.seconds,
        "predicted_seconds": result.predicted_seconds,
        "resumed": result.resumed,
        "models": models,
    }


def _print(result: "PlanRun") -> None:
    from xcore.console import output
    from xcore.duration import duration_text
    from xcore.quantity import counted

    columns = ("model", "requests", "output tokens/s", "latency p50", "p99", "done after")
    rows = [row for model in result.models for row in _rows(model)]
    ran = f"{counted(len(result.models), 'model')} on {result.plan.cluster.name}"
    output.table(columns, rows, f"{result.plan.method}: {ran}")
    count = sum(len(model.measured) for model in result.models)
    predicted = result.predicted_seconds
    beside = "" if predicted is None else f"; predicted: {duration_text(predicted)}"
    print(f"{counted(count, 'request')} in {duration_text(result.seconds)}{beside}.")
    if result.resumed:
        output.note(f"· no prediction: {counted(result.resumed, 'request')} done before this run")


def _rows(model: "PlannedModelRun") -> list[list[str]]:
    from xcore.duration import duration_text
    from xcore.quantity import figure_text
    from xmulti.plans.plan_run import figures

    rows = []
    for name, served in ((model.name, model.measured), ("  predicted", model.predicted)):
        if served:
            facts = figures(served)
            times = [duration_text(value) for value in (facts["latency"]["p50"], facts["latency"]["p99"])]
            done = duration_text(facts["seconds"])
            rows.append([name, f"{facts['requests']:,}", figure_text(facts["throughput_tok_s"]), *times, done])
    return rows
