"""The lengths of calls with made-up texts: for a seed, they are the same in plans and in runs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from xcore.errors import InputError
from xcore.specs.workload import Workload
from xmulti.files.application_file import ApplicationNode
from xmulti.files.call_graph import GraphNode
from xmulti.files.dependent_calls import Chain, Tokens


def node_stream(seed: int, place: int) -> np.random.Generator:
    """Return the random stream of an application's node, given its place in the file."""
    return np.random.default_rng((seed, place))


def own_lengths(entry: ApplicationNode, workload: Workload, rng: np.random.Generator) -> list[list[int]]:
    """Return the own tokens of a node's calls, by call and round; none for a node without requests."""
    if entry.requests is None:
        return []
    lengths = workload.input.sample(entry.requests, rng)
    rounds = entry.rounds or 1
    each = (rounds,) * entry.requests if isinstance(rounds, int) else rounds
    if len(each) != entry.requests:
        raise InputError(
            f"it has {entry.requests} requests and {len(each)} numbers of rounds: write one number for each request."
        )
    return [[int(length)] * n for length, n in zip(lengths, each, strict=True)]


def instruction_tokens(entry: ApplicationNode, workload: Workload) -> int:
    """Return the tokens of each call's instructions.

    If a node's calls come from other nodes, this is the mean of the inputs, else 0.
    """
    return 0 if entry.requests is not None else round(workload.input.mean)


def graph_node(entry: ApplicationNode, model: str, own: Sequence[Sequence[int]], instructions: int) -> GraphNode:
    """Return a node with these own tokens of its calls, by call and round.

    `instructions` is the number of tokens of its instructions.
    """
    rounds = tuple(map(len, own))
    firsts = tuple(of_call[0] for of_call in own)
    node = GraphNode(entry.name, model, firsts, instructions, (), entry.longest_output, entry.times)
    return replace(node, rounds=rounds) if max(rounds, default=1) > 1 else node


def most_output(chain: Chain[Tokens], prompt_tokens: int, model: str, context: int) -> int:
    """Return the most tokens that a chain's next call can generate.

    Raises:
        InputError: The prompt leaves no room.
    """
    room = context - prompt_tokens
    if room < 1:
        raise InputError(
            f"Call {chain.name} has a prompt of {prompt_tokens:,} tokens, but the context of model '{model}' has "
            f"{context:,}: set longest_output to shorten what the call reads."
        )
    return min(room, chain.node.longest_output or room)


def output_length(chain: Chain[Tokens], workload: Workload, seed: int) -> int:
    """Return the tokens that a chain's next call generates if nothing limits them."""
    rng = np.random.default_rng((seed, *chain.node.name.encode(), chain.index, len(chain.outputs)))
    return int(workload.output.sample(1, rng)[0])
