"""Sessions: the turns of conversations and of agents, found in a trace or drawn from a workload."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.prompt_identity import PromptIdentity


def session_names(requests: Sequence[RequestLengths], runs: Sequence[Hashable]) -> list[Hashable]:
    """Return the name of each request's session: its run, its conversation, or the first chat that it goes back to.

    A request without any of these is a session of its own. `runs` are None where a request has no run.
    """
    roots: dict[str, str] = {}
    names: list[Hashable] = []
    for place, (request, run) in enumerate(zip(requests, runs, strict=True)):
        identity = request.identity or PromptIdentity()
        chat, parent = identity.chat, identity.parent_chat
        root = roots.get(parent, parent) if parent is not None else chat
        if chat is not None and root is not None:
            roots[chat] = root
        known = (("run", run), ("conversation", identity.conversation), ("chat", root))
        names.append(next((name for name in known if name[1] is not None), place))
    return names


def sessions_of(requests: Sequence[RequestLengths], runs: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the requests of each session, by index, in the order of their arrivals; sessions by their first turn."""
    order = sorted(range(len(requests)), key=lambda place: requests[place].arrival_s)
    names = session_names([requests[place] for place in order], [runs[place] for place in order])
    sessions: dict[Hashable, list[int]] = {}
    for place, name in zip(order, names, strict=True):
        sessions.setdefault(name, []).append(place)
    return tuple(tuple(turns) for turns in sessions.values())


def drawn_sessions(
    workload: Workload, count: int, turns: int, seed: int, longest: int | None
) -> tuple[RequestLengths, ...]:
    """Draw `count` sessions of `turns` turns, whose prompts are the session so far and an input of the workload.

    A session ends sooner if its next turn would be longer than `longest` tokens. One turn has no session's name.
    """
    drawn = iter(workload.draw(count * turns, seed, longest))
    if turns == 1:
        return tuple(replace(request, arrival_s=0.0) for request in drawn)
    requests = []
    for number in range(count):
        context, identity = 0, PromptIdentity(conversation=str(number))
        for request in [next(drawn) for _ in range(turns)]:
            turn = RequestLengths(context + request.input, request.output, 0.0, identity)
            if not turn.fits(longest):
                break
            requests.append(turn)
            context = turn.input + turn.output
    return tuple(requests)
