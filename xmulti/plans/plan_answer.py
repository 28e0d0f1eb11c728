"""The answer of `exegpt plan`: the methods compared, with advice and assumptions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.errors import Infeasible, InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import Plan
from xcore.specs.price import Prices, price_per_hour
from xcore.specs.schedule import Schedule
from xmulti.applications.expected_calls import expected_calls
from xmulti.files.application_file import loading_s, loading_text, read_application
from xmulti.files.models_file import read_models
from xmulti.files.stage_plan import StagePlan
from xmulti.plans.demands import ModelDemand, read_demands
from xmulti.plans.model_frontier import Frontiers
from xmulti.plans.plan_advice import PlanGain, advice_about, gains
from xmulti.plans.planning import METHODS, Proposal, propose
from xmulti.sharing.call_replay import CallReplay
from xmulti.stages.stage_planning import propose_stages
from xprofiler.kernel_import import KernelImport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xscheduler.settings import SettingKeywords


@dataclass(frozen=True)
class PlanAnswer:
    """Plans for the models of a file."""

    proposals: list[Proposal]
    """The best one first."""
    gains: list[PlanGain]
    """Gains of changes to the budgets; empty if they weren't asked for."""
    now: Plan | None
    """The budgets with which the gains are compared: the best, or the nearest if none sustains the rates."""
    advice_about: str
    """The changes that advice would cover; empty: none."""
    calls: CallReplay | None
    """An application's calls on the best budgets; None without one."""
    assumptions: list[str]
    imports: Mapping[str, KernelImport]
    """The import that could replace the data sheet, by model."""

    @property
    def best(self) -> Plan | StagePlan | None:
        """The plan that can be written and run; None if no method has a plan."""
        return self.proposals[0].found

    @property
    def advice(self) -> list[str]:
        """A sentence for each gain."""
        return [gain.text(self.now) for gain in self.gains]


def answer(
    file: Path,
    cluster: str,
    method: str,
    advice: bool,
    prices: Prices | None,
    profile: Sequence[str] = (),
    most_replicas: int | None = None,
    one_node: bool = False,
    **options: "Unpack[SettingKeywords]",
) -> PlanAnswer:
    """Plan the models of a file by one method of budgets, or by the best of all.

    `most_replicas`: the most groups of devices that a model may be in; None: no limit. `one_node`: whether all devices
    of a model must be of one node.

    Raises:
        InputError: The file can't be read or planned.
    """
    demands = read_demands(file, cluster, profile=profile, one_node=one_node, **options)
    expected = expected_calls(file, read_models(file))
    where, methods = demands[0].setting.cluster, METHODS if method == "best" else (method,)
    if prices:
        price_per_hour(prices, where)  # refused before a search, not after it
    frontiers = Frontiers()
    proposals = propose(demands, where, methods, frontiers, most_replicas)
    now = proposals[0].plan or proposals[0].near
    if method == "best":
        proposals = beside_stages(proposals, demands, file, cluster, profile, **options)
    budgets = proposals[0].plan
    profiles = {demand.name: demand.setting.profile for demand in demands}
    calls = expected.replayed(budgets, profiles) if budgets and expected else None
    gained = gains(demands, where, methods, now, frontiers, most_replicas) if advice else []
    assumptions = [f"{demand.name}: {text}" for demand in demands for text in demand.setting.assumptions]
    assumptions += [assumed(where)] if any(proposal.stages for proposal in proposals) else []
    imports = {demand.name: kernels for demand in demands if (kernels := demand.setting.kernels)}
    return PlanAnswer(proposals, gained, now, advice_about(demands, where), calls, assumptions, imports)


def assumed(cluster: ClusterSpec) -> str:
    """Return a text on how loading times count if stages are compared with budgets."""
    return (
        f"methods are compared with loading times, {loading_text(cluster.is_cpu)}: plans of budgets load each model "
        "once, before its requests; plans of stages load a model each time that a stage starts it"
    )


def beside_stages(
    proposals: Sequence[Proposal],
    demands: Sequence[ModelDemand],
    file: Path,
    cluster: str,
    profile: Sequence[str] = (),
    **options: "Unpack[SettingKeywords]",
) -> list[Proposal]:
    """Return the proposals of budgets and of SamuLLM's stages, the best one first.

    If there are stages, loading times count for all proposals. The last arguments are those of
    the demands.
    """
    staged = _staged(file, cluster, profile, options)
    if staged.stages:
        proposals = [replace(p, loading_s=loading_of(p.plan, demands)) if p.plan else p for p in proposals]
    return sorted([*proposals, staged], key=lambda proposal: (proposal.order, proposal.method != "exegpt"))


def _staged(file: Path, cluster: str, profile: Sequence[str], options: "SettingKeywords") -> Proposal:
    try:
        best, *_ = propose_stages(read_application(file, cluster, profile=profile, **options))
    except (Infeasible, InputError) as error:
        return Proposal("samullm", None, str(error))
    return Proposal(best.method, None, stages=best.plan)


def loading_of(plan: Plan, demands: Sequence[ModelDemand]) -> dict[str, float]:
    """Return each model's loading time, as in plans of stages: the time of the device with the most layers."""
    settings = {demand.name: demand.setting for demand in demands}
    return {m.name: loading_s(settings[m.name], _most(m.schedule)) for m in plan.models}


def _most(schedule: Schedule) -> float:
    """Return the largest share of a decoder's layers on one device."""
    ranges = [(stage.decoder_layers or (0, 0), stage.tp) for stage in schedule.stages]
    return max((end - first) / tp for (first, end), tp in ranges) / schedule.model.spec.layers
