"""Plans of stages compared with budgets, for models with numbers of requests: which completes first."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xcore.errors import Infeasible, InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import Plan
from xcore.specs.schedule import Schedule
from xmulti.files.application_file import loading_s, loading_text, read_application
from xmulti.plans.demands import ModelDemand
from xmulti.plans.planning import Proposal
from xmulti.stages.stage_planning import propose_stages


def assumed(cluster: ClusterSpec) -> str:
    """Return a text on how loading counts where stages are compared with budgets."""
    return (
        f"methods are compared with loading, {loading_text(cluster.is_cpu)}: of budgets once, before a model's "
        "requests, of stages each time that one starts a model"
    )


def beside_stages(
    proposals: Sequence[Proposal], demands: Sequence[ModelDemand], file: Path, cluster: str, **options: Any
) -> list[Proposal]:
    """Return the proposals of budgets and of SamuLLM's stages, the best one first.

    If there are stages, loading counts for all. `file`, `cluster` and `options` are those of the demands.
    """
    staged = _staged(file, cluster, options)
    if staged.stages:
        proposals = [replace(p, loading_s=loading_of(p.plan, demands)) if p.plan else p for p in proposals]
    return sorted([*proposals, staged], key=lambda proposal: (proposal.order, proposal.method != "exegpt"))


def _staged(file: Path, cluster: str, options: dict[str, Any]) -> Proposal:
    try:
        best, *_ = propose_stages(read_application(file, cluster, **options))
    except (Infeasible, InputError) as error:
        return Proposal("samullm", None, str(error))
    return Proposal(best.method, None, stages=best.plan)


def loading_of(plan: Plan, demands: Sequence[ModelDemand]) -> dict[str, float]:
    """Return each model's loading time, as plans of stages count it: that of the device with the most layers."""
    settings = {demand.name: demand.setting for demand in demands}
    return {m.name: loading_s(settings[m.name], _most(m.schedule)) for m in plan.models}


def _most(schedule: Schedule) -> float:
    """Return the largest share of a decoder's layers on one device."""
    ranges = [(stage.decoder_layers or (0, 0), stage.tp) for stage in schedule.stages]
    return max((end - first) / tp for (first, end), tp in ranges) / schedule.model.spec.layers
