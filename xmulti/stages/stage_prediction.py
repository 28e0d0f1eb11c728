"""The prediction of a plan of stages for actual outputs: its simulation, with these instead of the planned ones."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from xcore.arrays import Integers
from xcore.requests.request import Result
from xcore.specs.cost_table import CostTable, ModelCosts
from xcore.specs.profile import Profile
from xcore.specs.schedule import BLOCK_SIZE
from xmulti.applications.planned_application import PlannedApplication
from xmulti.files.dependent_calls import Chain, DependentCalls, Tokens
from xmulti.files.stage_plan import StagedModel, StagePlan
from xmulti.stages.application import Application, NodeCalls, model_replicas
from xmulti.stages.greedy_stages import Host, PlannedStage
from xmulti.stages.model_run import RemainingCalls
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


Place = tuple[str, int]
"""A chain: its node, and its index there."""


def of_known_calls(
    calls: DependentCalls[Tokens], lengths: Mapping[str, tuple[int, int]], table: CostTable
) -> Application:
    """Return the application of these calls; `lengths` are each call's prompt and output tokens, by its name.

    The table's models have the names of the nodes; costs are without padding.
    """
    first: dict[Place, int] = {}
    for name, chains in calls.chains.items():
        at = 0
        for chain in chains:
            first[name, chain.index] = at
            at += len(chain.own)
    nodes = {name: _node(name, chains, first, lengths) for name, chains in calls.chains.items()}
    models = [table.model(name) for name in nodes]
    replicas = {model.name: model_replicas(model, padded=False) for model in models}
    load_s = {(m.name, d.tp): d.load_s for m in models for d in m.degrees if d.load_s is not None}
    return Application(nodes, replicas, load_s)


def _node(
    name: str, chains: Sequence[Chain[Tokens]], first: Mapping[Place, int], lengths: Mapping[str, tuple[int, int]]
) -> NodeCalls:
    rounds = [(chain, number) for chain in chains for number in range(len(chain.own))]
    prompts, outputs = np.array([lengths[chain.call(number)] for chain, number in rounds], dtype=np.int64).T.copy()
    following = np.arange(1, len(rounds) + 1)
    following[[first[name, chain.index] + len(chain.own) - 1 for chain in chains]] = -1
    of_calls = RemainingCalls(prompts, outputs, np.zeros(len(rounds)), following)
    return NodeCalls(name, of_calls, _needs(name, chains, first, len(rounds)))


def _needs(
    name: str, chains: Sequence[Chain[Tokens]], first: Mapping[Place, int], count: int
) -> tuple[tuple[str, Integers], ...]:
    """Return, for each chain's first call, the calls that must have ended.

    There is one entry for each time that it reads a source.
    """
    needs: dict[tuple[str, int], Integers] = {}
    for chain in chains:
        seen: dict[str, int] = {}
        for source, number in chain.reads:
            again = seen[source.node.name] = seen.get(source.node.name, -1) + 1
            waits = needs.setdefault((source.node.name, again), np.full(count, -1))
            waits[first[name, chain.index]] = _place(source, number, first)
    return tuple((source, waits) for (source, _), waits in needs.items())


def _place(source: Chain[Tokens], number: int | None, first: Mapping[Place, int]) -> int:
    return first[source.node.name, source.index] + (len(source.own) - 1 if number is None else number)
