"""The engines of a plan: one for each unit of devices, with the unit's models."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from xcore import document
from xcore.console.output import NOTES_OF
from xcore.errors import InputError
from xcore.policies.from_schedule import checked
from xcore.quantity import counted
from xcore.spec import Spec
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import Plan, PlannedModel, Unit
from xcore.specs.model import ModelSpec
from xcore.usable_cpus import usable_cpus
from xmulti.serving.shared_admission import UnitAdmissions
from xmulti.serving.unit_bounds import keeps_bounds
from xserver.engines.unit_options import PROMISES, EngineUnitOptions, NodePlace, UnitModel, visible_devices


@dataclass(frozen=True)
class NodesInUse:
    """The nodes of a plan on which a server can run engines."""

    local: int | None = 0
    """The node that is this machine; None: none is."""
    launched: tuple[int, ...] = ()
    """The nodes with a launcher."""
    named: bool = True
    """Whether the user has named them, as a plan for several nodes needs."""


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


def read_plan(path: Path, directories: Mapping[str, str], nodes: NodesInUse | None = None) -> Plan:
    """Return the plan of a file, as `with_directories` has it; InputError if it has no node that the user has named."""
    plan = read_plan_file(path)
    named = [node for node in (nodes.local, *nodes.launched) if node is not None] if nodes and nodes.named else []
    if absent := [node for node in named if node >= plan.cluster.nodes]:
        has = "only node 0" if plan.cluster.nodes == 1 else f"nodes 0 to {plan.cluster.nodes - 1}"
        raise InputError(f"--node names node {absent[0]}, but '{path}' has {has}: correct it or leave it out.")
    return with_directories(plan, directories, f"'{path}'", nodes)


def with_directories(plan: Plan, directories: Mapping[str, str], what: str, nodes: NodesInUse | None = None) -> Plan:
    """Return a plan with the directory of each model: the one given by its name, else that of the plan.

    Messages call the plan `what`. `nodes` None: the plan is run on one node.

    Raises:
        InputError: This machine can't run the plan, or models' directories are missing or of other models.
    """
    names = check_models(plan, what)
    if nodes is None and plan.cluster.nodes > 1:
        raise InputError(
            f"{what} is for {plan.cluster.nodes} nodes, which only `exegpt serve --plan` can run: plan for one node."
        )
    _check_nodes(plan, nodes or NodesInUse(), what)
    check_names(directories, names, what)
    return replace(
        plan, models=tuple(placed_model(model, directories.get(model.name, model.directory)) for model in plan.models)
    )


def _check_nodes(plan: Plan, nodes: NodesInUse, what: str) -> None:
    """Check that each engine of a plan has a node on which it can run.

    Raises:
        InputError: An engine needs several nodes, or a node that isn't known.
    """
    unnamed = plan.cluster.nodes > 1 and not nodes.named
    for unit in plan.units:
        models, (first, *others) = ", ".join(model.name for model in unit), plan.nodes_of(unit[0])
        if others:
            raise InputError(
                f"{what} has model {models} on nodes {', '.join(map(str, (first, *others)))}, but a server runs each "
                "engine on one node: plan with --one-node."
            )
        if unnamed or first not in (nodes.local, *nodes.launched):
            raise InputError(
                f"{what} is for {plan.cluster.nodes} nodes, and --node does not name node {first}, which has {models}: "
                f"start `exegpt launch` there and pass --node {first}=HOST:PORT, or --node {first}=local if it is this "
                "machine."
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


def planned_units(
    plan: Plan,
    flags: Sequence[str],
    threads: int | None,
    nodes: NodesInUse | None = None,
    order_flags: Callable[[Unit], Sequence[str]] = lambda _: (),
    promises: bool = False,
) -> tuple[EngineUnitOptions, ...]:
    """Return the engines of a plan that `read_plan` has read, with further `flags` of `exegpt engine`.

    `order_flags` are those of a unit on this machine for the order of its requests. `threads` are those of a CPU
    device; None: an equal share of the node's cores. `promises`: models that share devices keep their latency bounds.
    """
    places = {model.key: place for place, model in enumerate(plan.models)}
    local = (nodes or NodesInUse()).local
    in_use: Counter[int] = Counter(plan.nodes_of(unit[0])[0] for unit in plan.units for _ in unit[0].devices)
    units = []
    for number, unit in enumerate(plan.units):
        first, (node, *_) = unit[0], plan.nodes_of(unit[0])
        if node != local:
            at = NodePlace(node, local_devices(first, plan.cluster), in_use[node], number)
            typed = [*flags, *(["--threads", str(threads)] if threads else [])]
            units.append(_launched(plan, unit, places, typed, at, promises and keeps_bounds(unit)))
            continue
        arguments = [*flags, *order_flags(unit), "--threads", str(threads or max(1, usable_cpus() // in_use[node]))]
        if len(unit) == 1:
            units.append(unit_alone(first, places[first.key], arguments, plan.cluster))
            continue
        bounded = promises and keeps_bounds(unit)
        arguments = ["--unit", str(number), *arguments, *([PROMISES] if bounded else [])]
        environment, follows = _environment(unit, plan.cluster), tuple(map(_follows, unit))
        units.append(
            EngineUnitOptions(
                _unit_models(unit, places),
                tuple(arguments),
                {"--plan": plan},
                len(first.devices),
                environment,
                follows,
                admissions=partial(UnitAdmissions, unit) if bounded else None,
            )
        )
    return tuple(units)


_Places = Mapping[tuple[str, tuple[int, ...]], int]
"""The place of each model among all, by its key."""


def _unit_models(unit: Unit, places: _Places) -> tuple[UnitModel, ...]:
    return tuple(UnitModel(Path(str(m.directory)), m.name, place=places[m.key]) for m in unit)


def _launched(
    plan: Plan, unit: Unit, places: _Places, flags: Sequence[str], at: NodePlace, bounded: bool
) -> EngineUnitOptions:
    """Return an engine that the launcher of another node starts."""
    documents: dict[str, Spec] = {"--schedule": unit[0].schedule} if len(unit) == 1 else {"--plan": plan}
    return EngineUnitOptions(
        _unit_models(unit, places),
        (*flags, *([PROMISES] if bounded else [])),
        documents,
        len(at.devices),
        follows=tuple(map(_follows, unit)),
        at=at,
        admissions=partial(UnitAdmissions, unit) if bounded else None,
    )


def local_devices(model: PlannedModel, cluster: ClusterSpec) -> tuple[int, ...]:
    """Return a model's devices as numbered on their node."""
    return tuple(device % cluster.devices_per_node for device in model.devices)


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
    return named if cluster.is_cpu else named | visible_devices(local_devices(unit[0], cluster))
