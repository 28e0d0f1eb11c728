"""Format the answers of searches as tables and as documents."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType

from exegpt.api.tuning import TuneProblem
from exegpt.report.terminal import plot
from xcore.console import output
from xcore.console.schedule_text import schedule_text, variables_text
from xcore.document import to_dict
from xcore.policies import NOT_DEPLOYED
from xcore.specs.engine_spec import engine_of
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule
from xscheduler.export import Export, Target
from xscheduler.setting_search import SearchOptions, frontier, infeasible_text, ranked
from xscheduler.settings import Setting
from xscheduler.tuned import Alternative, Tuned

POLICY_COLUMNS = ("policy", "req/s", "tok/s", "latency", "schedule")
"""The columns of `policy_rows` without the times per token."""
Times = Mapping[str, str]
"""Keys of the bounded times of an Estimate, and their columns."""


def answer_document(
    answer: Tuned,
    setting: Setting,
    target: Target | None,
    export: Export | None,
    seed: int | None = None,
    of_policy: Callable[[str], dict[str, float | None]] = lambda policy: {},
) -> dict[str, object]:
    """Return the object that `tune --json` prints for one bound.

    If engines are compared, the object has the best schedule that the setting's engine runs. With a `target`, it has
    the launch command. `of_policy` returns further figures of a policy's schedule.
    """
    brief, on_engine = functools.partial(_brief, answer.schedule), answer.best_on_engine
    document: dict[str, object] = {
        "schedule": to_dict(answer.schedule) if answer.schedule else None,
        "estimate": to_dict(answer.estimate) if answer.estimate else None,
        "alternatives": [
            {
                "policy": other.policy,
                "schedule": brief(other.schedule) if other.schedule else None,
                "estimate": to_dict(other.estimate) if other.estimate else None,
                "reason": other.reason,
                **of_policy(other.policy),
            }
            for other in answer.alternatives
        ],
        "search": asdict(answer.search),
        "profile_import": setting.kernels.to_dict() if setting.kernels else None,
        "assumptions": [*setting.assumptions, *answer.assumptions],
        "provenance": output.provenance(setting.profile, seed),
    }
    if not setting.cluster.is_cpu:
        document["best_on_engine"] = {
            "engine": engine_of(setting.profile).name,
            "schedule": to_dict(on_engine.schedule) if on_engine and on_engine.schedule else None,
            "estimate": to_dict(on_engine.estimate) if on_engine and on_engine.estimate else None,
        }
    if target:
        document["export"] = export.text if export else None
        document["export_estimate"] = to_dict(export.estimate) if export else None
        document["assumptions"] = [*setting.assumptions, *answer.assumptions, *(export.notes if export else ())]
    if answer.schedule is None:
        return document | {"lowest_latency_s": answer.lowest_latency_s}
    return document


_SHARED = ("model", "cluster", "workload", "profile")
"""Long keys of a schedule that are the same for all policies."""


def _brief(best: Schedule | None, schedule: Schedule) -> dict[str, object]:
    """Return a schedule's document without the `_SHARED` keys that are equal in the answer's schedule."""
    same = [key for key in _SHARED if best and getattr(best, key) == getattr(schedule, key)]
    return {key: value for key, value in to_dict(schedule).items() if key not in same}


def print_export(target: Target, export: Export | None, times: Times) -> None:
    """Print another engine's launch command, and its predicted performance."""
    if export is None:
        return output.note(f"No schedule that {target.engine} runs meets the bounds: there is nothing to export.")
    columns = policy_columns(times)[1:-1]
    figures = ", ".join(f"{name} {text}" for name, text in zip(columns, _figures(export.estimate, times), strict=True))
    what = "Launch command" if target.form == "command" else f"{target.form.capitalize()} file"
    print(f"{what} for {target.engine}; its predicted performance is {figures}:")
    print(export.text)
    for note in export.notes:
        print(f"  {note}")


