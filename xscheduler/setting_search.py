"""Search schedules for a setting, and derive the frontier, the reasons and the advice from the answers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypedDict

from xcore.batching.admission import Admission
from xcore.console.series import Series
from xcore.duration import duration_text, format_duration, rounded_up
from xcore.policies import TRAITS, runs
from xcore.specs.bound import BoundMeaning
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.deployment import Deployment
from xcore.specs.device_sheets import SHEETS
from xcore.specs.engine_spec import engine_of
from xcore.specs.model import BYTES
from xprofiler.rooflines import like
from xscheduler.expert_divisions import divided_as, divisions
from xscheduler.settings import Setting, with_draft

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xscheduler.nearby import Nearby
    from xscheduler.search import Method
    from xscheduler.tuned import Alternative, Tuned


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search besides the setting and the latency bound: arguments of `xscheduler.tune`."""

    bound: BoundMeaning
    ttft_s: float | None
    tpot_s: float | None
    policies: tuple[str, ...]
    method: "Method"
    tolerance: float
    admission: tuple[Admission, ...] = ("reserve",)
    fixed: dict[str, int] = field(default_factory=dict)
    """Control variables that the user fixed."""


SHORT = 15
"""The answer's evaluations over those of a short search for advice.

Advice has three of them, and should take at most a third of the answer's time.
"""


class SearchKeywords(TypedDict, total=False):
    """Keywords of `xscheduler.tune`, except those that a setting has."""

    bound: BoundMeaning
    ttft_s: float | None
    tpot_s: float | None
    policies: tuple[str, ...]
    method: "Method"
    tolerance: float
    fixed: dict[str, int] | None
    most_resident: int | None
    kv_blocks: int | None
    admission: tuple[Admission, ...]
    adjust: float | None
    lowest_latency: bool
    floor: float | None
    near: "Nearby | None"
    progress: Callable[[int, int], None]


def search_schedule(setting: Setting, latency_bound_s: float | None, **options: "Unpack[SearchKeywords]") -> "Tuned":
    """Return the best schedule for a setting under a bound in seconds (None: no bound).

    `options` are those of `xscheduler.tune`.
    """
    from xscheduler.tune import tune

    where = (setting.model, setting.cluster, setting.workload, setting.profile)
    return tune(
        *where,
        latency_bound_s=latency_bound_s,
        kv_dtype=setting.kv_dtype,
        own=setting.own,
        speculation=setting.speculation,
        divisions=divisions(setting),
        **options,
    )


