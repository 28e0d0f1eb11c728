"""Errors of SamuLLM's cost model on its own measured iterations."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from xcore.specs.cost_table import DegreeCosts, PhaseLines
from xmulti.stages.line_costs import LineCosts, line_costs
from xprofiler.samullm_costs import TimedIteration, read_points, samullm_costs

Errors = tuple[float, float]
"""The mean and the greatest absolute relative error."""


@dataclass(frozen=True)
class PointErrors:
    """Relative errors of predicted iteration times. Of measurements one token apart, only the fastest counts."""

    prefill_points: int
    decode_points: int
    prefill: Errors
    decode: Errors
    between: Errors
    """Errors of decode iterations between the extremes of each fitted line."""
    left_out: Errors
    """Errors of every second batch, interpolated without its own measurements."""


def point_errors(folder: Path) -> PointErrors:
    """Return the errors over all measured iterations of all models."""
    table, points = samullm_costs(folder), read_points(folder)
    prefill, decode, between, left_out = [], [], [], []
    for model in table.models:
        for degree in model.degrees:
            costs, sparse = line_costs(degree), line_costs(_every_second(degree))
            skipped = set(degree.decode.batches[1:-1:2])
            phases = points[model.name][degree.tp]
            prefill += [_error(costs, point, "prefill") for point in _fastest(phases["prefill"])]
            for point, extreme in _with_extremes(_fastest(phases["decode"])):
                decode.append(_error(costs, point, "decode"))
                if not extreme:
                    between.append(decode[-1])
                if point.batch in skipped:
                    left_out.append(_error(sparse, point, "decode"))
    phases_of_all = [phases for of_model in points.values() for phases in of_model.values()]
    counts = [sum(len(phases[phase]) for phases in phases_of_all) for phase in ("prefill", "decode")]
    return PointErrors(
        *(counts[0], counts[1]),
        *(_summary(prefill), _summary(decode), _summary(between), _summary(left_out)),
    )


def _fastest(points: Iterable[TimedIteration]) -> list[TimedIteration]:
    """Keep the fastest of measurements one token apart: the slower ones include waiting time."""
    kept: list[TimedIteration] = []
    for point in sorted(points, key=lambda p: (p.batch, p.total)):
        if kept and kept[-1].batch == point.batch and point.total - kept[-1].total <= 1:
            kept[-1] = min(kept[-1], point, key=lambda p: sum(p.seconds))
        else:
            kept.append(point)
    return kept


def _with_extremes(points: list[TimedIteration]) -> Iterable[tuple[TimedIteration, bool]]:
    """Yield each point with a flag: whether it is the shortest or the longest of its batch."""
    for point in points:
        totals = [other.total for other in points if other.batch == point.batch]
        yield point, point.total in (min(totals), max(totals))


def _every_second(degree: DegreeCosts) -> DegreeCosts:
    kept = [at for at in range(len(degree.decode.batches)) if at % 2 == 0 or at == len(degree.decode.batches) - 1]
    lines = degree.decode
    each = (lines.compute, lines.prepare, lines.sample)
    batches = tuple(lines.batches[at] for at in kept)
    return replace(degree, decode=PhaseLines(batches, *(tuple(of_one[at] for at in kept) for of_one in each)))


def _error(costs: LineCosts, point: TimedIteration, phase: str) -> float:
    if phase == "prefill":
        constant, per_token, per_square = costs.prefill[point.batch]
        tokens = point.batch * point.longest
        seconds = constant + per_token * tokens + per_square * tokens * point.longest
        seconds += costs.prefill_sampled[point.batch] * point.total
    else:
        constant, per_sum, per_longest = costs.decode[point.batch]
        seconds = constant + per_sum * point.total + per_longest * point.longest
    return float(abs(seconds / sum(point.seconds) - 1))


def _summary(errors: list[float]) -> Errors:
    return float(np.mean(errors)), float(np.max(errors))
