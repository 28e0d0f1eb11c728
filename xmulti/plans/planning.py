"""Plans of several models on one cluster: how its devices are divided, and how each model then performs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from xcore.console import output
from xcore.errors import Infeasible, InputError
from xcore.processes import WORTH, Processes
from xcore.quantity import figure_text
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import Plan, PlannedModel, joined
from xmulti.files.stage_plan import StagePlan
from xmulti.plans.demands import ModelDemand
from xmulti.plans.infeasible import no_room, nothing_fits, rates_missed
from xmulti.plans.model_frontier import Frontiers, ModelFrontier
from xmulti.plans.plan_evaluation import Drawn
from xscheduler.spaces import POLICIES

if TYPE_CHECKING:
    from xmulti.sharing.mixtures import SharedGroups

METHODS = ("exegpt", "muxserve", "temporal", "seallm", "alpaserve", "spatial")
"""Methods to divide devices.

* `exegpt`: by each model's performance on them, searched jointly.
* `muxserve`, `temporal`: by MuxServe's placement. Models that share devices take turns. Only on one GPU and under
  `muxserve` do they decode at the same time, on shares of its multiprocessors.
* `seallm`, `alpaserve`: by SeaLLM's placement for latencies, by the requests' priorities or in order of arrival.
* `spatial`: in proportion to each model's work, under the policy of most engines (MuxServe's baseline).
"""
_POLICIES = {"exegpt": POLICIES, "spatial": ("chunked",)}
_QUICK = ("orca",)
"""Policies with which numbers of devices are compared.

Their searches take a fifth of all policies' time, and the best ones' goodput is rarely a tenth higher.
"""
_MOST_WAYS = 1000
_PIECES = 2
_SHARING = ("muxserve", "temporal", "seallm", "alpaserve")


@dataclass(frozen=True)
class Proposal:
    """A method's result: a plan, or the reason why it has none."""

    method: str
    plan: Plan | None
    why_not: str = ""
    near: Plan | None = None
    """The plan that misses a rate, if that is why there is no plan."""
    stages: StagePlan | None = None
    """The plan of stages, from a method of stages."""
    loading_s: Mapping[str, float] = field(default_factory=dict)
    """By model: the loading time before its requests, where it counts; a plan of stages includes it."""

    @property
    def found(self) -> Plan | StagePlan | None:
        """The plan that can be written and run."""
        return self.plan or self.stages

    @property
    def headroom(self) -> float | None:
        """The least headroom of all models with a rate; None without one."""
        return self.plan.headroom if self.plan else None

    @property
    def seconds(self) -> float | None:
        """Seconds until the last model with a number of requests is done; None without one."""
        if self.stages:
            return self.stages.seconds
        models = self.plan.models if self.plan else ()
        known = [self.loading_s.get(m.name, 0.0) + m.seconds for m in models if m.seconds is not None]
        return max(known, default=None)

    @property
    def gpu_hours(self) -> float | None:
        """GPU hours of the devices in use; None if a rate has no end."""
        if self.stages:
            return self.stages.gpu_hours
        if self.plan is None or self.plan.gpu_hours is None:
            return None
        loading = [len(model.devices) * self.loading_s.get(model.name, 0.0) for model in self.plan.models]
        return self.plan.gpu_hours + sum(loading) / 3600

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key: plans first; then plans that finish sooner, have more headroom, or use fewer devices."""
        if self.found is None:
            return (1.0,)
        return 0.0, self.seconds or 0.0, -(self.headroom or 0.0), -self.found.free

    def why_before(self, other: "Proposal") -> str:
        """Return why this plan is better than another one."""
        if self.found is None or other.found is None:
            return f"{other.method} has no plan"
        if self.seconds != other.seconds:
            mine, theirs = (f"{figure_text(p.seconds)} s" for p in (self, other))
            loading = ", including loading" if self.stages or self.loading_s else ""
            return f"all requests are finished after {mine}, with {other.method} after {theirs}{loading}"
        if other.plan and self.headroom != other.headroom:
            tightest = min(other.plan.models, key=lambda m: math.inf if m.headroom is None else m.headroom)
            mine, theirs = (figure_text(p.headroom) for p in (self, other))
            return (
                f"every model can reach {mine} times its rate, but with {other.method} only {theirs} times, because "
                f"of '{tightest.name}'"
            )
        if self.found.free != other.found.free:
            return f"{self.found.free} devices stay free, but with {other.method} only {other.found.free}"
        return f"{other.method} gives an equally good plan"


class Unsustained(Infeasible):
    """A plan that places all models but doesn't sustain all rates."""

    def __init__(self, message: str, plan: Plan):
        super().__init__(message, None)
        self.plan = plan