def advise(setting: Setting, answer: "Tuned", bound_s: float | None, options: SearchOptions) -> list[str]:
    """Return sentences on how full and busy the answer's devices are, and on the gain from other conditions.

    These are a looser bound, twice the devices and the next device kind. If there is an answer, each takes a short
    search of its policy. Without an answer, or if this finds nothing, each takes a search of all policies on the
    engine.
    """
    from xscheduler import advice
    from xscheduler.nearby import Nearby

    if answer.schedule:
        setting = replace(divided_as(setting, answer.schedule), divides=False)
    engine = answer.estimate.engine if answer.estimate else None
    alike = tuple(p for p in options.policies if engine in (None, engine_of(setting.on(p).profile).name))

    def again(bound_s: float | None, cluster: ClusterSpec, floor: float) -> "Tuned":
        there = on_cluster(setting, cluster)
        if answer.schedule and options.method == "bnb":
            near = Nearby(answer.schedule, answer.search.evaluations // SHORT)
            asked = vars(options) | {"policies": (answer.schedule.policy,), "floor": floor, "near": near}
            found = search_schedule(there, bound_s, **asked)
            if found.schedule or floor:
                return found
        return search_schedule(there, bound_s, **vars(options) | {"policies": alike, "floor": floor})

    texts = []
    if answer.schedule and answer.estimate:
        texts.append(advice.use_of((answer.schedule, answer.estimate)))
    looser = advice.looser_bound(again, answer, bound_s, setting.cluster)
    if looser:
        texts.append(looser)
    if not setting.cluster.is_cpu:
        larger = advice.twice(setting.cluster)
        texts.append(advice.other_cluster(again, answer, bound_s, larger, "twice the devices"))
    faster = _next_kind(setting.cluster) if setting.profile.source == "roofline" else None
    if faster:
        what = "the next device kind by memory bandwidth"
        texts.append(advice.other_cluster(again, answer, bound_s, faster, what))
    return texts


def on_cluster(setting: Setting, cluster: ClusterSpec) -> Setting:
    """Return the setting on another cluster.

    A roofline profile is computed for the new cluster. A measured profile stays valid for any number of the same
    devices.
    """
    if cluster == setting.cluster:
        return setting
    rooflined = setting.profile.source == "roofline"
    profile = like(setting.profile, setting.model, cluster) if rooflined else setting.profile
    own = setting.own
    if own:
        deployed = replace(cluster, memory_fraction=own.cluster.memory_fraction)
        own = Deployment(deployed, like(own.profile, setting.model, deployed) if rooflined else own.profile)
    there = replace(setting, cluster=cluster, profile=profile, own=own)
    return with_draft(there, setting.speculation.draft) if setting.speculation else there


def _next_kind(cluster: ClusterSpec) -> ClusterSpec | None:
    """Return the cluster with as many devices of the next faster kind; None if there is none.

    The next kind has the least memory bandwidth of all measured kinds that have more, and no less of anything else.
    """
    device = cluster.device
    compared = [sheet.device for sheet in SHEETS.values() if not sheet.not_compared]
    better = [
        spec
        for spec in compared
        if spec.bandwidth_bytes_s > device.bandwidth_bytes_s
        and spec.shown_bytes >= device.shown_bytes
        and all(spec.flops_s.get(dtype, 0.0) >= rate for dtype, rate in device.flops_s.items() if dtype in BYTES)
    ]
    if not better or device.kind not in SHEETS:
        return None
    kind = min(better, key=lambda spec: spec.bandwidth_bytes_s).kind
    nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
    return parse_cluster(f"{nodes}{cluster.devices_per_node}x{kind}", cluster.memory_fraction)


def frontier(answers: "list[Tuned]") -> tuple[Series, ...]:
    """Return every policy's best schedules under each answer's bound, as series to plot."""
    points: dict[str, set[tuple[float, float]]] = {}
    for answer in answers:
        for other in answer.alternatives:
            estimate = other.estimate
            if other.schedule and estimate and estimate.latency_s is not None:
                points.setdefault(other.policy, set()).add((estimate.latency_s, estimate.throughput_tok_s))
    return tuple(series(policy, tuple(sorted(row))) for policy, row in sorted(points.items()))


def series(policy: str, points: tuple[tuple[float, float], ...] = ()) -> Series:
    """Return a policy's points with its mark and colour."""
    return Series(policy, points, TRAITS[policy].mark, TRAITS[policy].colour)


def frontier_bounds(setting: Setting, count: int = 7, **options: "Unpack[SearchKeywords]") -> list[float | None]:
    """Return bounds in seconds, from just above the lowest reachable latency to that of the unbounded optimum.

    The last bound is None: no bound.
    """
    import numpy as np

    options["lowest_latency"] = True
    free = search_schedule(setting, None, **options)
    if free.estimate is None or free.estimate.latency_s is None or free.lowest_latency_s is None:
        return [None]
    low, high = 1.1 * free.lowest_latency_s, free.estimate.latency_s
    return [*np.geomspace(low, high, count).tolist(), None] if low < high else [None]


def throughput(alternative: "Alternative") -> float:
    """Return the output tokens/s of a policy's best schedule; -1 if it has none."""
    return alternative.estimate.throughput_tok_s if alternative.estimate else -1.0


def ranked(answer: "Tuned") -> "list[Alternative]":
    """Return every policy's best schedule: the answer first, then by falling throughput."""
    best = answer.schedule.policy if answer.schedule else None
    return sorted(
        answer.alternatives,
        key=lambda a: (a.policy != best, -throughput(a)),
    )


def reasons(alternatives: Iterable["Alternative"], explain: bool = True) -> list[str]:
    """Return why each policy has its place; policies with the same reason share a line.

    One clause each, or with `explain` the whole reason.
    """
    names: dict[str, list[str]] = {}
    for other in alternatives:
        reason = other.reason if explain else other.clause or other.reason
        names.setdefault(reason, []).append(other.policy)
    return [f"{', '.join(policies)}: {reason}" for reason, policies in names.items()]


def best_on(answer: "Tuned", engine: str, value: "Callable[[Alternative], float]" = throughput) -> "Alternative | None":
    """Return the best of the answer's schedules that an engine runs, by its preset's name; None if there is none."""
    from xscheduler.ties import preferred

    feasible = (other for other in answer.alternatives if other.estimate and runs(engine, other.policy))
    return preferred(feasible, value, lambda other: other.policy)


def infeasible_text(answer: "Tuned", bound_s: float | None) -> str:
    """Return the reason why there is no schedule, in one sentence."""
    if answer.lowest_latency_s is None:
        return f"No schedule fits: {'; '.join(reasons(answer.alternatives))}."
    if bound_s is None or answer.lowest_latency_s <= bound_s:  # the latency bound can be met, but another bound can't
        return f"No schedule meets the requested settings: {'; '.join(reasons(answer.alternatives))}."
    lowest = duration_text(rounded_up(answer.lowest_latency_s))
    return f"No schedule meets the bound of {format_duration(bound_s)}: the lowest reachable latency is {lowest}."
