"""`exegpt run --plan`: run several models at once, and applications whose calls read each other's outputs."""

from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.options.option_record import option_name, typed_options
from exegpt.options.run import RunOfPlanOptions, RunOptions
from exegpt.options.values import directories, plan_rankers
from xcore.errors import InputError

if TYPE_CHECKING:
    from xmulti.plans.plan_run import PlannedModelRun, PlanRun


def run_plan(options: RunOptions, plan: Path) -> None:
    """Run a plan's requests or application, and print the results.

    Raises InputError for options that the plan determines.
    """
    from xcore.choices import check_columns
    from xcore.console import output
    from xmulti.plans.plan_run import PlanRunOptions
    from xmulti.plans.plan_run import run_plan as run
    from xmulti.serving.planned_units import has_stages
    from xrunner.comm.ranks import ranks_started

    for name in typed_options(options, RunOptions):
        if name not in RunOfPlanOptions.__dataclass_fields__:
            raise InputError(f"{option_name(name)} cannot be combined with --plan: leave one of the two out.")
    if options.resume and options.out is None:
        raise InputError("--resume needs --out: it continues that file.")
    check_columns(options.columns, options.requests, scale=options.scale_to_context)
    if ranks_started() > 1:
        raise InputError("A run of a plan starts its ranks itself: start it without mpirun.")
    asked = PlanRunOptions(
        plan,
        directories(options.model),
        options.requests,
        options.application,
        out=options.out,
        resume=options.resume,
        seed=options.seed,
        device=options.device,
        attention=options.attention,
        threads=options.threads,
        in_turn=options.in_turn,
        columns=options.columns,
        scale_to_context=options.scale_to_context,
        order=options.order,
        rankers=plan_rankers(options.ranker),
    )
    if has_stages(plan):
        if options.order or options.ranker:
            raise InputError(
                f"'{plan}' is a plan of stages, whose calls have their order: leave --order and --ranker out."
            )
        from exegpt.cli.run_stages import run_stages

        return run_stages(asked, options.json)
    result = run(asked)
    if options.json:
        return output.emit({**_document(result), "provenance": output.provenance(seed=options.seed)})
    _print(result)


def _document(result: "PlanRun") -> dict[str, object]:
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
        output.note(f"· no prediction: {counted(result.resumed, 'request')} finished before this run")


def _rows(model: "PlannedModelRun") -> list[list[str]]:
    from xcore.console.output import seconds
    from xcore.duration import duration_text
    from xcore.quantity import figure_text
    from xmulti.plans.plan_run import figures

    rows = []
    for name, served in ((model.name, model.measured), ("  predicted", model.predicted)):
        if served:
            facts = figures(served)
            times = [seconds(value) for value in (facts["latency"]["p50"], facts["latency"]["p99"])]
            done = duration_text(facts["seconds"])
            rows.append([name, f"{facts['requests']:,}", figure_text(facts["throughput_tok_s"]), *times, done])
    return rows