def propose(
    demands: tuple[ModelDemand, ...],
    cluster: ClusterSpec,
    methods: tuple[str, ...],
    kept: Frontiers | None = None,
    most_replicas: int | None = None,
) -> list[Proposal]:
    """Return each method's proposal, the best one first. `kept` are frontiers of earlier plans.

    `most_replicas`: the most groups of devices that a model may be in, where a method allows several; None: no limit.

    Raises:
        InputError: The only method can't plan these models.
    """
    known: dict[str, Proposal] = {}
    with Processes(_worth(demands)) as processes:
        for method in sorted(
            methods, key=lambda method: method == "exegpt"
        ):  # exegpt comes last: it takes over better plans of the others
            try:
                plan = _made(demands, cluster, method, known, kept, processes, most_replicas)
                known[method] = Proposal(method, _with_directories(plan, demands))
            except (Infeasible, InputError) as error:
                if len(methods) == 1 and isinstance(error, InputError):
                    raise
                known[method] = _no_plan(method, error)
    return sorted(known.values(), key=lambda proposal: (proposal.order, proposal.method != "exegpt"))


def make_plan(
    demands: tuple[ModelDemand, ...], cluster: ClusterSpec, method: str, most_replicas: int | None = None
) -> Plan:
    """Return the plan of a method, with replicas as in `propose`.

    Raises:
        Infeasible: The plan doesn't sustain all rates, or the models don't fit; the message has the nearest plan.
    """
    with Processes(_worth(demands)) as processes:
        return _made(demands, cluster, method, {}, None, processes, most_replicas)


def _made(
    demands: tuple[ModelDemand, ...],
    cluster: ClusterSpec,
    method: str,
    known: dict[str, Proposal],
    kept: Frontiers | None,
    processes: Processes,
    most_replicas: int | None,
) -> Plan:
    """Make a plan as `make_plan` does, with other methods' `known` plans and the `kept` frontiers of earlier plans."""
    frontiers = _frontiers(demands, method, kept) if method in _POLICIES else []
    if method == "exegpt":
        return _joint(demands, cluster, known, frontiers, processes, most_replicas)
    return _plan_of(demands, cluster, method, frontiers, processes, most_replicas)


def _worth(demands: tuple[ModelDemand, ...]) -> int:
    """Return the number of tasks from which processes pay off.

    With three or more online models, one task takes seconds.
    """
    return _PIECES if sum(demand.rate_seq_s is not None for demand in demands) > _PIECES else WORTH


def _joint(
    demands: tuple[ModelDemand, ...],
    cluster: ClusterSpec,
    known: dict[str, Proposal],
    frontiers: list[ModelFrontier],
    processes: Processes,
    most_replicas: int | None,
) -> Plan:
    """Return the best of three kinds of plans: separate devices, the other methods' plans, and mixtures of both."""
    from xmulti.sharing.mixtures import SharedGroups

    try:
        alone = Proposal("exegpt", _plan_of(demands, cluster, "exegpt", frontiers, processes, 1))
    except Infeasible as error:
        alone = _no_plan("exegpt", error)
    proposals = [alone, *known.values()]
    level = _highest(proposals)
    if _may_share(demands, cluster):
        others = [method for method in _SHARING if method not in known]
        proposals += _shared_above(demands, cluster, others, level, processes, most_replicas)
    mixture = SharedGroups(demands, cluster, frontiers, processes, level)
    proposals += _mixed(mixture, demands, [p.plan or p.near for p in proposals])
    best = min(proposals, key=lambda proposal: proposal.order)
    if best.plan is None:
        if near := [proposal.near for proposal in proposals if proposal.near and proposal.near.headroom]:
            _check_rates(max(near, key=lambda plan: plan.headroom or 0.0))
        raise Infeasible(alone.why_not, None)
    return replace(best.plan, method="exegpt")


def _shared_above(
    demands: tuple[ModelDemand, ...],
    cluster: ClusterSpec,
    methods: list[str],
    level: float,
    processes: Processes,
    most_replicas: int | None,
) -> list[Proposal]:
    """Return the plans of sharing methods that exceed `level`; stop measuring a plan that doesn't."""
    placed, proposals = [], []
    for method in methods:
        try:
            placed += _placed(demands, cluster, method, level, most_replicas)
        except (Infeasible, InputError) as error:
            proposals.append(_no_plan(method, error))
    for plan in _measured(placed, demands, level, processes):
        try:
            _check_rates(plan)
            proposals.append(Proposal(plan.method, plan))
        except Infeasible as error:
            proposals.append(_no_plan(plan.method, error))
    return proposals


def _highest(proposals: list[Proposal]) -> float:
    """Return the largest headroom of the proposals' plans, or of the nearest plans."""
    plans = [proposal.plan or proposal.near for proposal in proposals]
    return max((plan.headroom or 0.0 for plan in plans if plan), default=0.0)


