"""The functions of `import exegpt`: the commands as functions, with the same defaults and dataclasses as results."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exegpt.api.simulate import simulate as predict
from exegpt.api.tuning import read_problem, tune_bounds, tune_rate
from exegpt.options.shared_options import AgentOptions, PredictionOptions, SpeculationOptions
from exegpt.options.simulate import SimulateOptions
from exegpt.options.tune import TuneOptions
from xcore.choices import check_choice
from xcore.document import from_dict, to_dict
from xcore.errors import InputError
from xcore.policies import control_variables
from xcore.specs.cluster_plan import Plan
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload
from xmulti.files.stage_plan import StagePlan
from xmulti.plans.plan_answer import answer as plan_answer
from xmulti.plans.planning import METHODS
from xscheduler.engine_settings import EngineSettings
from xscheduler.expert_divisions import divided_as
from xscheduler.tuned import Tuned

Duration = float | str | None
"""Seconds, or a text like 250ms; None: no bound."""
_PLANNING = (*PredictionOptions.__dataclass_fields__, "scale_to_context")
_SETTING = (
    *(*_PLANNING, *SpeculationOptions.__dataclass_fields__, "columns", "device", "prefix_hit"),
    *AgentOptions.__dataclass_fields__,
)


@dataclass(frozen=True)
class Simulated:
    """A prediction of one schedule's performance."""

    schedule: Schedule
    estimate: Estimate | None
    """The estimate of the steady state; None if requests were simulated one by one."""
    facts: dict[str, object]
    """The document that `exegpt simulate --json` prints."""
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return plain dicts, lists and numbers."""
        return to_dict(self)


@dataclass(frozen=True)
class Planned:
    """The division of a cluster's devices among several models."""

    plan: Plan | StagePlan | None
    """The plan; None if no method sustains all rates."""
    why_not: str
    """The reason, if there is no plan."""
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Return plain dicts, lists and numbers."""
        return to_dict(self)


def tune(
    model: str | None = None,
    cluster: str | None = None,
    workload: str | Workload | None = None,
    latency_bound: Duration = None,
    *,
    ttft: Duration = None,
    tpot: Duration = None,
    rate: float | str | None = None,
    arrivals: str = "poisson",
    bound: str = "requests",
    percentile: float = 99.0,
    policy: str | None = None,
    search: str = "bnb",
    tolerance: float = 0.0,
    admission: str = "reserve",
    fixed: Mapping[str, int] | None = None,
    profile: str | None = None,
    seed: int = 0,
    **setting: Any,
) -> Tuned:
    """Find the schedule with the highest throughput under the bounds, as `exegpt tune` does.

    At a `rate` in requests/s, find the schedule with the highest goodput instead. `fixed` holds control variables with
    fixed values. `setting` takes dtype, kv_dtype, memory_fraction, columns, scale_to_context, device, engine,
    front_end, prefix_hit, for speculative decoding draft_acceptance, num_speculative_tokens, draft_model and
    draft_layers, and for sessions in a closed loop agents, turns and tool_time.

    Example: `exegpt.tune("llama-3.1-8b", "1xH100-SXM", "2048/256", latency_bound=5.0).schedule`

    Raises InputError for input that the command refuses.
    """
    _check_names(setting, _SETTING, "tune")
    if "tool_time" in setting:
        setting["tool_time"] = _text(setting["tool_time"], "s")
    options = TuneOptions(
        model=model,
        cluster=cluster,
        workload=workload if isinstance(workload, str) else None,
        latency_bound="inf" if latency_bound is None else _text(latency_bound, "s"),
        ttft=_text(ttft, "s"),
        tpot=_text(tpot, "s"),
        rate=_text(rate, "/s"),
        arrivals=arrivals,
        bound=bound,
        percentile=percentile,
        policy=policy,
        search=search,
        tolerance=tolerance,
        admission=admission,
        profile=[profile] if profile else None,
        seed=seed,
        advice=False,
        **setting,
    )
    problem = read_problem(options, workload if isinstance(workload, Workload) else None, fixed)
    if problem.options.agents:
        from exegpt.api.agent_answer import answer_agents

        tuned = answer_agents(problem).best.tuned
    elif problem.open_system:
        rated = tune_rate(problem)[0].rated
        best = rated.sustained[rated.tuned.schedule.policy].goodput.low if rated.tuned.schedule else None
        tuned = replace(rated.tuned, rate_seq_s=rated.rate_seq_s, goodput_seq_s=best)
    else:
        tuned = tune_bounds(problem)[0].tuned
    assumptions = divided_as(problem.settings[0], tuned.schedule).assumptions
    return replace(tuned, assumptions=(*assumptions, *tuned.assumptions))


def simulate(
    model: str | None = None,
    cluster: str | None = None,
    workload: str | Workload | None = None,
    *,
    schedule: str | Path | None = None,
    replay: str | None = None,
    timeline: str | Path | None = None,
    profile: str | None = None,
    **settings: Any,
) -> Simulated:
    """Predict the performance of a schedule file or of a running engine's settings, as `exegpt simulate` does.

    `settings` takes the command's options by their names.

    Example: `exegpt.simulate("llama-3.1-8b", "1xH100-SXM", "2048/256", max_num_seqs=64).estimate`

    Raises InputError for input that the command refuses.
    """
    names = (*EngineSettings.__dataclass_fields__, *control_variables())
    known = SimulateOptions.__dataclass_fields__.keys() - {"plan", "plugin", "json", "threads"}
    _check_names(settings, (*known, *names), "simulate")
    more = {name: settings.pop(name) for name in names if name in settings and name not in known}
    settings |= {
        name: _text(settings[name], unit) for name, unit in (("tool_time", "s"), ("rate", "/s")) if name in settings
    }
    options = SimulateOptions(
        model=model,
        cluster=cluster,
        workload=workload if isinstance(workload, str) else None,
        profile=[profile] if profile else None,
        schedule=Path(schedule) if schedule else None,
        timeline=Path(timeline) if timeline else None,
        replay=replay,
        **settings,
    )
    prediction = predict(options, more, workload=workload if isinstance(workload, Workload) else None)
    one_by_one = "requests" in prediction.facts
    estimate = None if one_by_one else from_dict(Estimate, prediction.facts, "the estimate")
    return Simulated(prediction.schedule, estimate, prediction.facts, tuple(prediction.assumptions))


def plan(
    models: str | Path,
    cluster: str,
    *,
    method: str = "exegpt",
    profile: str | Mapping[str, str] | None = None,
    replicas: int | None = None,
    one_node: bool = False,
    **setting: Any,
) -> Planned:
    """Divide a cluster's devices among the models of a YAML file, as `exegpt plan` does.

    `profile` has files by the models' names. `replicas` limits the groups of devices of a model (`seallm`, `alpaserve`;
    None: no limit). With `one_node`, all devices of a model are of one node. `setting` takes dtype, kv_dtype,
    memory_fraction, engine, front_end and scale_to_context.

    Example: `exegpt.plan("models.yaml", "4xA100-80GB").plan`

    Raises InputError for input that the command refuses.
    """
    _check_names(setting, _PLANNING, "plan")
    check_choice(method, (*METHODS, "best"), "method")
    by_name = [f"{name}={file}" for name, file in profile.items()] if isinstance(profile, Mapping) else [profile]
    profiles = [text for text in by_name if text is not None]
    planned = plan_answer(Path(models), cluster, method, False, None, profiles, replicas, one_node, **setting)
    return Planned(planned.best, "" if planned.best else planned.proposals[0].why_not, tuple(planned.assumptions))


def _check_names(given: dict[str, object], known: tuple[str, ...], function: str) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"exegpt.{function} has no argument '{name}': it takes {', '.join(known)}.")


def _text(value: float | str | None, unit: str) -> str | None:
    """Return a number with its unit, and a text unchanged."""
    return f"{value}{unit}" if isinstance(value, float | int) else value
