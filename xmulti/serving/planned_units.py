"""The engines of a plan: one for each unit of devices, with the unit's models."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from xcore import document
from xcore.console.output import NOTES_OF
from xcore.errors import InputError
from xcore.policies.from_schedule import checked
from xcore.quantity import counted
from xcore.spec import Spec
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import Plan, PlannedModel
from xcore.specs.model import ModelSpec
from xcore.usable_cpus import usable_cpus
from xserver.engines.unit_options import EngineUnitOptions, UnitModel

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def has_stages(path: Path) -> bool:
    """Return whether a plan's file is a plan of stages."""
    data = document.read_json(path)
    return isinstance(data, dict) and "stages" in data and "policy" not in data


def read_plan_file(path: Path) -> Plan:
    """Read the plan of a file.

    Raises:
        InputError: It is a plan of stages, in which models are started and stopped.
    """
    if has_stages(path):
        raise InputError(f"'{path}' is a plan of stages, which only `exegpt run --plan … --application …` can run.")
    return document.read(Plan, path)


def read_plan(path: Path, directories: Mapping[str, str]) -> Plan:
    """Return the plan of a file, as `with_directories` has it."""
    return with_directories(read_plan_file(path), directories, f"'{path}'")


def with_directories(plan: Plan, directories: Mapping[str, str], what: str) -> Plan:
    """Return a plan with the directory of each model: the one given by its name, else that of the plan.

    Messages call the plan `what`.

    Raises:
        InputError: This machine can't run the plan, or models' directories are missing or of other models.
    """
    names = check_models(plan, what)
    if plan.cluster.nodes > 1:
        raise InputError(
            f"{what} is for {plan.cluster.nodes} nodes, but a server runs a plan for one node: plan for one node."
        )
    check_names(directories, names, what)
    return replace(
        plan, models=tuple(placed_model(model, directories.get(model.name, model.directory)) for model in plan.models)
    )


def check_models(plan: Plan, what: str) -> list[str]:
    """Return the names of a plan's models.

    Raises:
        InputError: There are none.
    """
    if not plan.models:
        raise InputError(f"{what} has no models: it needs at least one; run `exegpt plan` again.")
    return list(plan.replicas)


def check_names(directories: Mapping[str, str], names: Sequence[str], what: str) -> None:
    """Check that each directory is of a model of the plan, which messages call `what`.

    Raises:
        InputError: A directory is of no model.
    """
    unknown = next((name for name in directories if name not in names), None)
    if unknown is not None:
        raise InputError(f"--model {unknown}=… names no model of {what}: it has {', '.join(names)}.")


def placed_model(model: PlannedModel, given: str | None) -> PlannedModel:
    """Return a model with its directory.

    Raises:
        InputError: The directory is missing, or has another model.
    """
    way = f"add it to the plan, or pass --model {model.name}=DIR"
    if given is None:
        raise InputError(f"The plan does not name the directory of model '{model.name}': {way}.")
    if not Path(given).is_dir():
        raise InputError(f"Model '{model.name}' needs the directory '{given}', which does not exist: {way}.")
    planned, spec = model.schedule.model, ModelSpec.from_directory(Path(given))
    if spec.fingerprint != planned.spec.fingerprint:
        raise InputError(
            f"'{given}' has model '{spec.name}' ({spec.fingerprint}), but model '{model.name}' of the plan is "
            f"'{planned.spec.name}' ({planned.spec.fingerprint}): {way}."
        )
    check_schedule(model)
    return replace(model, directory=given)


def check_schedule(model: PlannedModel) -> None:
    """Check a model's schedule.

    Raises:
        InputError: No engine could follow it on the model's devices.
    """
    try:
        checked(model.schedule).check_stages()
    except InputError as error:
        raise InputError(f"Model '{model.name}' of the plan: {error}") from None
    ranks = sum(stage.tp for stage in model.schedule.stages) * model.schedule.replicas
    if ranks != len(model.devices):
        raise InputError(
            f"Model '{model.name}' has {counted(len(model.devices), 'device')}, but a schedule for {ranks}: run "
            "`exegpt plan` again."
        )
    if model.share and len(model.schedule.stages) * model.schedule.replicas > 1:
        raise InputError(
            f"Model '{model.name}' shares its devices but has a schedule of several stages: engines that share "
            "devices need one stage on all devices; run `exegpt plan` again."
        )