def print_best(answer: Tuned, setting: Setting) -> None:
    """If engines are compared, print the best schedule of all and the best that the setting's engine runs."""
    engine, on_engine = engine_of(setting.profile).name, answer.best_on_engine
    if setting.cluster.is_cpu or engine in NOT_DEPLOYED or not answer.estimate or not answer.schedule:
        return
    print(f"Best of all: {_rates(answer.estimate)} with {schedule_text(answer.schedule)}, {_runs_on(answer.estimate)}.")
    if on_engine is None or on_engine.schedule is None or on_engine.estimate is None:
        return print(f"Best on {engine}: no schedule that {engine} runs meets the bounds.")
    same = on_engine.schedule == answer.schedule
    print(
        f"Best on {engine}: "
        + ("the same schedule." if same else f"{_rates(on_engine.estimate)} with {schedule_text(on_engine.schedule)}.")
    )


def whose(problem: TuneProblem, answer: Tuned) -> str:
    """Return which engine a written schedule is for; empty if the user chose no engine or none are compared."""
    if problem.settings[0].own is None or problem.options.engine is None:
        return ""
    return (
        f", the best on {problem.options.engine}"
        if answer.best_on_engine
        else f"; no schedule that {problem.options.engine} runs meets the bounds"
    )


def _rates(estimate: Estimate) -> str:
    return f"{output.number(estimate.throughput_seq_s)} requests/s, {output.number(estimate.throughput_tok_s)} tokens/s"


def _runs_on(estimate: Estimate) -> str:
    return f"runs on {estimate.engine}"


def policy_name(alternative: Alternative, setting: Setting) -> str:
    """Return a policy's name for a table; if engines are compared, with the engine of its figures."""
    if setting.own is None or alternative.estimate is None:
        return alternative.policy
    return f"{alternative.policy} ({alternative.estimate.engine})"


def bounded_times(options: SearchOptions) -> Times:
    """Return the times that `--ttft` and `--tpot` bound."""
    asked = {"ttft_bounded_s": options.ttft_s, "tpot_bounded_s": options.tpot_s}
    which = f"p{options.bound.percentile:g}"
    return {key: f"{key[:4].upper()} {which}" for key, bound_s in asked.items() if bound_s is not None}


def policy_columns(times: Times = MappingProxyType({})) -> tuple[str, ...]:
    """Return the columns of `policy_rows`, with these times."""
    return (*POLICY_COLUMNS[:-1], *times.values(), POLICY_COLUMNS[-1])


def policy_rows(answer: Tuned, setting: Setting, times: Times = MappingProxyType({})) -> list[list[str]]:
    """Return a table's rows: every policy's best schedule, the winner first."""
    rows = []
    for other in ranked(answer):
        if other.schedule is None or other.estimate is None:
            rows.append([other.policy, *("–",) * (3 + len(times)), other.reason])
            continue
        rows.append([policy_name(other, setting), *_figures(other.estimate, times), variables_text(other.schedule)])
    return rows


def best_row(answer: Tuned, setting: Setting, bound_s: float | None, times: Times = MappingProxyType({})) -> list[str]:
    """Return a table row with the best schedule, without a separate column for the policy."""
    if answer.schedule is None or answer.estimate is None:
        return [*("–",) * (3 + len(times)), infeasible_text(answer, bound_s).rstrip(".")]
    where = f", {_runs_on(answer.estimate)}" if setting.own else ""
    return [*_figures(answer.estimate, times), schedule_text(answer.schedule) + where]


def _figures(estimate: Estimate, times: Times) -> list[str]:

    rates = (estimate.throughput_seq_s, estimate.throughput_tok_s)
    seconds = (estimate.latency_s, *(getattr(estimate, key) for key in times))
    return [*map(output.number, rates), *map(output.seconds, seconds)]


def print_search(*answers: Tuned) -> None:
    """Print how many schedules were simulated for these answers."""
    searches = [answer.search for answer in answers]
    simulated, space = (sum(getattr(s, name) for s in searches) for name in ("evaluations", "space"))
    seconds = sum(s.seconds for s in searches)
    took, replays = output.seconds(seconds), sum(s.replays for s in searches)
    replayed = f", {replays:,} replays" if replays else ""
    print(f"Search: {simulated:,} of {space:,} schedules simulated{replayed} in {took} ({searches[0].method}).")


def print_plot(answers: list[Tuned], bound_s: float | None) -> None:
    """Plot the frontier of all policies, from these answers."""
    series = frontier(answers)
    if any(len(policy.points) > 1 for policy in series):
        print(plot(series, bound_s))
