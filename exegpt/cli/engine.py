"""`exegpt engine`: a server's engine process, started by `exegpt serve`; not for direct use."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options.option_record import command, option, required
from exegpt.options.served import EngineOptions, ServedOptions
from exegpt.options.values import plan_rankers
from xcore.errors import InputError
from xcore.frozen_heap import imports


@dataclass(frozen=True, kw_only=True)
class EngineCommandOptions(ServedOptions):
    """The options of an engine's process."""

    socket: Path = required("The frontend's socket; with --plan, the sockets' folder.")
    model: str | None = option(None, "The model's directory.", "-m")
    plan: Path | None = option(None, "With --unit: a plan whose models share devices.")
    unit: int = option(0, "The index of the unit in the plan.")
    promises: bool = option(False, "With --unit: keep the models' latency bounds, where that is possible.")
    report_speed: bool = option(False, "Measure the layers again when the engine ends.")


@command
def engine(options: EngineCommandOptions) -> None:
    """Run the requests that arrive over a socket."""
    with imports():
        from exegpt.api import serving_engine
        from xmulti.serving import serving_unit
        from xrunner.comm.ranks import job

    if options.plan is not None:
        unit = serving_unit.UnitProcessOptions(
            options.plan,
            options.unit,
            options.socket,
            options.device,
            options.attention,
            options.threads,
            options.report_speed,
            options.order,
            plan_rankers(options.ranker),
            options.promises,
        )
        with job() as ranks:
            return serving_unit.serve(unit, ranks)
    if options.model is None:
        raise InputError("The engine needs --model, or --plan and --unit.")
    model = options.model
    with job() as ranks:
        asked = ranks.attempt(lambda: engine_options(options, model, options.socket, options.report_speed))
        serving_engine.serve(asked, ranks)


def engine_options(
    options: ServedOptions, model: str, socket: Path | None = None, report_speed: bool = False
) -> EngineOptions:
    """Return the engine's options; InputError for those that contradict each other.

    Args:
        options: The options of this command or of `exegpt serve`.
        model: The model's directory.
        socket: The socket at which the frontend listens.
        report_speed: Whether the layers are measured again when the engine ends.
    """
    from xcore.choices import check_columns
    from xcore.files import read_schedule
    from xscheduler.ordering import check_served
    from xscheduler.policy_names import policy_names

    check_columns(options.columns, options.workload, scale=options.scale_to_context)
    bound_s = options.latency_bound_s
    if bound_s is None and options.schedule:
        bound_s = read_schedule(options.schedule).latency_bound_s
    check_served(options.order_choice, bound_s)
    policy_names(options.policy)  # refuse an unknown policy before anything is measured
    return EngineOptions(options, model, socket, report_speed)