def _mixed(mixture: "SharedGroups", demands: tuple[ModelDemand, ...], plans: list[Plan | None]) -> list[Proposal]:
    """Return the best mixture of models that share devices and models alone, if it is better than these plans."""
    from xmulti.sharing.mixtures import MOST_MODELS
    from xmulti.sharing.shared_devices import can_share

    if len(demands) > MOST_MODELS or sum(map(can_share, demands)) < 2:
        return []
    with output.progress("groups that share devices") as progress:
        plan = mixture.improve([plan for plan in plans if plan], progress)
    if plan is None:
        return []
    short = plan.headroom is not None and plan.headroom < 1
    return [Proposal("exegpt", None, near=plan) if short else Proposal("exegpt", plan)]


def _no_plan(method: str, error: Exception) -> Proposal:
    return Proposal(method, None, str(error), error.plan if isinstance(error, Unsustained) else None)


def _with_directories(plan: Plan, demands: tuple[ModelDemand, ...]) -> Plan:
    """Return the plan with the directories that are needed to run it."""
    directories = {demand.name: demand.directory for demand in demands}
    return replace(plan, models=tuple(replace(model, directory=directories[model.name]) for model in plan.models))


def _may_share(demands: tuple[ModelDemand, ...], cluster: ClusterSpec) -> bool:
    """Return whether all models can share devices, and the cluster has few enough divisions to try them all."""
    from xmulti.sharing.placement import cuts

    ways = math.comb(len(cuts(cluster.devices_per_node)) + cluster.nodes - 1, cluster.nodes)
    return ways <= _MOST_WAYS and all(d.rate_seq_s and not d.setting.model.encoder_layers for d in demands)


def _plan_of(
    demands: tuple[ModelDemand, ...],
    cluster: ClusterSpec,
    method: str,
    frontiers: list[ModelFrontier],
    processes: Processes,
    most_replicas: int | None,
) -> Plan:
    """Return the plan of one method.

    Raises:
        Infeasible: It misses a rate.
    """
    if method in _SHARING:
        measured = _measured(_placed(demands, cluster, method, 0.0, most_replicas), demands, 0.0, processes)
        plan = max(measured, key=lambda each: each.headroom or 0.0)
    else:
        with output.progress(f"budgets by {method}") as progress:
            plan = _dedicated(demands, cluster, method, frontiers, progress, processes)
    _check_rates(plan)
    return plan


def _frontiers(demands: tuple[ModelDemand, ...], method: str, kept: Frontiers | None = None) -> list[ModelFrontier]:
    """Return each model's frontier, which is searched on demand; equal models have the same one.

    Numbers of devices are chosen by the performance under a quick policy, if there is one.
    """
    policies = _POLICIES[method]
    return (kept or Frontiers()).of(demands, policies, tuple(policy for policy in _QUICK if policy in policies))


def _placed(
    demands: tuple[ModelDemand, ...], cluster: ClusterSpec, method: str, level: float, most_replicas: int | None
) -> list[Plan]:
    """Place models on shared devices, without a replay (see `_measured`); a plan without replicas comes first."""
    from xmulti.sharing.shared_devices import place_together
    from xmulti.sharing.staged_placement import Rule, place_in_groups

    with output.progress(f"budgets by {method}") as progress:
        if method in ("seallm", "alpaserve"):
            rule: Rule = "priority" if method == "seallm" else "time"
            ways = place_in_groups(demands, cluster, rule, progress, level, most_replicas)
        else:
            ways = [place_together(demands, cluster, "space" if method == "muxserve" else "time", progress)]
    return [Plan(Plan.VERSION, method, cluster, tuple(models)) for models in ways]


def _measured(
    placed: Sequence[Plan], demands: tuple[ModelDemand, ...], level: float, processes: Processes
) -> list[Plan]:
    """Replay the units of all plans, those joined by replicas together. A unit below `level` gets goodput 0.

    If a model with separate devices is below `level`, so is its plan: the plan's shared devices aren't measured.
    """
    by_name = {demand.name: demand for demand in demands}
    units = [
        (number, tuple(model for unit in units for model in unit))
        for number, plan in enumerate(placed)
        for units in joined(plan.units)
    ]
    separate = [each for each in units if len(each[1]) == 1]
    alone = _replayed(separate, by_name, level, processes)
    below = {number for (number, _), model in alone.items() if not model.goodput_seq_s}
    sharing = [each for each in units if len(each[1]) > 1 and each[0] not in below]
    unmeasured = {(number, model.key): model for number, unit in units for model in unit}
    models = unmeasured | alone | _replayed(sharing, by_name, level, processes)
    return [
        replace(plan, models=tuple(models[number, model.key] for model in plan.models))
        for number, plan in enumerate(placed)
    ]


