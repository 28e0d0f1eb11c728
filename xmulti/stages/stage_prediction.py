"""The prediction of a plan of stages for actual outputs: its simulation, with these instead of the planned ones."""

from collections.abc import Mapping
from dataclasses import replace

from xcore.requests.request import Result
from xcore.specs.cost_table import CostTable, ModelCosts
from xcore.specs.profile import Profile
from xcore.specs.schedule import BLOCK_SIZE
from xmulti.applications.planned_application import PlannedApplication
from xmulti.files.stage_plan import StagedModel, StagePlan
from xmulti.stages.greedy_stages import Host, PlannedStage
from xmulti.stages.known_calls import of_known_calls
from xmulti.stages.profiled_costs import profiled_model
from xmulti.stages.running_phase import Executed, execute
from xmulti.stages.stage_progress import Parallel, Placed


def predict_stages(
    plan: StagePlan,
    application: PlannedApplication,
    results: Mapping[str, Result],
    profiles: Mapping[tuple[str, int], Profile],
) -> Executed:
    """Return the simulation of the plan's stages on these results.

    An iteration's cost comes from the `profiles` with which engines have opened, by node and degree, else from the
    plan.
    Loading times are the planned ones.

    Raises:
        InputError: The simulated cache, which leaves some room free, can't hold a call.
    """
    table = CostTable(
        CostTable.VERSION,
        "profiles",
        plan.cluster.name if plan.cluster else "",
        tuple(_costs(model, profiles) for model in plan.models),
    )
    lengths = {name: (result.prompt_tokens, len(result.output_ids)) for name, result in results.items()}
    known = of_known_calls(application.lengths(), lengths, table)
    return execute(known, host_of(plan), [PlannedStage(0.0, 0.0, placed) for placed in placed_of(plan)])


def host_of(plan: StagePlan) -> Host:
    """Return the machine that a plan is for."""
    return Host(plan.devices, plan.linked)


def placed_of(plan: StagePlan) -> list[Placed]:
    """Return each stage's nodes, and how each runs."""
    return [{node.name: Parallel(node.dp, node.tp) for node in stage.nodes} for stage in plan.stages]


def _costs(model: StagedModel, profiles: Mapping[tuple[str, int], Profile]) -> ModelCosts:
    """Return the planned costs, with those of measured degrees replaced."""
    degrees = []
    for planned in model.costs.degrees:
        profile = profiles.get((model.name, planned.tp))
        if profile is None:
            degrees.append(planned)
            continue
        schedule, load_s = model.schedule(planned.tp), {planned.tp: planned.load_s or 0.0}
        spec = schedule.model.spec
        (measured,) = profiled_model(model.name, spec, schedule.cluster, profile, load_s).degrees
        kv_tokens = schedule.kv_blocks * BLOCK_SIZE
        degrees.append(replace(measured, kv_tokens=kv_tokens))
    return replace(model.costs, degrees=tuple(degrees))
