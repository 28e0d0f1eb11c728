"""`simulate --agents`: sessions in a closed loop, from a trace or drawn from a workload."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from exegpt.options.simulate import SimulateOptions
from xcore.duration import duration_text, parse_delay
from xcore.errors import InputError
from xcore.quantity import figure_text
from xcore.specs.request_times import percentiles
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.labels import Labels
from xcore.traces.sessions import drawn_sessions, sessions_of
from xscheduler.application_runs import run_of

if TYPE_CHECKING:
    from xsimulator.replay.closed_loop import ClosedLoop, Sessions

_LONGEST_PAUSE_S = 86_400.0
_MOST_TURNS = 2_000_000
"""Turns of all agents that are drawn at most."""
_LEAST_REQUESTS, _REQUESTS_PER_AGENT, _SESSIONS_PER_AGENT = 1000, 10, 2
"""Least requests to draw: in all, and of each agent; least sessions of each agent."""


def check_closed_loop(options: SimulateOptions) -> None:
    """Raise InputError for options of a closed loop without agents, or for options that agents exclude."""
    of_agents = (("--turns", options.turns), ("--tool-time", options.tool_time))
    if options.agents is None:
        for name, value in of_agents:
            if value is not None:
                raise InputError(f"{name} {value} is about sessions in a closed loop: add --agents, like --agents 200.")
        return
    _pause_s(options)
    turns = 1 if options.turns is None else options.turns
    if min(options.agents, turns) < 1 or options.agents * turns > _MOST_TURNS:
        raise InputError(
            f"--agents {options.agents} with --turns {turns}: both must be at least 1, and their product at most "
            f"{_MOST_TURNS:,}."
        )
    if options.rate or options.timeline:
        other = f"--rate {options.rate}" if options.rate else f"--timeline '{options.timeline}'"
        raise InputError(
            f"{other} needs requests with fixed arrivals, but with --agents {options.agents} a turn arrives when the "
            "last one has ended: leave one of the two out."
        )
    if options.turns and options.turns > 1 and options.prefix_hit:
        raise InputError(
            f"--turns {options.turns} says what prompts find in the cache, and so does --prefix-hit "
            f"{options.prefix_hit:g}: leave one of the two out."
        )
    if options.turns and options.replay:
        raise InputError(
            f"--turns {options.turns} is for sessions that are drawn, but '{options.replay}' has its own: leave "
            "--turns out."
        )


def drawn_turns(schedule: Schedule, options: SimulateOptions) -> Workload:
    """Return the turns of sessions drawn from the schedule's workload."""
    assert options.agents, "a closed loop has agents"
    turns, agents, share = options.turns or 1, options.agents, schedule.workload.prefix_hit
    if turns > 1 and share:
        raise InputError(
            f"--turns {turns} says what prompts find in the cache, but the schedule was made for a share of "
            f"{share:.0%}: leave --turns out, or tune without --prefix-hit."
        )
    requests = max(_LEAST_REQUESTS, _REQUESTS_PER_AGENT * agents)
    count = max(-(-requests // turns), _SESSIONS_PER_AGENT * agents)
    rows = drawn_sessions(schedule.workload, count, turns, options.seed, schedule.model.spec.longest_request)
    return Workload.from_requests(schedule.workload.name, rows)


@dataclass(frozen=True)
class AgentTurns:
    """The sessions of a closed loop, and what is assumed about them."""

    sessions: "Sessions"
    notes: tuple[str, ...]

    @staticmethod
    def of(options: SimulateOptions, requests: Sequence[RequestLengths], labels: Sequence[Labels]) -> "AgentTurns":
        """Return the sessions that requests and labels name; a turn pauses for its `after_s`, or for --tool-time."""
        from xsimulator.replay.closed_loop import Sessions

        assert options.agents, "a closed loop has agents"
        turns = sessions_of(requests, [run_of(own) for own in labels])
        usual_s = _pause_s(options)
        firsts = {own[0] for own in turns}
        pauses_s = tuple(
            own.after_s if own.after_s is not None else 0.0 if place in firsts else usual_s
            for place, own in enumerate(labels)
        )
        sessions = Sessions(turns, pauses_s, options.agents)
        return AgentTurns(sessions, tuple(_notes(options, sessions, labels)))


def _notes(options: SimulateOptions, sessions: "Sessions", labels: Sequence[Labels]) -> list[str]:
    """Return sentences about the sessions and the pauses before their turns."""
    count = len(sessions.turns)
    where = f"{Path(options.replay).name}, whose arrivals are not used" if options.replay else "the workload's lengths"
    each = figure_text(sum(map(len, sessions.turns)) / count)
    notes = [f"closed loop: {sessions.agents:,} agents run {count:,} sessions of {each} turns on average, from {where}"]
    if sessions.agents > len(sessions.turns):
        notes.append(f"warning: only {count:,} of the {sessions.agents:,} agents have a session")
    if all(own.after_s is None for own in labels):
        notes.append(f"closed loop: {_pause_text(options)} lie between the end of a turn and the next turn")
    return notes


def _pause_s(options: SimulateOptions) -> float:
    """Return --tool-time in seconds; 0 without it."""
    return parse_delay(options.tool_time, "--tool-time", _LONGEST_PAUSE_S) if options.tool_time else 0.0


def _pause_text(options: SimulateOptions) -> str:
    return f"{options.tool_time} (--tool-time)" if options.tool_time else "0 s (--tool-time sets this)"


class FullLoad(TypedDict):
    """The throughput while all agents were busy."""

    seconds: float
    requests: int
    throughput_seq_s: float
    throughput_tok_s: float


class SessionTimes(TypedDict):
    """The number of sessions, and the percentiles of their seconds."""

    count: int
    completion: dict[str, float | None]


class LoopFacts(TypedDict):
    """The figures of a closed loop for scripts."""

    agents: int
    sessions: SessionTimes
    full_load: FullLoad | None


def loop_facts(loop: "ClosedLoop", sessions: "Sessions") -> LoopFacts:
    """Return the figures of a closed loop for scripts: its sessions, and the throughput while all agents were busy."""
    full = [served for served in loop.replay.served if served.finish_s <= loop.full_s]
    facts: LoopFacts = {
        "agents": sessions.agents,
        "sessions": {"count": len(sessions.turns), "completion": percentiles(sessions.seconds(loop.replay.served))},
        "full_load": None,
    }
    if full and 0 < loop.full_s < float("inf"):
        tokens = sum(served.output_tokens for served in full)
        facts["full_load"] = {
            "seconds": loop.full_s,
            "requests": len(full),
            "throughput_seq_s": len(full) / loop.full_s,
            "throughput_tok_s": tokens / loop.full_s,
        }
    return facts


def full_load_text(facts: LoopFacts) -> str | None:
    """Return a sentence on the throughput while all agents were busy; None if they never were."""
    full = facts["full_load"]
    if full is None:
        return None
    requests_s, tokens_s = figure_text(full["throughput_seq_s"]), figure_text(full["throughput_tok_s"])
    return (
        f"In the first {duration_text(full['seconds'])}, while all {facts['agents']:,} agents were busy: {requests_s} "
        f"requests/s, {tokens_s} output tokens/s."
    )