def _replayed(
    units: list[tuple[int, tuple[PlannedModel, ...]]],
    demands: dict[str, ModelDemand],
    level: float,
    processes: Processes,
) -> "dict[tuple[int, tuple[str, tuple[int, ...]]], PlannedModel]":
    """Return the models of units with their performance, by the number of their plan and their key."""
    from xmulti.plans.plan_evaluation import evaluated

    replayed = processes.each(evaluated, [(unit, demands, None, level) for _, unit in units])
    return {(number, model.key): model for (number, _), unit in zip(units, replayed, strict=True) for model in unit}


def _dedicated(
    demands: tuple[ModelDemand, ...],
    cluster: ClusterSpec,
    method: str,
    frontiers: list[ModelFrontier],
    progress: Callable[[int, int], None],
    processes: Processes,
) -> Plan:
    """Plan models on separate devices: choose the numbers of devices first, then search all policies on those."""
    from xmulti.plans.plan_evaluation import drawn

    requests = drawn({demand.name: demand for demand in demands})
    give = _searched if method == "exegpt" else _in_proportion
    devices = give(demands, frontiers, cluster, progress, processes)
    sizes = [frontier.within(len(of_model)).devices for frontier, of_model in zip(frontiers, devices, strict=True)]
    best = ModelFrontier.with_all_policies(list(zip(frontiers, sizes, strict=True)), processes)
    planned = [
        (served.planned(demand, of_model), demand, requests)
        for demand, of_model, served in zip(demands, devices, best, strict=True)
    ]
    models = processes.each(_evaluated, planned)
    return Plan(Plan.VERSION, method, cluster, tuple(models))


def _evaluated(model: PlannedModel, demand: ModelDemand, requests: Mapping[str, Drawn]) -> PlannedModel:
    """Return a model with separate devices, replayed at its rate, if any."""
    from xmulti.plans.plan_evaluation import evaluated

    return evaluated([model], {demand.name: demand}, requests)[0] if demand.rate_seq_s else model


def _check_rates(plan: Plan) -> None:
    """Check a plan's rates.

    Raises:
        Unsustained: A model's goodput is below its rate.
    """
    if missed := rates_missed(plan):
        raise Unsustained(missed, plan)


def _searched(
    demands: tuple[ModelDemand, ...],
    frontiers: list[ModelFrontier],
    cluster: ClusterSpec,
    progress: Callable[[int, int], None],
    processes: Processes,
) -> tuple[tuple[int, ...], ...]:
    """Return the devices of the best budgets."""
    from xmulti.sharing.budgets import Budget, Unsearched

    def search(wanted: list[tuple[int, int]]) -> list[Budget | None]:
        ModelFrontier.search([(frontiers[i], devices) for i, devices in wanted], processes)
        found = [(demands[i], frontiers[i].on(devices)) for i, devices in wanted]
        return [served.budget(demand) if served else None for demand, served in found]

    sizes = demands[0].sizes(cluster)
    unsearched = Unsearched(len(demands), search, cluster.nodes, cluster.devices_per_node, sizes)
    best = unsearched.best(progress)
    if best and best.level.headroom > 0 and best.level.seconds < math.inf:
        return best.devices
    least = []
    for number, demand in enumerate(demands):
        fewest = unsearched.least(number)
        if fewest is None:
            raise Infeasible(nothing_fits(demand, cluster, frontiers[number].policies), None)
        least.append(fewest)
    raise Infeasible(no_room(demands, least, cluster, shared=True), None)


def _in_proportion(
    demands: tuple[ModelDemand, ...],
    frontiers: list[ModelFrontier],
    cluster: ClusterSpec,
    progress: Callable[[int, int], None],
    processes: Processes,
) -> tuple[tuple[int, ...], ...]:
    """Return devices in proportion to each model's work, by the largest remainders.

    Each model gets at least as many as it needs to run. A budget is part of a node, or whole nodes.
    """
    from xmulti.sharing.budgets import place

    sizes = demands[0].sizes(cluster)
    work = [demand.work for demand in demands]
    budgets = []
    for number, (demand, frontier) in enumerate(zip(demands, frontiers, strict=True)):
        progress(number, len(frontiers))
        least = next((size for size in sizes if frontier.on(size)), None)
        if least is None:
            raise Infeasible(nothing_fits(demand, cluster, frontier.policies), None)
        budgets.append(least)
    while True:  # the next device goes to the model with the most work per device
        lacking = sorted(range(len(work)), key=lambda i: work[i] / budgets[i], reverse=True)
        for i in lacking:
            more = next((size for size in sizes if size > budgets[i]), None)
            trial = [more if more and j == i else budget for j, budget in enumerate(budgets)]
            if more and place(trial, cluster.nodes, cluster.devices_per_node):
                budgets = trial
                break
        else:
            break
    placed = place(budgets, cluster.nodes, cluster.devices_per_node)
    if placed is None:
        raise Infeasible(no_room(demands, budgets, cluster, shared=False), None)
    return placed
