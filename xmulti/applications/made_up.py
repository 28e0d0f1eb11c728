"""The lengths of calls whose texts are made up: the same where they are planned and where they run, for a seed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from xcore.errors import InputError
from xcore.specs.workload import Workload
from xmulti.files.application_file import ApplicationNode
from xmulti.files.call_graph import GraphNode
from xmulti.files.dependent_calls import Chain


def node_stream(seed: int, place: int) -> np.random.Generator:
    """Return of an application's node, by its place in the file."""
    return np.random.default_rng((seed, place))


def own_lengths(entry: ApplicationNode, workload: Workload, rng: np.random.Generator) -> list[list[int]]:
    """Own tokens of a node's calls, by call and round; none of a node without requests."""
    if entry.requests is None:
        return []
    lengths = workload.input.sample(entry.requests, rng)
    rounds = entry.rounds or 1
    each = (rounds,) * entry.requests if isinstance(rounds, int) else rounds
    if len(each) != entry.requests:
        raise InputError(f"it has {entry.requests} requests and rounds of {len(each)}: name as many.")
    return [[int(length)] * n for length, n in zip(lengths, each, strict=True)]


def instruction_tokens(entry: ApplicationNode, workload: Workload) -> int:
    """Of each call's instructions: those of a node whose calls come from others are as long as the inputs' mean."""
    return 0 if entry.requests is not None else round(workload.input.mean)


def graph_node(entry: ApplicationNode, model: str, own: Sequence[Sequence[int]], instructions: int) -> GraphNode:
    """Return a node with these own tokens of its calls, by call and round, and so many of instructions."""
    rounds = tuple(map(len, own))
    firsts = tuple(of_call[0] for of_call in own)
    node = GraphNode(entry.name, model, firsts, instructions, (), entry.longest_output, entry.times)
    return replace(node, rounds=rounds) if max(rounds, default=1) > 1 else node


def most_output(chain: Chain[Any], prompt_tokens: int, model: str, context: int) -> int:
    """Return tokens that a chain's next call can generate at most; InputError where its prompt leaves no room."""
    room = context - prompt_tokens
    if room < 1:
        raise InputError(
            f"Call {chain.name} has a prompt of {prompt_tokens:,} tokens, and model '{model}' a context of "
            f"{context:,}: let what it reads be shorter, by longest_output."
        )
    return min(room, chain.node.longest_output or room)


def output_length(chain: Chain[Any], workload: Workload, seed: int) -> int:
    """Return tokens that a chain's next call generates if nothing bounds them."""
    rng = np.random.default_rng((seed, *chain.node.name.encode(), chain.index, len(chain.outputs)))
    return int(workload.output.sample(1, rng)[0])