def in_places(asked: Plan, current: Plan) -> Plan:
    """Return a plan with its models in the places of the current one.

    Engines connect by places. So a replica keeps its place if it stays on its devices; the others take the rest.

    Raises:
        InputError: A model has another number of replicas.
    """
    held = {model.key for model in current.models}
    staying = {model.key: model for model in asked.models if model.key in held}
    moving = {name: [r for r in replicas if r.key not in staying] for name, replicas in asked.replicas.items()}
    models = []
    for model in current.models:
        left = moving.get(model.name, [])
        if model.key not in staying and not left:
            break
        models.append(staying.get(model.key) or left.pop(0))
    if len(models) != len(current.models) or any(moving.values()):
        counts = ", ".join(f"{len(replicas)} of '{name}'" for name, replicas in current.replicas.items())
        raise InputError(f"The plan must have as many replicas of each model as this server: {counts}.")
    return replace(asked, models=tuple(models))


def planned_units(plan: Plan, flags: Sequence[str], threads: int | None) -> tuple[EngineUnitOptions, ...]:
    """Return the engines of a plan that `read_plan` has read, with further `flags` of `exegpt engine`.

    `threads` are those of a CPU device; None: an equal share of the cores.
    """
    places = {model.key: place for place, model in enumerate(plan.models)}
    used = sum(len(unit[0].devices) for unit in plan.units)
    threads = threads or max(1, usable_cpus() // used)
    units = []
    for number, unit in enumerate(plan.units):
        first = unit[0]
        arguments = [*flags, "--threads", str(threads)]
        if len(unit) == 1:
            units.append(unit_alone(first, places[first.key], arguments, plan.cluster))
            continue
        arguments = ["--unit", str(number), *arguments]
        documents: dict[str, Spec] = {"--plan": plan}
        models = tuple(UnitModel(Path(str(m.directory)), m.name, place=places[m.key]) for m in unit)
        environment, follows = _environment(unit, plan.cluster), tuple(map(_follows, unit))
        units.append(EngineUnitOptions(models, tuple(arguments), documents, len(first.devices), environment, follows))
    return tuple(units)


def unit_alone(model: PlannedModel, place: int, flags: Sequence[str], cluster: ClusterSpec) -> EngineUnitOptions:
    """Return the engine of a model with separate devices; `place` is its place among all models."""
    arguments, documents = ("--model", str(model.directory), *flags), {"--schedule": model.schedule}
    models = (UnitModel(Path(str(model.directory)), model.name, place=place),)
    environment, follows = _environment([model], cluster), (_follows(model),)
    return EngineUnitOptions(models, arguments, documents, len(model.devices), environment, follows)


def _follows(model: PlannedModel) -> tuple[object, ...]:
    return model.name, model.devices, model.schedule, model.share, model.directory


def _environment(unit: Sequence[PlannedModel], cluster: ClusterSpec) -> dict[str, str]:
    """Return the environment of an engine of these models, in which it sees only their devices."""
    named = {NOTES_OF: ", ".join(model.name for model in unit)}
    return named if cluster.is_cpu else named | _visible(unit[0].devices)


def _visible(devices: Sequence[int]) -> dict[str, str]:
    """Return the variable that restricts a process to these GPUs, as numbered for this process."""
    given = os.environ.get(_VISIBLE)
    if given is None:
        return {_VISIBLE: ",".join(map(str, devices))}
    seen = [name.strip() for name in given.split(",") if name.strip()]
    if max(devices) >= len(seen):
        raise InputError(
            f"The plan uses device {max(devices)}, but {_VISIBLE}={given} shows only {len(seen)}: show more devices."
        )
    return {_VISIBLE: ",".join(seen[device] for device in devices)}
