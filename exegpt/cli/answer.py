"""The answers of searches, as tables and as documents."""

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from exegpt.app.export import Target
from exegpt.app.search import SearchOptions, frontier, infeasible_text, ranked
from exegpt.app.settings import Setting
from exegpt.document import to_dict
from exegpt.estimate import Estimate
from exegpt.report import output
from exegpt.report.schedule_text import schedule_text, variables_text
from exegpt.report.terminal import plot
from exegpt.schedule import Schedule
from xscheduler.tuned import Tuned

POLICY_COLUMNS = ("policy", "req/s", "tok/s", "latency", "schedule")
"""The columns of `policy_rows` without times of tokens."""


def answer_document(answer: Tuned, setting: Setting, target: Target | None = None) -> dict[str, Any]:
    """The object that `tune --json` prints for one bound; `target` adds another engine's flags under `export`."""
    document: dict[str, Any] = {
        "schedule": to_dict(answer.schedule) if answer.schedule else None,
        "estimate": to_dict(answer.estimate) if answer.estimate else None,
        "alternatives": [
            {
                "policy": other.policy,
                "schedule": _brief(other.schedule) if other.schedule else None,
                "estimate": to_dict(other.estimate) if other.estimate else None,
                "reason": other.reason,
            }
            for other in answer.alternatives
        ],
        "search": asdict(answer.search),
        "assumptions": [*setting.assumptions, *answer.assumptions],
        "provenance": output.provenance(setting.profile),
    }
    if answer.schedule is None:
        return document | {"lowest_latency_s": answer.lowest_latency_s}
    if target:
        document["export"], document["export_loses"] = target.nearest(answer.schedule)
    return document


_SHARED = ("model", "cluster", "workload", "profile")
"""Keys of a schedule that are the same for all policies, and long."""


def _brief(schedule: Schedule) -> dict[str, Any]:
    """A schedule without what the answer's own says for all of them."""
    return {key: value for key, value in to_dict(schedule).items() if key not in _SHARED}


def print_export(schedule: Schedule, target: Target) -> None:
    """Print the nearest command line of another engine, and the differences."""
    command, lost = target.nearest(schedule)
    print(f"Nearest in {target.engine} ({lost}):")
    for line in command.splitlines():
        print(f"  {line}")
    if schedule.policy not in target.policies:
        print(
            f"  {target.engine} itself schedules like {' and '.join(target.policies)}: --policy "
            f"{','.join(target.policies)} searches for flags that hold the bound there."
        )


Times = Mapping[str, str]
"""Keys of an Estimate's times that are bounded, and their columns."""


def bounded_times(options: SearchOptions) -> Times:
    """What `--ttft` and `--tpot` bound."""
    asked = {"ttft_bounded_s": options.ttft_s, "tpot_bounded_s": options.tpot_s}
    which = f"p{options.bound.percentile:g}"
    return {key: f"{key[:4].upper()} {which}" for key, bound_s in asked.items() if bound_s is not None}


def policy_columns(times: Times = MappingProxyType({})) -> tuple[str, ...]:
    """The columns of `policy_rows`, with these times."""
    return (*POLICY_COLUMNS[:-1], *times.values(), POLICY_COLUMNS[-1])


def policy_rows(answer: Tuned, times: Times = MappingProxyType({})) -> list[list[str]]:
    """A table's rows: every policy's best schedule, the winner first."""
    rows = []
    for other in ranked(answer):
        if other.schedule is None or other.estimate is None:
            rows.append([other.policy, *("–",) * (3 + len(times)), other.reason])
            continue
        rows.append([other.policy, *_figures(other.estimate, times), variables_text(other.schedule)])
    return rows


def best_row(answer: Tuned, bound_s: float | None, times: Times = MappingProxyType({})) -> list[str]:
    """The best schedule in a table's row, without a policy's column of its own."""
    if answer.schedule is None or answer.estimate is None:
        return [*("–",) * (3 + len(times)), infeasible_text(answer, bound_s).rstrip(".")]
    return [*_figures(answer.estimate, times), schedule_text(answer.schedule)]


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
