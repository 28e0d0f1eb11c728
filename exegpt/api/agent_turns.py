"""Options of `--agents`: sessions in a closed loop, from a trace or drawn from a workload."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from exegpt.options.shared_options import AgentOptions
from exegpt.options.simulate import SimulateOptions
from exegpt.options.tune import TuneOptions
from xcore.duration import duration_text, parse_delay
from xcore.errors import InputError
from xcore.quantity import figure_text
from xcore.specs.request_times import percentiles
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.labels import Labels
from xcore.traces.sessions import sessions_of
from xcore.traces.trace import form_of
from xscheduler.application_runs import run_of

if TYPE_CHECKING:
    from xsimulator.replay.closed_loop import ClosedLoop, Sessions

_LONGEST_PAUSE_S = 86_400.0
MOST_TURNS = 2_000_000
"""Turns of all agents that are drawn at most."""


def check_agents(options: AgentOptions, trace: str | None, prefix_hit: float | None) -> None:
    """Raise InputError for options of a closed loop without agents, or that contradict each other."""
    of_agents = (("--turns", options.turns), ("--tool-time", options.tool_time))
    if options.agents is None:
        for name, value in of_agents:
            if value is not None:
                raise InputError(f"{name} {value} is about sessions in a closed loop: add --agents, like --agents 200.")
        return
    _pause_s(options)
    turns = 1 if options.turns is None else options.turns
    if min(options.agents, turns) < 1 or options.agents * turns > MOST_TURNS:
        raise InputError(
            f"--agents {options.agents} with --turns {turns}: both must be at least 1, and their product at most "
            f"{MOST_TURNS:,}."
        )
    if turns > 1 and prefix_hit:
        raise InputError(
            f"--turns {turns} says what prompts find in the cache, and so does --prefix-hit {prefix_hit:g}: leave one "
            "of the two out."
        )
    if options.turns and trace:
        raise InputError(
            f"--turns {options.turns} is for sessions that are drawn, but '{trace}' has its own: leave --turns out."
        )


def check_closed_loop(options: SimulateOptions) -> None:
    """Raise InputError for options of a closed loop without agents, or for options that agents exclude."""
    check_agents(options, options.replay, options.prefix_hit)
    if options.agents is None:
        return
    if options.rate or options.timeline:
        other = f"--rate {options.rate}" if options.rate else f"--timeline '{options.timeline}'"
        raise InputError(
            f"{other} needs requests with fixed arrivals, but with --agents {options.agents} a turn arrives when the "
            "last one has ended: leave one of the two out."
        )


def check_agent_search(options: TuneOptions) -> None:
    """Raise InputError for options that --agents excludes, or that need it."""
    trace = options.workload if form_of(options.workload or "") else None
    check_agents(options, trace, options.prefix_hit)
    if options.agents is None:
        return
    typed = f"--agents {options.agents}"
    arrivals = {
        f"--rate {options.rate}": options.rate,
        f"--load-curve '{options.load_curve}'": options.load_curve,
        "--arrivals trace": options.arrivals == "trace",
    }
    for name in (name for name, value in arrivals.items() if value):
        raise InputError(
            f"{name} has arrivals of its own, but with {typed} a turn arrives when the last one has ended: leave one "
            "of the two out."
        )
    excluded = {
        "--devices": options.devices,
        "several clusters": options.cluster and "," in options.cluster,
        "several bounds": options.latency_bound and "," in options.latency_bound,
        f"--search {options.search}": options.search != "bnb",
        "--tolerance": options.tolerance,
        "--disaggregated": options.disaggregated,
        "--price": options.price,
        "--report": options.report,
        "--advice": options.advice,
    }
    for name in (name for name, value in excluded.items() if value):
        raise InputError(f"{typed} can't be combined with {name}: leave one of the two out.")


def drawn_turns(schedule: Schedule, options: SimulateOptions) -> Workload:
    """Return the turns of sessions drawn from the schedule's workload."""
    from xscheduler.agent_sample import drawn_for

    assert options.agents, "a closed loop has agents"
    turns, agents, share = options.turns or 1, options.agents, schedule.workload.prefix_hit
    if turns > 1 and share:
        raise InputError(
            f"--turns {turns} says what prompts find in the cache, but the schedule was made for a share of "
            f"{share:.0%}: leave --turns out, or tune without --prefix-hit."
        )
    rows = drawn_for(schedule.workload, agents, turns, options.seed, schedule.model.spec.longest_request)
    return Workload.from_requests(schedule.workload.name, rows)


@dataclass(frozen=True)
class AgentTurns:
    """The sessions of a closed loop, and what is assumed about them."""

    sessions: "Sessions"
    notes: tuple[str, ...]
    pause_notes: tuple[str, ...]

    @staticmethod
    def of(
        options: AgentOptions, requests: Sequence[RequestLengths], labels: Sequence[Labels], trace: str | None
    ) -> "AgentTurns":
        """Return the sessions that requests and labels name; a turn pauses for its `after_s`, or for --tool-time.

        `trace` is the file that they are from; None: they were drawn.
        """
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
        return AgentTurns(sessions, _notes(sessions, trace), _pause_notes(options, labels))


def _notes(sessions: "Sessions", trace: str | None) -> tuple[str, ...]:
    """Return sentences about the sessions."""
    count = len(sessions.turns)
    where = f"{Path(trace).name}, whose arrivals are not used" if trace else "the workload's lengths"
    each = figure_text(sum(map(len, sessions.turns)) / count)
    notes = [f"closed loop: {sessions.agents:,} agents run {count:,} sessions of {each} turns on average, from {where}"]
    if sessions.agents > len(sessions.turns):
        notes.append(f"warning: only {count:,} of the {sessions.agents:,} agents have a session")
    return tuple(notes)


def _pause_notes(options: AgentOptions, labels: Sequence[Labels]) -> tuple[str, ...]:
    """Return a sentence about the pauses before turns, if the trace has none."""
    if any(own.after_s is not None for own in labels):
        return ()
    return (f"closed loop: {_pause_text(options)} lie between the end of a turn and the next turn",)


def _pause_s(options: AgentOptions) -> float:
    """Return --tool-time in seconds; 0 without it."""
    return parse_delay(options.tool_time, "--tool-time", _LONGEST_PAUSE_S) if options.tool_time else 0.0


def _pause_text(options: AgentOptions) -> str:
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
