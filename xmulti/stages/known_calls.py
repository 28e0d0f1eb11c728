"""An application whose calls all have known lengths: those of a finished run."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from xcore.specs.cost_table import CostTable
from xmulti.files.dependent_calls import Chain, DependentCalls
from xmulti.stages.application import Application, Integers, NodeCalls, model_replicas
from xmulti.stages.model_run import RemainingCalls

Place = tuple[str, int]
"""A chain: its node, and its index there."""


def of_known_calls(calls: DependentCalls[Any], lengths: Mapping[str, tuple[int, int]], table: CostTable) -> Application:
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


def _node(name: str, chains: Any, first: Mapping[Place, int], lengths: Mapping[str, tuple[int, int]]) -> NodeCalls:
    rounds = [(chain, number) for chain in chains for number in range(len(chain.own))]
    prompts, outputs = np.array([lengths[chain.call(number)] for chain, number in rounds], dtype=np.int64).T.copy()
    following = np.arange(1, len(rounds) + 1)
    following[[first[name, chain.index] + len(chain.own) - 1 for chain in chains]] = -1
    of_calls = RemainingCalls(prompts, outputs, np.zeros(len(rounds)), following)
    return NodeCalls(name, of_calls, _needs(name, chains, first, len(rounds)))


def _needs(name: str, chains: Any, first: Mapping[Place, int], count: int) -> tuple[tuple[str, Integers], ...]:
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


def _place(source: Chain[Any], number: int | None, first: Mapping[Place, int]) -> int:
    return first[source.node.name, source.index] + (len(source.own) - 1 if number is None else number)
