"""Tuning: the schedule with the highest throughput under the bounds, over all policies and allocations."""

from dataclasses import dataclass, replace

from exegpt.cluster import ClusterSpec
from exegpt.errors import InputError
from exegpt.estimate import Binding, Estimate
from exegpt.model import ModelSpec
from exegpt.profile import Profile
from exegpt.schedule import Bound, Schedule
from exegpt.workload import Workload
from xscheduler.candidates import Candidates, Limits, spaces
from xscheduler.search import Found, Method, Search, search
from xsimulator.allocation import tp_degrees, uniform_stages
from xsimulator.scenario import Scenario

POLICIES = ("static", "orca", "chunked", "rra")
"""What can be searched."""


@dataclass(frozen=True)
class Alternative:
    """A policy's best schedule under the bounds, or why it has none."""

    policy: str
    schedule: Schedule | None
    estimate: Estimate | None
    reason: str
    """One sentence: by how much it loses, or what it can't meet."""


@dataclass(frozen=True)
class Tuned:
    """The answer: the best schedule and its estimate (None where nothing is feasible), beside every policy's."""

    schedule: Schedule | None
    estimate: Estimate | None
    alternatives: tuple[Alternative, ...]
    search: Search
    """Summed over the policies."""
    lowest_latency_s: float | None
    """The lowest latency that any searched schedule reaches; None where not one sequence fits in memory."""
    assumptions: tuple[str, ...]


def tune(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    profile: Profile,
    *,
    latency_bound_s: float | None = None,
    bound: Bound = "p99-length",
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    policies: tuple[str, ...] = POLICIES,
    method: Method = "bnb",
    tolerance: float = 0.0,
    kv_dtype: str | None = None,
    fixed: dict[str, int] | None = None,
    most_resident: int | None = None,
    tail: bool = True,
) -> Tuned:
    """Search every policy on every tensor-parallel degree that the profile has.

    Bounds are in seconds, None: none; `tolerance` is the share by which monotonicity may be broken; `fixed` sets
    control variables by hand; `most_resident` caps the sequences decoded at once.
    With `tail`, a bound on the 99th-percentile length holds for the 99.9th too: a schedule whose last phase ends just
    there would miss it for the next longer request (the paper has none).

    Raises InputError for an unknown policy or an encoder-decoder model.
    """
    _check(model, policies, fixed or {})
    limits = Limits(latency_bound_s, tail and bound == "p99-length", ttft_s, tpot_s, most_resident)
    measured = {d.tp for d in profile.degrees}
    degrees = [tp for tp in tp_degrees(model, cluster) if tp in measured and (fixed or {}).get("tp_degree", tp) == tp]
    if not degrees:
        raise InputError(
            f"The profile has tensor-parallel degrees {sorted(measured)}, none of which fits {cluster.name}."
        )
    scenarios = [
        Scenario(
            model, cluster, workload, profile, uniform_stages(model, cluster, tp), kv_dtype or profile.dtype, bound
        )
        for tp in degrees
    ]
    tried: list[tuple[str, list[Candidates], Found]] = []
    for policy in policies:
        made = [space for scenario in scenarios for space in spaces(policy, scenario, limits, fixed or {})]
        tried.append((policy, made, search(list(made), method, tolerance)))
    best = max(tried, key=lambda one: one[2].throughput)[2]
    alternatives = tuple(_alternative(policy, made, found, best, limits) for policy, made, found in tried)
    winner = next((a for a in alternatives if a.estimate and a.estimate.throughput_tok_s == best.throughput), None)
    lowest = [_lowest_latency(space, limits) for _, made, _ in tried for space in made]
    reached = [latency for latency in lowest if latency is not None]
    return Tuned(
        winner.schedule if winner else None,
        winner.estimate if winner else None,
        alternatives,
        Search(
            method,
            sum(found.search.evaluations for _, _, found in tried),
            sum(found.search.space for _, _, found in tried),
            sum(found.search.seconds for _, _, found in tried),
        ),
        min(reached, default=None),
        _assumptions(limits, bound, winner),
    )


