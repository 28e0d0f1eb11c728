"""Plans of stages for an application: SamuLLM's search, and the heuristics beside it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from exegpt.app.multimodel.application_file import Asked
from exegpt.stage_plan import StagePlan

SEED = 0
"""Of the outputs that plans are made for."""
SEARCHED, PLANS = 4, 20
"""Branch and bound: stages to go on with from a state, and complete plans."""


@dataclass(frozen=True)
class StageProposal:
    """A plan of stages by one method."""

    method: str
    plan: StagePlan


def propose_stages(asked: Asked) -> list[StageProposal]:
    """Plans by the better of both searches that go beyond the greedy, and by Max- and Min-heuristic, in this order;
    InputError where a model or a call doesn't fit. Padding is counted as engines of today do: not at all.
    """
    from xscheduler.multimodel.running_phase import execute
    from xscheduler.multimodel.stage_heuristics import max_stage, min_stage
    from xscheduler.multimodel.stage_search import best_stages
    from xscheduler.multimodel.stage_variations import varied_stages
    from xscheduler.multimodel.stages import Host, PlannedStage, makespan, plan_stages
    from xsimulator.multimodel.stages.application import draw

    application = draw(asked.graph, asked.table, SEED, padded=False)
    host = Host(asked.cluster.devices_per_node, asked.linked)
    proposals = []
    searches: dict[str, Callable[[], tuple[PlannedStage, ...]]] = {
        "samullm": lambda: min(
            best_stages(application, host, SEARCHED, PLANS), varied_stages(application, host, SEARCHED), key=makespan
        ),
        "max": lambda: plan_stages(application, host, max_stage),
        "min": lambda: plan_stages(application, host, min_stage),
    }
    for method, search in searches.items():
        began = time.perf_counter()
        planned = search()
        search_s = time.perf_counter() - began
        # as they run on these very outputs: with devices, and reloads where groups need linked GPUs
        stages = execute(application, host, planned).stages
        plan = StagePlan(StagePlan.VERSION, method, host.devices, host.linked, stages, search_s)
        proposals.append(StageProposal(method, plan))
    return proposals
