"""`exegpt engine`: a server's engine process, started by `exegpt serve`; not for direct use."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import options
from xcore.errors import InputError

if TYPE_CHECKING:
    from exegpt.api.serving_engine import EngineOptions


def engine(
    socket: Annotated[Path, typer.Option("--socket", help="Where the frontend listens; of a plan's unit the folder.")],
    model: Annotated[str | None, typer.Option("--model", "-m")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="With --unit: models that share devices.")] = None,
    unit: Annotated[int, typer.Option("--unit", help="Its place among the plan's.")] = 0,
    schedule: Annotated[Path | None, typer.Option("--schedule", "-s")] = None,
    workload: options.WORKLOAD = None,
    columns: options.COLUMNS = None,
    scale_to_context: options.SCALE_TO_CONTEXT = False,
    latency_bound: Annotated[str | None, typer.Option("--latency-bound", "-l")] = None,
    policy: options.POLICY = None,
    admission: options.ADMISSION = None,
    order: options.ORDER = None,
    starvation_guard: options.STARVATION_GUARD = False,
    ranker: options.RANKER = None,
    device: options.DEVICE = None,
    attention: options.ATTENTION = None,
    dtype: options.RUN_DTYPE = None,
    threads: options.THREADS = None,
    pinned: Annotated[bool, typer.Option("--pinned")] = False,
    best_effort: Annotated[bool, typer.Option("--best-effort")] = False,
    report_speed: Annotated[bool, typer.Option("--report-speed", help="Time the layers again in the end.")] = False,
) -> None:
    """Run the requests that arrive over a socket."""
    from exegpt.api import serving_engine
    from xrunner.comm.ranks import job

    typed = locals()
    if plan is not None:
        from xmulti.serving import serving_unit

        with job() as ranks:
            serving_unit.serve(ranks.attempt(lambda: options.build(serving_unit.UnitProcessOptions, typed)), ranks)
        return
    if model is None:
        raise InputError("The engine needs --model, or --plan and --unit.")
    with job() as ranks:
        serving_engine.serve(ranks.attempt(lambda: read_options(typed)), ranks)


def read_options(typed: "Mapping[str, Any]", socket: Path | None = None) -> "EngineOptions":
    """Return the engine's options from the parameters of this command or of `exegpt serve`.

    The frontend of `exegpt serve` listens at `socket`.
    """
    from exegpt.api.serving_engine import EngineOptions
    from xcore.choices import check_columns
    from xcore.duration import parse_duration
    from xscheduler.ordering import OrderChoice, check_served
    from xscheduler.policy_names import policy_names

    bound, policy = typed["latency_bound"], typed["policy"]
    check_columns(typed["columns"], typed["workload"], scale=typed["scale_to_context"])
    choice = OrderChoice.of(typed["order"], typed["starvation_guard"], typed["ranker"])
    check_served(choice, parse_duration(bound) if bound else None)
    read = {
        "model": str(typed["model"]),
        "socket": socket or typed.get("socket"),
        "latency_bound_s": parse_duration(bound) if bound else None,
        "policies": policy_names(policy) if policy else None,
        "admission": typed["admission"] or "grow",
        "order": choice,
        "report_speed": typed.get("report_speed", False),
    }
    return options.build(EngineOptions, {**typed, **read})
