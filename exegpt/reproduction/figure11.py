"""Figure 11: a schedule under output lengths other than those that it was tuned for.

OPT-13B on four A40s, translation. Mean, deviation and skewness of the outputs are changed one at a time, with the other
two kept. The unchanged schedule is simulated under the new distribution, and compared with the best schedule for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from exegpt.report import svg
from exegpt.report.sections import Section
from exegpt.reproduction.faster_transformer import PERCENTILES, bounds, static_batches
from exegpt.reproduction.setup import WAA, Reached, Setup, deviation, paper_mode, reached, setup
from exegpt.reproduction.skewed import skewed_normal
from xcore.errors import InputError
from xcore.quantity import figure_text, signed_percent
from xcore.specs.bound import ALL_REQUESTS
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload
from xsimulator import estimate

FACTORS = (0.7, 0.85, 1.0, 1.15, 1.3)
"""Factors of mean and deviation."""
SKEWNESSES = (-0.4, -0.2, 0.0, 0.2, 0.4)
CHANGES = {"mean": FACTORS, "deviation": FACTORS, "skewness": SKEWNESSES}
PAPER_MARGINS = {("mean", 1.15): (0.13, 0.10), ("deviation", 1.3): (0.05, 0.0)}
"""How much tighter a bound must be to tolerate the change.

The first figure is for a bound that 99 % of all queries must meet (a). The second is for a bound on a sequence of the
old 99th-percentile length (b).
"""
SERIES = (("unchanged schedule", "#3b74b9"), ("tuned anew", "#d9822b"))


@dataclass(frozen=True)
class Point:
    """One changed distribution of output lengths."""

    change: str
    value: float
    """Factor of the mean or the deviation, or the skewness."""
    throughput_seq_s: float
    """Throughput of the unchanged schedule."""
    latency_p99_s: float
    """Latency of the unchanged schedule that 99 % of all queries meet."""
    normalised: float
    """`latency_p99_s` over its value under the unchanged distribution."""
    normalised_length: float
    """The same ratio for a sequence as long as the old distribution's 99th percentile."""
    tuned: Reached | None
    """The best schedule for this distribution, under the bound for 99 % of all queries."""


@dataclass(frozen=True)
class PolicyDrift:
    """One policy's schedule under all distributions."""

    policy: str
    percentile: int
    """The percentile of FasterTransformer's latencies whose value is the bound."""
    bound_s: float
    schedule: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Figure11:
    """The results of WAA, as in the figure, and of RRA, which the paper describes in words."""

    drifts: tuple[PolicyDrift, ...]


def changed(workload: Workload, change: str, value: float) -> Workload:
    """Return the workload with another distribution of outputs, and with the same `p99_output`."""
    mean, std = workload.output.mean, workload.output.std
    scaled = (mean * value, std) if change == "mean" else (mean, std * value) if change == "deviation" else (mean, std)
    distribution = skewed_normal(*scaled, workload.output.max, value if change == "skewness" else 0.0)
    return replace(workload, name=f"{workload.name} with {change} {value:g}", output=distribution)


def reproduce(progress: Callable[[int, int], None] = lambda done, total: None) -> Figure11:
    """Simulate and tune both policies under every distribution."""
    where = setup("opt-13b", "4xA40", "T")
    workloads = [
        (change, value, changed(where.workload, change, value)) for change in CHANGES for value in CHANGES[change]
    ]
    drifts = []
    for number, (name, policies) in enumerate((("WAA", WAA), ("RRA", ("rra",)))):
        percentile, bound_s, schedule, text = _best(where, name, policies)
        first = estimate(schedule, where.profile)
        points = []
        for done, (change, value, workload) in enumerate(workloads, 1):
            now = estimate(schedule, where.profile, workload)
            tuned = paper_mode(replace(where, workload=workload), bound_s, policies=policies, bound=ALL_REQUESTS)
            assert now.latency_p99_s and first.latency_p99_s and now.latency_s and first.latency_s
            points.append(
                Point(
                    change,
                    value,
                    now.throughput_seq_s,
                    now.latency_p99_s,
                    now.latency_p99_s / first.latency_p99_s,
                    now.latency_s / first.latency_s,
                    reached(tuned, policies),
                )
            )
            progress(number * len(workloads) + done, 2 * len(workloads))
        drifts.append(PolicyDrift(name, percentile, bound_s, text, tuple(points)))
    return Figure11(tuple(drifts))


