"""What a search answered, for people, for scripts and for reports."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exegpt.quantity import count_text, figure_text
from exegpt.report.schedule_text import schedule_text, variables_text

if TYPE_CHECKING:
    from exegpt.cli.export import Target
    from exegpt.cli.inputs import Setting
    from exegpt.cluster import ClusterSpec
    from exegpt.estimate import Estimate
    from exegpt.profile import Profile
    from exegpt.report.series import Series
    from exegpt.schedule import Schedule
    from xscheduler.tuned import Alternative, Tuned


POLICY_COLUMNS = ("policy", "req/s", "tok/s", "latency", "schedule")
"""The columns of `policy_rows` without times of tokens."""


@dataclass(frozen=True)
class Delivery:
    """Where an answer goes beside the terminal."""

    out: Path | None = None
    """The schedule's file."""
    report: Path | None = None
    json: bool = False
    """One JSON document instead of tables."""
    target: "Target | None" = None
    """The engine whose nearest flags are told too."""
    hints: bool = False
    """Whether options that nobody has typed are named where they would tell more."""


def search_schedule(setting: "Setting", latency_bound_s: float, **asked: Any) -> "Tuned":
    """The best schedule for a setting under a bound in seconds (math.inf: none)."""
    from xscheduler.tune import tune as find

    bounded = latency_bound_s if math.isfinite(latency_bound_s) else None
    return find(
        setting.model,
        setting.cluster,
        setting.workload,
        setting.profile,
        latency_bound_s=bounded,
        kv_dtype=setting.kv_dtype,
        **asked,
    )


