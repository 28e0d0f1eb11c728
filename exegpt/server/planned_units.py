"""The engines of a plan: one for each unit of devices, for the models that are on them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from exegpt import document
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.noun import Noun
from exegpt.plan import Plan, PlannedModel
from exegpt.policies import checked
from exegpt.server.unit import UnitModel, UnitOptions

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def read_plan(path: Path, directories: Mapping[str, str]) -> Plan:
    """The plan of a file, with the directory of each model: the one given by its name, else the plan's. InputError for
    a plan that this machine can't run, and for models whose directories are missing or aren't theirs.
    """
    plan = document.read(Plan, path)
    names = [model.name for model in plan.models]
    if not names or len(set(names)) < len(names):
        raise InputError(
            f"'{path}' has the models {', '.join(names) or 'none'}: a server needs some, each with a name of its own; "
            "plan again."
        )
    if plan.cluster.nodes > 1:
        raise InputError(f"'{path}' is for {plan.cluster.nodes} nodes: a server runs a plan for one node.")
    unknown = next((name for name in directories if name not in names), None)
    if unknown is not None:
        raise InputError(f"--model {unknown}=… is no model of '{path}': it has {', '.join(names)}.")
    return replace(
        plan, models=tuple(_placed(model, directories.get(model.name, model.directory)) for model in plan.models)
    )


def _placed(model: PlannedModel, given: str | None) -> PlannedModel:
    """A model with its directory, which has to be its own."""
    way = f"pass --model {model.name}=DIR"
    if given is None:
        raise InputError(f"The plan doesn't say in which directory model '{model.name}' is: {way}.")
    if not Path(given).is_dir():
        raise InputError(f"There is no directory '{given}' of model '{model.name}': {way}.")
    planned, spec = model.schedule.model, ModelSpec.from_directory(Path(given))
    if spec.fingerprint != planned.spec.fingerprint:
        raise InputError(
            f"'{given}' has model '{spec.name}' ({spec.fingerprint}), and model '{model.name}' of the plan is "
            f"'{planned.spec.name}' ({planned.spec.fingerprint}): {way}."
        )
    checked(model.schedule).check_stages()
    ranks = sum(stage.tp for stage in model.schedule.stages) * model.schedule.replicas
    if ranks != len(model.devices):
        raise InputError(
            f"Model '{model.name}' has {len(model.devices)} devices, and a schedule for {ranks}: plan again."
        )
    return replace(model, directory=given)


def planned_units(plan: Plan, flags: Sequence[str], threads: int | None) -> tuple[UnitOptions, ...]:
    """The engines of a plan that `read_plan` has read, with further `flags` of `exegpt engine`. `threads` are a CPU
    device's; None: an equal share of the cores.
    """
    places = {model.name: place for place, model in enumerate(plan.models)}
    used = sum(len(unit[0].devices) for unit in plan.units)
    threads = threads or max(1, len(os.sched_getaffinity(0)) // used)
    units = []
    for number, unit in enumerate(plan.units):
        first = unit[0]
        arguments = [*flags, "--threads", str(threads)]
        documents: dict[str, Noun]
        if len(unit) == 1:
            arguments = ["--model", str(first.directory), *arguments]
            documents = {"--schedule": first.schedule}
        else:
            arguments = ["--unit", str(number), *arguments]
            documents = {"--plan": plan}
        models = tuple(UnitModel(Path(str(m.directory)), m.name, place=places[m.name]) for m in unit)
        ranks, visible = len(first.devices), {} if plan.cluster.is_cpu else _visible(first.devices)
        units.append(UnitOptions(models, tuple(arguments), documents, ranks, visible))
    return tuple(units)


def _visible(devices: Sequence[int]) -> dict[str, str]:
    """The variable by which a process sees these GPUs alone, of those that this one sees."""
    given = os.environ.get(_VISIBLE)
    if given is None:
        return {_VISIBLE: ",".join(map(str, devices))}
    seen = [name.strip() for name in given.split(",") if name.strip()]
    if max(devices) >= len(seen):
        raise InputError(f"The plan has device {max(devices)}, and {_VISIBLE}={given} shows {len(seen)}: show more.")
    return {_VISIBLE: ",".join(seen[device] for device in devices)}
