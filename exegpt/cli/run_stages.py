"""`exegpt run --plan` with a plan of stages: run an application, starting and stopping its models' engines."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xmulti.plans.plan_run import PlannedModelRun, PlanRunOptions
    from xmulti.stages.stage_run import StageRun

_COLUMNS = ("model", "calls", "output tokens/s", "loading", "planned loading", "stops", "done after", "predicted")


def run_stages(asked: "PlanRunOptions", json: bool) -> None:
    """Run a plan of stages, and print the results."""
    from xcore.console import output
    from xmulti.stages import stage_run

    result = stage_run.run_stages(asked)
    if json:
        return output.emit({**_document(result), "provenance": output.provenance(seed=asked.seed)})
    _print(result)


def _document(result: "StageRun") -> dict[str, object]:
    from dataclasses import asdict

    from xmulti.plans.plan_run import figures

    predicted = result.predicted
    models = [
        {
            "name": model.name,
            "measured": figures(model.measured),
            "predicted": {"seconds": predicted.ends[model.name]} if predicted else None,
            "stopped": result.stops(model.name),
        }
        for model in result.models
    ]
    return {
        "method": result.plan.method,
        "seconds": result.seconds,
        "predicted_seconds": predicted.seconds if predicted else None,
        "planned_seconds": result.plan.seconds,
        "resumed": result.resumed,
        "models": models,
        "stages": [asdict(stage) for stage in result.stages],
        "predicted_stages": [asdict(stage) for stage in predicted.stages] if predicted else None,
        "loadings": [asdict(loading) for loading in result.loadings],
    }


def _print(result: "StageRun") -> None:
    from dataclasses import replace

    from exegpt.cli.plan_tables import print_plan
    from xcore.console import output
    from xcore.duration import duration_text
    from xcore.quantity import counted

    plan = result.plan
    if result.stages:
        print_plan(replace(plan, stages=result.stages, models=()))  # a resumed run doesn't have all nodes
    output.table(_COLUMNS, [_row(result, model) for model in result.models], "models")
    predicted = result.predicted
    beside = f"; predicted for these outputs: {duration_text(predicted.seconds)}" if predicted else ""
    count = sum(len(model.measured) for model in result.models)
    planned = f"planned: {duration_text(plan.seconds)}"
    print(f"{counted(count, 'call')} in {duration_text(result.seconds)}{beside}; {planned}.")
    if result.resumed:
        output.note(f"· no prediction: {counted(result.resumed, 'call')} finished before this run")


def _row(result: "StageRun", model: "PlannedModelRun") -> list[str]:
    from xcore.duration import duration_text
    from xcore.quantity import NOTHING, figure_text
    from xmulti.plans.plan_run import figures

    facts, predicted = figures(model.measured), result.predicted
    loads = [loading for loading in result.loadings if loading.name == model.name]
    costs = next(planned.costs for planned in result.plan.models if planned.name == model.name)
    expected = [costs.degree(loading.tp).load_s or 0.0 for loading in loads]
    return [
        model.name,
        f"{facts['requests']:,}",
        figure_text(facts["throughput_tok_s"]),
        " + ".join(duration_text(loading.end_s - loading.start_s) for loading in loads) or NOTHING,
        " + ".join(map(duration_text, expected)) or NOTHING,
        f"{result.stops(model.name)}",
        duration_text(facts["seconds"]),
        duration_text(predicted.ends[model.name]) if predicted else NOTHING,
    ]
