"""The output of `exegpt tune --agents`: the best schedule for agents in a closed loop."""

import gc

from exegpt.api.agent_answer import AgentAnswer, answer_agents
from exegpt.api.tuning import TuneProblem
from exegpt.cli import INFEASIBLE
from exegpt.cli.answer import answer_document, bounded_times, policy_name, print_best, print_export, print_search, whose
from xcore.console import output
from xcore.console.schedule_text import schedule_text, variables_text
from xcore.duration import format_duration
from xcore.quantity import percent_text
from xscheduler.drafts import gain_texts
from xscheduler.expert_divisions import divided_as
from xscheduler.setting_search import ranked, reasons


def answer(problem: TuneProblem) -> int:
    """Search for the agents, and print; return the exit code."""
    gc.disable()  # as in bounded.py
    answer = answer_agents(problem)
    if problem.options.json:
        output.emit(agents_document(answer, problem))
    else:
        _print(answer, problem)
    return 0 if answer.best.tuned.schedule else INFEASIBLE


def agents_document(answer: AgentAnswer, problem: TuneProblem) -> dict[str, object]:
    """Return the object that `tune --agents --json` prints."""
    best, most = answer.best, answer.most
    setting = divided_as(problem.settings[0], best.tuned.schedule)
    document = answer_document(
        best.tuned,
        setting,
        problem.target,
        answer.export,
        problem.options.seed,
        lambda policy: {"cached_share": best.cached_shares.get(policy)},
    )
    policy = best.tuned.schedule.policy if best.tuned.schedule else None
    notes = [*setting.assumptions, *answer.notes, *(answer.export.notes if answer.export else ())]
    return document | {
        "assumptions": notes,
        "agents": best.agents,
        "cached_share": best.cached_shares.get(policy or ""),
        "most_agents": most.agents if most else None,
        "most_agents_or_more": most.more if most else None,
        "latency_bound_s": problem.bounds_s[0],
        **({"speculation": answer.drafting.document} if answer.drafting else {}),
    }


def _print(answer: AgentAnswer, problem: TuneProblem) -> None:
    best, which = answer.best, f"p{problem.search.bound.percentile:g}"
    setting = divided_as(problem.settings[0], best.tuned.schedule)
    tuned = best.tuned
    output.notes((*setting.assumptions, *answer.notes))
    columns = ("policy", "turns/s", "tok/s", "latency", f"TTFT {which}", f"TPOT {which}", "cached", "schedule")
    rows = []
    for other in ranked(tuned):
        if other.schedule is None or (e := other.estimate) is None:
            rows.append([other.policy, *["–"] * (len(columns) - 2), other.reason])
            continue
        rates = map(output.number, (e.throughput_seq_s, e.throughput_tok_s))
        times = map(output.seconds, (e.latency_s, e.ttft_bounded_s, e.tpot_bounded_s))
        cached = percent_text(best.cached_shares[other.policy]) if other.schedule.prefix_caching else "–"
        rows.append([policy_name(other, setting), *rates, *times, cached, variables_text(other.schedule)])
    bound = format_duration(problem.bounds_s[0])
    title = f"{setting.model.name} on {setting.cluster.name}, {setting.workload.name}, {best.agents:,} agents, {bound}"
    output.table(columns, rows, title)
    if tuned.schedule is None:
        output.note(_infeasible_text(answer))
    else:
        feasible = [alternative for alternative in ranked(tuned) if alternative.schedule]
        output.listed(f"Best: {schedule_text(tuned.schedule)}", reasons(feasible, problem.options.explain))
        if answer.most:
            print(f"With this schedule, the bounds hold for up to {_most_text(answer)}.")
        if answer.drafting:
            output.listed("Speculative decoding:", gain_texts(answer.drafting))
        if problem.target:
            print_export(problem.target, answer.export, bounded_times(problem.search))
    print_search(tuned)
    if problem.options.out and tuned.schedule:
        print(f"Schedule written to {problem.options.out}{whose(problem, tuned)}.")
    print_best(tuned, setting)


def _most_text(answer: AgentAnswer) -> str:
    assert answer.most, "there are bounds"
    return f"{answer.most.agents:,} agents" + (" at least: no more were tried" if answer.most.more else "")


def _infeasible_text(answer: AgentAnswer) -> str:
    """Return why no schedule is an answer, and how many agents the closest one serves."""
    agents = f"{answer.best.agents:,} agent{'s' if answer.best.agents > 1 else ''}"
    if answer.most is None or answer.best.closest is None:
        return f"No schedule fits: {'; '.join(reasons(answer.best.tuned.alternatives))}."
    closest = schedule_text(answer.best.closest)
    if not answer.most.agents:
        return f"No schedule keeps the bounds for {agents}, and the closest one not even for one agent: {closest}."
    return f"No schedule keeps the bounds for {agents}: the closest one does up to {answer.most.agents:,}: {closest}."
