"""`tune --agents`: the schedule with the highest turn throughput in a closed loop, and the most agents it serves."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from exegpt.api.agent_turns import AgentTurns
from exegpt.api.tune_settings import caching_option
from exegpt.api.tuning import TuneProblem
from xcore import document
from xcore.choices import check_prefix_caching
from xcore.columns import parse_columns
from xcore.console import output
from xcore.quantity import figure_text
from xcore.specs.engine_spec import engine_of
from xcore.specs.prefix_hit import with_prefix_hit
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload
from xcore.traces.fit_context import fit_context
from xcore.traces.labels import Labels
from xcore.traces.trace import form_of, labels_of, read_labels, read_trace
from xscheduler.agent_sample import AgentSample, AgentWork, drawn_for
from xscheduler.agent_search import AgentsTuned, best_of, tune_agents
from xscheduler.drafts import DraftGain, Drafts, draft_gain
from xscheduler.expert_divisions import divided, divided_as
from xscheduler.export import Export
from xscheduler.loop_meter import LoopMeter
from xscheduler.most_agents import MostAgents, most_agents
from xscheduler.search_problem import Limits
from xscheduler.setting_search import best_on
from xscheduler.settings import Setting


@dataclass(frozen=True)
class AgentAnswer:
    """The best schedule for a number of agents under the bounds."""

    best: AgentsTuned
    most: MostAgents | None
    """The most agents that keep the bounds with the best schedule, or with the closest one; None without bounds."""
    export: Export | None
    drafting: DraftGain | None
    """The gain of drafting on the best schedule's stages; None if nothing may be drafted, or without a schedule."""
    notes: tuple[str, ...]


def answer_agents(problem: TuneProblem) -> AgentAnswer:
    """Return the best schedule for the problem's agents; write it, and what starts another engine with it."""
    options, setting, search = problem.options, problem.settings[0], problem.search
    assert options.agents, "a closed loop has agents"
    if options.caches_prefixes:
        check_prefix_caching(None, setting.model, caching_option(options))
    work, notes = agent_work(problem, options.agents)
    limits = Limits(problem.bounds_s[0], ttft_s=search.ttft_s, tpot_s=search.tpot_s)
    sample = work.sample(options.agents)
    with output.progress(f"searching for {options.agents:,} agents") as progress:
        best = _searched(problem, sample, limits, progress)
    on_engine = best_on(best.tuned, engine_of(setting.profile).name)
    best = replace(best, tuned=replace(best.tuned, best_on_engine=on_engine))
    bounded = any(bound is not None for bound in (limits.latency_s, limits.ttft_s, limits.tpot_s))
    most = None
    if best.closest and bounded:
        profile = divided_as(setting, best.closest).on(best.closest.policy).profile
        most = most_agents(work, best.closest, profile, limits, options.agents)
    schedule = on_engine.schedule if options.engine and on_engine else best.tuned.schedule
    if options.out and schedule:
        document.write(options.out, schedule)
    export = _exported(problem, on_engine.schedule if on_engine else None, sample, limits)
    if options.export_out and export:
        document.write_text(options.export_out, f"{export.text.rstrip()}\n")
    drafting = None
    if schedule and problem.drafts:
        drafting = draft_gain(schedule, divided_as(setting, schedule).on(schedule.policy).profile, problem.drafts)
    return AgentAnswer(best, most, export, drafting, (*notes, *_caching_notes(best)))


def agent_work(problem: TuneProblem, agents: int) -> tuple[AgentWork, list[str]]:
    """Return the sessions of the trace, or sessions drawn from the workload, with notes on them."""
    options, setting = problem.options, problem.settings[0]
    trace, longest = options.workload if form_of(options.workload or "") else None, setting.model.longest_request
    if trace:
        named = parse_columns(options.columns) if options.columns else None
        rows = tuple(read_trace(trace, named, lambda note: None))  # the setting has the notes
        fitted, _ = fit_context(Workload.from_requests(Path(trace).name, rows), setting.model, options.scale_to_context)
        labels = labels_of(read_labels(trace, named, sessions=True), rows, fitted.requests or (), longest)
        requests = (with_prefix_hit(fitted, options.prefix_hit) if options.prefix_hit else fitted).requests or ()
    else:
        requests = drawn_for(setting.workload, agents, options.turns or 1, options.seed, longest)
        labels = [Labels()] * len(requests)
    turns = AgentTurns.of(options, requests, labels, trace)
    work = AgentWork(requests, turns.sessions.turns, turns.sessions.pauses_s)
    sessions = work.sample(agents).sessions.turns
    each = figure_text(sum(map(len, sessions)) / len(sessions))
    again = ", some of them repeated with new texts" if len(sessions) > len(work.turns) else ""
    notes = [
        f"closed loop: {agents:,} agents run {len(sessions):,} sessions of {each} turns on average{again}",
        *turns.pause_notes,
        "figures: of the turns after the first tenth, at least one of each agent, until an agent has no session left",
    ]
    return work, notes


def _caching_notes(best: AgentsTuned) -> list[str]:
    schedules = [other.schedule for other in best.tuned.alternatives if other.schedule]
    caching = [schedule.policy for schedule in schedules if schedule.prefix_caching]
    if not caching:
        return []
    return [f"prefix caching: on with {', '.join(caching)}, whose prompts reuse what their sessions left in the cache"]


def _searched(
    problem: TuneProblem, sample: AgentSample, limits: Limits, progress: Callable[[int, int], None]
) -> AgentsTuned:
    """Return each policy's best schedule over all divisions of experts and numbers of draft tokens."""
    answers: list[AgentsTuned] = []

    def rate(setting: Setting) -> float:
        answers.append(tune_agents(setting, sample, limits, problem.search, progress))
        return answers[-1].rate_seq_s

    for setting in divided(problem.settings[0]):
        if problem.drafts is None:
            rate(setting)
        else:
            _best_drafted(setting, problem.drafts, rate)
    return best_of(answers)


def _best_drafted(setting: Setting, drafts: Drafts, rate: Callable[[Setting], float]) -> None:
    """Climb to the number of draft tokens with the highest rate."""
    drafts.best(lambda drafted, _: rate(replace(setting, speculation=drafts.at(drafted))))


def _exported(problem: TuneProblem, schedule: Schedule | None, sample: AgentSample, limits: Limits) -> Export | None:
    """Return what starts the target's engine with a schedule, and the figures of exactly that in the closed loop."""
    if problem.target is None or schedule is None:
        return None
    profile = divided_as(problem.settings[0], schedule).profile
    shares = sample.prefixes is not None and schedule.traits.caches_prefixes
    followed = replace(problem.target.follows(schedule, profile), prefix_caching=shares)
    estimate, _ = LoopMeter(profile, sample, limits).estimate(followed)
    return problem.target.export(followed, estimate, alike=shares)