def answer_document(answer: "Tuned", setting: "Setting", target: "Target | None" = None) -> dict[str, Any]:
    """The object that `tune --json` prints for one bound; `target` adds another engine's flags under `export`."""
    from exegpt.cli import output
    from exegpt.document import to_dict

    document: dict[str, Any] = {
        "schedule": to_dict(answer.schedule) if answer.schedule else None,
        "estimate": to_dict(answer.estimate) if answer.estimate else None,
        "alternatives": [
            {
                "policy": other.policy,
                "schedule": to_dict(other.schedule) if other.schedule else None,
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


def advise(setting: "Setting", answer: "Tuned", bound_s: float, asked: dict[str, Any]) -> list[str]:
    """How full and busy the answer's devices are, and what a looser bound, twice the devices and the next device kind
    would give, each searched anew.
    """
    from dataclasses import replace

    from xscheduler import advice

    def again(bound: float | None, cluster: "ClusterSpec") -> "Tuned":
        where = setting
        if cluster != setting.cluster:
            where = replace(setting, cluster=cluster, profile=_profile_on(setting, cluster))
        return search_schedule(where, math.inf if bound is None else bound, **asked)

    bounded = bound_s if math.isfinite(bound_s) else None
    told = []
    if answer.schedule and answer.estimate:
        told.append(advice.use_of((answer.schedule, answer.estimate)))
    looser = advice.looser_bound(again, answer, bounded, setting.cluster)
    if looser:
        told.append(looser)
    if not setting.cluster.is_cpu:
        larger = advice.twice(setting.cluster)
        told.append(advice.other_cluster(again, answer, bounded, larger, "twice the devices"))
    quicker = _next_kind(setting.cluster) if setting.profile.source == "roofline" else None
    if quicker:
        what = "the next device kind by memory bandwidth"
        told.append(advice.other_cluster(again, answer, bounded, quicker, what))
    return told


def _profile_on(setting: "Setting", cluster: "ClusterSpec") -> "Profile":
    """The roofline of another cluster; a measured profile holds for more of the same devices."""
    from exegpt.cli.stock import like

    return like(setting.profile, setting.model, cluster) if setting.profile.source == "roofline" else setting.profile


def _next_kind(cluster: "ClusterSpec") -> "ClusterSpec | None":
    """As many devices of the kind that has the least memory bandwidth above this one's; None where none has."""
    from exegpt.cluster import KINDS, device_kind, parse_cluster

    own = cluster.device
    better = [spec for spec in map(device_kind, KINDS) if spec.bandwidth_bytes_s > own.bandwidth_bytes_s]
    if not better or own.kind not in KINDS:
        return None
    kind = min(better, key=lambda spec: spec.bandwidth_bytes_s).kind
    nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
    return parse_cluster(f"{nodes}{cluster.devices_per_node}x{kind}", cluster.memory_fraction)


def print_export(schedule: "Schedule", target: "Target") -> None:
    """The nearest command line of another engine, and what it doesn't do."""
    command, lost = target.nearest(schedule)
    print(f"Nearest in {target.engine} ({lost}):")
    for line in command.splitlines():
        print(f"  {line}")
    if schedule.policy not in target.policies:
        print(
            f"  {target.engine} itself schedules like {' and '.join(target.policies)}: --policy "
            f"{','.join(target.policies)} searches the flags that hold the bound there."
        )


def frontier(answers: "list[Tuned]") -> "tuple[Series, ...]":
    """Every policy's best schedules under each answer's bound, as plots draw them."""
    from exegpt.policies import TRAITS
    from exegpt.report.series import Series

    points: dict[str, set[tuple[float, float]]] = {}
    for answer in answers:
        for other in answer.alternatives:
            estimate = other.estimate
            if other.schedule and estimate and estimate.latency_s is not None:
                points.setdefault(other.policy, set()).add((estimate.latency_s, estimate.throughput_tok_s))
    return tuple(
        Series(policy, tuple(sorted(row)), TRAITS[policy].mark, TRAITS[policy].colour)
        for policy, row in sorted(points.items())
    )


def frontier_bounds(setting: "Setting", count: int = 7, **asked: Any) -> list[float]:
    """Bounds in seconds from just above the lowest reachable latency to that of the unbounded optimum."""
    import numpy as np

    free = search_schedule(setting, math.inf, lowest_latency=True, **asked)
    if free.estimate is None or free.estimate.latency_s is None or free.lowest_latency_s is None:
        return [math.inf]
    low, high = 1.1 * free.lowest_latency_s, free.estimate.latency_s
    return [*np.geomspace(low, high, count).tolist(), math.inf] if low < high else [math.inf]


def ranked(answer: "Tuned") -> "list[Alternative]":
    """Every policy's best schedule, the answer first, then by falling throughput."""
    best = answer.schedule.policy if answer.schedule else None
    return sorted(
        answer.alternatives,
        key=lambda a: (a.policy != best, -(a.estimate.throughput_tok_s if a.estimate else -1.0)),
    )


TOKEN_TIMES = {"ttft_p99_s": "TTFT p99", "tpot_p99_s": "TPOT p99"}
"""The 99th percentiles of an Estimate that `--ttft` and `--tpot` bound, and their columns."""


def bounded_times(asked: dict[str, Any]) -> tuple[str, ...]:
    """Those of TOKEN_TIMES that a search was asked to bound."""
    return tuple(key for key in TOKEN_TIMES if asked.get(key.replace("_p99", "")) is not None)


def policy_columns(times: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The columns of `policy_rows`, with these of TOKEN_TIMES."""
    return (*POLICY_COLUMNS[:-1], *(TOKEN_TIMES[key] for key in times), POLICY_COLUMNS[-1])


def policy_rows(answer: "Tuned", times: tuple[str, ...] = ()) -> list[list[str]]:
    """A table's rows: every policy's best schedule, the winner first."""
    rows = []
    for other in ranked(answer):
        if other.schedule is None or other.estimate is None:
            rows.append([other.policy, *("–",) * (3 + len(times)), other.reason])
            continue
        rows.append([other.policy, *_figures(other.estimate, times), variables_text(other.schedule)])
    return rows


def best_row(answer: "Tuned", bound_s: float, times: tuple[str, ...] = ()) -> list[str]:
    """The best schedule in a table's row, without a policy's column of its own."""
    if answer.schedule is None or answer.estimate is None:
        return [*("–",) * (3 + len(times)), infeasible_text(answer, bound_s).rstrip(".")]
    return [*_figures(answer.estimate, times), schedule_text(answer.schedule)]


def _figures(estimate: "Estimate", times: tuple[str, ...]) -> list[str]:
    from exegpt.cli import output

    rates = (estimate.throughput_seq_s, estimate.throughput_tok_s)
    seconds = (estimate.latency_s, *(getattr(estimate, key) for key in times))
    return [*map(output.number, rates), *map(output.seconds, seconds)]


def reasons(alternatives: Iterable["Alternative"]) -> list[str]:
    """Why each policy is where it is; policies of one reason share a sentence."""
    names: dict[str, list[str]] = {}
    for other in alternatives:
        names.setdefault(other.reason, []).append(other.policy)
    return [f"{', '.join(policies)}: {reason}" for reason, policies in names.items()]


def print_search(*answers: "Tuned") -> None:
    """How many schedules were simulated for these answers."""
    from exegpt.cli import output

    searches = [answer.search for answer in answers]
    simulated, space = (sum(getattr(s, name) for s in searches) for name in ("evaluations", "space"))
    seconds = sum(s.seconds for s in searches)
    took, replays = output.seconds(seconds), sum(s.replays for s in searches)
    replayed = f", {replays:,} replays" if replays else ""
    print(f"Search: {simulated:,} of {space:,} schedules simulated{replayed} in {took} ({searches[0].method}).")


def print_plot(answers: "list[Tuned]", bound_s: float | None) -> None:
    """The frontier of all policies, as far as the answers tell it."""
    from exegpt.report.terminal import plot

    series = frontier(answers)
    if any(len(policy.points) > 1 for policy in series):
        print(plot(series, bound_s))


def infeasible_text(answer: "Tuned", bound_s: float) -> str:
    """Why there is no schedule, in one sentence."""
    from exegpt.cli import output
    from exegpt.duration import format_duration

    if answer.lowest_latency_s is None:
        return f"No schedule fits: {'; '.join(reasons(answer.alternatives))}."
    if answer.lowest_latency_s <= bound_s:  # the latency could be met: another bound is in the way
        return f"No schedule meets all bounds at once: {'; '.join(reasons(answer.alternatives))}."
    lowest = output.seconds(answer.lowest_latency_s)
    return f"No schedule meets the bound of {format_duration(bound_s)}: the lowest reachable latency is {lowest}."


def report_facts(setting: "Setting") -> tuple[tuple[str, str], ...]:
    """What a schedule was found for, as a report names it."""
    model, workload = setting.model, setting.workload
    lengths = [
        f"{figure_text(distribution.mean, 4)}±{figure_text(distribution.std)}"
        for distribution in (workload.input, workload.output)
    ]
    return (
        ("model", f"{model.name}: {model.layers} layers, {count_text(model.parameters)} parameters"),
        ("cluster", f"{setting.cluster.name}: {setting.cluster.devices} × {setting.cluster.device.kind}"),
        (
            "workload",
            f"{workload.name}: input {lengths[0]}, output {lengths[1]} tokens",
        ),
        ("profile", f"{setting.profile.source} ({setting.profile.fingerprint})"),
    )
