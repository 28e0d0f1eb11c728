"""Plans of stages for an application: SamuLLM's search, and the baseline heuristics."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xcore.specs.cost_table import DegreeCosts
from xcore.specs.schedule import BLOCK_SIZE, Schedule
from xmulti.files.application_file import ApplicationPlanRequest
from xmulti.files.stage_plan import ExecutionStage, StagedModel, StagePlan
from xscheduler.engine_settings import engine_schedule
from xscheduler.settings import Setting

if TYPE_CHECKING:
    from xmulti.stages.application import Application

METHODS = {"samullm": "SamuLLM's search", "samullm-max": "the Max-heuristic", "samullm-min": "the Min-heuristic"}
"""Methods for plans of stages, with their descriptions."""
SEED = 0
"""Seed of the outputs for which plans are made."""
SEARCHED, PLANS = 4, 20
"""Branch and bound: the number of stages to continue with from a state, and of complete plans."""
RESIDENTS, BUDGET = 512, 2048
"""Limits of a replica: the most sequences at once, as they are simulated, and the tokens of an iteration."""


@dataclass(frozen=True)
class StageProposal:
    """A plan of stages by one method."""

    method: str
    plan: StagePlan


def propose_stages(asked: ApplicationPlanRequest, first: str = "samullm") -> list[StageProposal]:
    """Return a plan by each of `METHODS`, the one of method `first` in front.

    SamuLLM's search is the better of both searches beyond the greedy one. Prompts have no padding, as in today's
    engines.

    Raises:
        InputError: A model or a call doesn't fit.
    """
    from xmulti.stages.application import draw
    from xmulti.stages.greedy_stages import Host, PlannedStage, makespan, plan_stages
    from xmulti.stages.running_phase import execute
    from xmulti.stages.stage_heuristics import max_stage, min_stage
    from xmulti.stages.stage_search import best_stages
    from xmulti.stages.stage_variations import varied_stages

    application = draw(asked.graph, asked.table, SEED, padded=False)
    host = Host(asked.cluster.devices_per_node, asked.linked)
    proposals = []
    searches: dict[str, Callable[[], tuple[PlannedStage, ...]]] = {
        "samullm": lambda: min(
            best_stages(application, host, SEARCHED, PLANS), varied_stages(application, host, SEARCHED), key=makespan
        ),
        "samullm-max": lambda: plan_stages(application, host, max_stage),
        "samullm-min": lambda: plan_stages(application, host, min_stage),
    }
    for method, search in searches.items():
        began = time.perf_counter()
        planned = search()
        search_s = time.perf_counter() - began
        # simulated on the planned outputs: adds devices, and reloads where groups need linked GPUs
        stages = execute(application, host, planned).stages
        models = _models(asked, stages, application)
        facts = (StagePlan.VERSION, method, host.devices, host.linked, stages, search_s)
        plan = StagePlan(*facts, asked.cluster, models)
        proposals.append(StageProposal(method, plan))
    return sorted(proposals, key=lambda proposal: proposal.method != first)


def _models(
    asked: ApplicationPlanRequest, stages: Sequence[ExecutionStage], application: "Application"
) -> tuple[StagedModel, ...]:
    """Return what the engines of all nodes need, at the degrees that the stages have."""
    degrees: dict[str, set[int]] = {}
    for stage in stages:
        for node in stage.nodes:
            degrees.setdefault(node.name, set()).add(node.tp)
    models = []
    for name, tps in degrees.items():
        costs = asked.table.model(name)
        used = tuple(degree for degree in costs.degrees if degree.tp in tps)
        most = min(RESIDENTS, len(application.nodes[name].calls.first))  # rounds come one after the other
        schedules = tuple(_schedule(asked.settings[name], degree, most) for degree in used)
        models.append(StagedModel(name, asked.directories[name], schedules, replace(costs, degrees=used, outputs=None)))
    return tuple(models)


def _schedule(setting: Setting, degree: DegreeCosts, residents: int) -> Schedule:
    """Return the schedule of a replica that serves at most `residents` calls at once.

    The schedule is as simulated, except that prompts are chunked instead of stopping decoding for them. Its cache is no
    larger than these calls can fill.
    """
    name = f"{degree.tp}x{setting.cluster.device.kind}"
    part = replace(setting.cluster, name=name, nodes=1, devices_per_node=degree.tp)
    most = residents * math.ceil(setting.model.context / BLOCK_SIZE)
    blocks = min(degree.kv_tokens // BLOCK_SIZE, most)
    variables = {"max_num_seqs": residents, "max_num_batched_tokens": BUDGET}
    own = replace(setting, cluster=part)
    schedule = engine_schedule(own, "chunked", degree.tp, blocks, BLOCK_SIZE, **variables)
    return replace(schedule, admission="grow")