def _check(model: ModelSpec, policies: tuple[str, ...], fixed: dict[str, int]) -> None:
    for policy in policies:
        if policy not in POLICIES:
            raise InputError(f"Policy '{policy}' can't be searched: {', '.join(POLICIES)} can.")
    if model.encoder_layers:
        raise InputError(
            f"Model '{model.name}' is an encoder-decoder, which can't be scheduled yet: decoder-only models can."
        )
    known = {
        "encode_batch",
        "decode_iterations",
        "max_num_seqs",
        "max_num_batched_tokens",
        "prefills_per_step",
        "tp_degree",
    }
    for name, value in fixed.items():
        if name not in known:
            raise InputError(f"The variable {name} can't be fixed here: {', '.join(sorted(known))} can.")
        if value < 1:
            raise InputError(f"The variable {name} was fixed to {value}: it must be at least 1.")


def _alternative(policy: str, made: list[Candidates], found: Found, best: Found, limits: Limits) -> Alternative:
    if not isinstance(found.space, Candidates):
        return Alternative(policy, None, None, _why_infeasible(made, limits))
    space, values = found.space, found.space.values(found.point)
    assert space.estimate is not None and space.schedule is not None
    estimate = space.estimate(values)
    estimate = replace(estimate, binding=_binding(found, estimate.binding))
    behind = 1 - found.throughput / best.throughput
    reason = "the best" if behind <= 0 else f"{behind:.1%} behind the best; limited by {estimate.binding}"
    return Alternative(policy, space.schedule(values), estimate, reason)


def _binding(found: Found, otherwise: Binding | None) -> Binding | None:
    """What the next step up along any variable would break: memory, a latency, or nothing."""
    assert found.space is not None
    space, broken = found.space, set()
    for k, index in enumerate(found.point):
        if index < space.highest[k]:
            above = space.at((*found.point[:k], index + 1, *found.point[k + 1 :]))
            pairs = zip(above.figures, space.constraints, strict=True)
            broken |= {c.name for figure, c in pairs if figure > c.limit}
    if broken & {"latency", "ttft", "tpot"}:
        return "latency"
    return "memory" if "memory" in broken else otherwise


def _lowest_latency(space: Candidates, limits: Limits) -> float | None:
    """The latency of a space's lowest corner, where that fits in memory."""
    assert space.estimate is not None
    if space.at(space.lowest).figures[0] > 1.0:
        return None
    return limits.latency(space.estimate(space.values(space.lowest)))


def _why_infeasible(made: list[Candidates], limits: Limits) -> str:
    """The constraint that even the lowest corner breaks, from the space that comes closest."""
    closest = min(made, key=lambda s: _lowest_latency(s, limits) or float("inf"))
    found = closest.at(closest.lowest)
    for figure, constraint in zip(found.figures, closest.constraints, strict=True):
        if figure <= constraint.limit:
            continue
        if constraint.name == "memory":
            return found.reason or "memory: not even one sequence fits beside the weights"
        if constraint.name == "resident":
            return "its smallest batch is larger than the profile measured or than was allowed"
        return f"its lowest {constraint.name} is {figure:.3g} s, above the bound of {constraint.limit:.3g} s"
    return "no point of its space meets all bounds at once"


def _assumptions(limits: Limits, bound: Bound, winner: Alternative | None) -> tuple[str, ...]:
    made = []
    if limits.latency_s is not None:
        meaning = {
            "p99-length": "a sequence of the 99th-percentile output length meets the bound",
            "p99-queries": "99 % of all queries meet the bound",
        }
        also = ", and one of the 99.9th too" if limits.tail else ""
        made.append(f"bound: {meaning[bound]}{also}, counted from the start of its encoding")
    if winner and winner.estimate and winner.estimate.extrapolated:
        asked = ", ".join(winner.estimate.extrapolated)
        made.append(f"the profile was asked beyond its grid in {asked}: linear continuation")
    return tuple(made)