def _best(where: Setup, name: str, policies: tuple[str, ...]) -> tuple[int, float, Schedule, str]:
    """Return the best schedule under the paper's bound, FasterTransformer's 30th percentile.

    If the policy can't meet it, return the best under the next looser bound that it can meet.
    """
    percentile_bounds = bounds(static_batches(where))
    for percentile, bound_s in zip(PERCENTILES[1:], percentile_bounds[1:], strict=False):
        tuned = paper_mode(where, bound_s, policies=policies)
        best = reached(tuned, policies)
        if best and tuned.schedule and bound_s is not None:
            return percentile, bound_s, tuned.schedule, best.schedule
    raise InputError(f"{name} meets none of FasterTransformer's latencies on {where.name}: choose another cluster.")


def margin(normalised: float) -> float:
    """Return the share by which a bound must be tighter so that a latency that grows by this factor meets it."""
    return max(0.0, 1.0 - 1.0 / normalised)


def sections(figure: Figure11) -> list[Section]:
    """Return the drawing with its figures for each policy, then the paper's statements."""
    return [*(_drift_section(drift) for drift in figure.drifts), _words(figure)]


def _drift_section(drift: PolicyDrift) -> Section:
    rows, panels = [], []
    for change in CHANGES:
        points = [point for point in drift.points if point.change == change]
        groups = []
        for point in points:
            tuned = point.tuned.throughput_seq_s if point.tuned else None
            groups.append((f"{point.value:g}", (point.throughput_seq_s, tuned)))
            rows.append(
                (
                    f"{change} {'' if change == 'skewness' else '× '}{point.value:g}",
                    figure_text(point.throughput_seq_s),
                    figure_text(tuned),
                    signed_percent(deviation(point.throughput_seq_s, tuned) if tuned else None),
                    figure_text(point.latency_p99_s),
                    f"{point.normalised:.3f}",
                    f"{point.normalised_length:.3f}",
                    point.tuned.schedule if point.tuned else "no schedule meets the bound",
                )
            )
        panels.append(svg.Panel(change, tuple(groups), tuple(point.normalised for point in points)))
    columns = (
        "outputs",
        "unchanged, seq/s",
        "tuned, seq/s",
        "difference",
        "p99, s",
        "of all",
        "of the length",
        "tuned",
    )
    return Section(
        f"figure11: {drift.policy} under FasterTransformer's {drift.percentile}th percentile, {drift.bound_s:.3g} s",
        columns,
        tuple(rows),
        (
            f"Unchanged: {drift.schedule}. The paper's bound is the 30th percentile.",
            "Latencies are relative to the old distribution: 'of all' is the latency of 99 % of all queries, 'of the "
            "length' that of the old 99th-percentile length.",
        ),
        svg.panels(panels, SERIES, "sequences/s", "latency of 99 %, normalised"),
    )


def _words(figure: Figure11) -> Section:
    rows = []
    waa, rra = figure.drifts
    for (change, value), margins in PAPER_MARGINS.items():
        point = next(p for p in waa.points if (p.change, p.value) == (change, value))
        for sla, normalised, said in zip("ab", (point.normalised, point.normalised_length), margins, strict=True):
            rows.append(
                (f"WAA: tighter bound for {change} × {value}, SLA-({sla})", f"{margin(normalised):.1%}", f"{said:.0%}")
            )
    for changes, shares in ((("mean",), (0.28, 0.126)), (("deviation", "skewness"), (0.11, 0.17))):
        tuned = [(p, p.tuned) for p in rra.points if p.change in changes and p.tuned]
        largest = (
            max(abs(deviation(p.throughput_seq_s, t.throughput_seq_s)) for p, t in tuned),
            max(abs(deviation(p.latency_p99_s, t.latency_s)) for p, t in tuned),
        )
        for what, share, paper_share in zip(("throughput", "latency"), largest, shares, strict=True):
            name = f"RRA: largest difference in {what}, changed {' or '.join(changes)}"
            rows.append((name, f"{share:.1%}", f"under {paper_share:.1%}"))
    return Section("figure11: the paper's statements", ("", "here", "paper"), tuple(rows))
