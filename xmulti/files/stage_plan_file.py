"""Files of stage plans that are run: reading, checks, and the models of their nodes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from xcore import document
from xcore.errors import InputError
from xcore.specs.cluster_plan import PlannedModel
from xcore.specs.request_times import summarise
from xmulti.files.call_graph import CallGraph
from xmulti.files.stage_plan import StagedNode, StagePlan
from xmulti.serving.planned_units import check_names, placed_model


def read_stage_plan(path: Path, directories: Mapping[str, str]) -> StagePlan:
    """Read the plan of a file, with the directory of each node's model.

    A directory given by the node's name replaces that of the plan.

    Raises:
        InputError: The plan can't be run here, or models' directories are missing or of other models.
    """
    plan = document.read(StagePlan, path)
    if not plan.models or plan.cluster is None:
        raise InputError(f"'{path}' does not say how to start the engines of its stages: run `exegpt plan` again.")
    check_names(directories, plan.nodes, f"'{path}'")
    models = tuple(replace(m, directory=directories.get(m.name, m.directory)) for m in plan.models)
    plan = replace(plan, models=models)
    for node in {(node.name, node.tp): node for stage in plan.stages for node in stage.nodes}.values():
        planned_node(plan, node)
    return plan


def planned_node(plan: StagePlan, node: StagedNode) -> PlannedModel:
    """Return a stage's node as a model of a plan.

    Raises:
        InputError: Its weights are missing.
    """
    model = next(model for model in plan.models if model.name == node.name)
    schedule = model.schedule(node.tp)
    name = f"{len(node.devices)}x{schedule.cluster.device.kind}"
    part = replace(schedule.cluster, name=name, devices_per_node=len(node.devices))
    schedule = replace(schedule, replicas=node.dp, cluster=part)
    unknown = summarise((), 0.0)
    return placed_model(PlannedModel(node.name, node.devices, schedule, unknown), model.directory)


def check_application(plan: StagePlan, graph: CallGraph, what: str) -> None:
    """Check that the stages are for this application, which messages call `what`.

    Raises:
        InputError: The stages are for another application.
    """
    names = [node.name for node in graph.nodes]
    if sorted(names) != sorted(plan.nodes):
        raise InputError(
            f"The plan's stages have the nodes {', '.join(plan.nodes)}, but {what} has {', '.join(names)}: run the "
            "application of the plan, or plan this one."
        )
    last = {node.name: number for number, stage in enumerate(plan.stages) for node in stage.nodes}
    for number, stage in enumerate(plan.stages):
        beside = {node.name for node in stage.nodes}
        for name in beside:
            for edge in graph.into(name):
                if edge.source not in beside and last[edge.source] > number:
                    raise InputError(
                        f"Node '{name}' of {what} reads the output of '{edge.source}', but the plan's stages run "
                        f"'{edge.source}' later: plan this application."
                    )
