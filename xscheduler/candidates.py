"""Candidates: one policy's space on one allocation, with the Estimate and the Schedule of each point."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from xcore.policies import TRAITS
from xcore.policies.from_schedule import checked
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule
from xcore.specs.workload import MAX_TOKENS
from xscheduler.ceilings import SpaceLimits
from xscheduler.search_problem import Limits, SearchProblem
from xscheduler.space import Evaluation, Family, Space, Variable
from xsimulator import estimates
from xsimulator.steady.closed_form import Steady
from xsimulator.steady.outcome import Needs, Outcome, estimate_of
from xsimulator.steady.scenario import Scenario

Values = tuple[int, ...]
Shares = tuple[float, float]
"""Shares of the memory, and of the most sequences decoded at a time."""

_NEAR = 0.002
"""Precision of the search for a pool size: its largest latency is within this share of the bound."""


@dataclass(frozen=True)
class Size:
    """The throughput of a point and what it needs besides time; a search at a rate needs no other figures."""

    throughput: float
    """Output tokens/s, or a bound on that of all smaller batches if it is higher."""
    shares: Shares
    blocks: int
    """KV blocks."""
    decode_batch: int


@dataclass(eq=False)
class Candidates(Space):
    """One policy's space on one allocation."""

    policy: str = ""
    scenario: Callable[[], Scenario] | None = None
    constants: dict[str, int] = field(default_factory=dict)
    """The variables that are fixed in this space."""
    quickest_s: float = 0.0
    """Seconds; no point has a lower latency."""
    pools: dict[Values, int] = field(default_factory=dict)
    """KV blocks of the points whose pool is smaller than the memory.

    Such a pool limits residents so that the bounds hold.
    """
    unshrunk: dict[Values, float] = field(default_factory=dict)
    """`best_below` of points with the whole memory, which a smaller pool would hide."""
    measure: Callable[[Values], Size] | None = None
    """Returns the size of a point, which is kept in `sizes`."""
    sizes: dict[Values, Size] = field(default_factory=dict)
    find_shares: Callable[[Values], Shares] | None = None
    """Returns a point's shares of its limits, which are kept in `shares`."""
    shares: dict[Values, Shares] = field(default_factory=dict)

    @functools.cached_property
    def where(self) -> Scenario:
        """The scenario; many spaces share it, and some searches never need it."""
        assert self.scenario is not None
        return self.scenario()

    @functools.cached_property
    def steady(self) -> Steady:
        """The policy's steady state in this scenario."""
        return estimates.steady(self.policy, self.where)

    def controls(self, values: Values) -> dict[str, int]:
        """Return all control variables of a point by their names in a Schedule."""
        pool = {"kv_blocks": self.pools[values]} if values in self.pools else {}
        return {**dict(zip((v.name for v in self.variables), values, strict=True)), **self.constants, **pool}

    def budget(self, values: Values) -> int | None:
        """Return the token budget of an iteration at a point; None if the policy has no such limit."""
        name = TRAITS[self.policy].name_of("tokens")
        return None if name is None else self.controls(values).get(name)

    def with_least_memory(self, values: Values) -> Outcome:
        """Evaluate a point at its lowest latency.

        If the residents grow with the pool, the pool holds a single sequence.
        """
        if not TRAITS[self.policy].disaggregated:
            return self.outcome(values)
        return self.steady({**self.controls(values), "kv_blocks": self.where.load.reservation(None).longest})

    def shrink(self, values: Values, limits: Limits, full: Outcome) -> Outcome:
        """Shrink a point's KV pool to the largest one that keeps the bounds, or to the smallest pool if none does.

        Residents fill the pool, so more memory makes each of them slower. Latencies are almost linear in the pool size.
        The next pool size is the secant's while this halves the interval; otherwise it is the middle.
        """
        low, high = self.where.load.reservation(None).longest, full.demand.blocks
        smallest, halved = self.with_least_memory(values), True
        below, above = limits.fullness(self.where, smallest), limits.fullness(self.where, full)
        while below <= 1.0 - _NEAR and high - low > 1:
            share = (1.0 - _NEAR / 2 - below) / (above - below) if halved else 0.5
            self.pools[values] = pool = min(max(low + int(share * (high - low)), low + 1), high - 1)
            tried, between = limits.fullness(self.where, self.outcome(values)), high - low
            if tried > 1.0:
                high, above = pool, tried
            else:
                low, below = pool, tried
            halved = high - low <= between / 2
        self.pools[values] = low
        return self.outcome(values)

    def size_of(self, values: Values) -> Size:
        """Return the size of a point; it is measured once."""
        if values not in self.sizes:
            assert self.measure is not None
            self.sizes[values] = self.measure(values)
        return self.sizes[values]

    def shares_of(self, values: Values) -> Shares:
        """Return a point's shares, as its size has them: without its times, if they depend on none."""
        if values in self.sizes:
            return self.sizes[values].shares
        if values not in self.shares:
            assert self.find_shares is not None
            self.shares[values] = self.find_shares(values)
        return self.shares[values]

    def outcome(self, values: Values) -> Outcome:
        """Evaluate a point."""
        return self.steady(self.controls(values))

    def estimate(self, values: Values) -> Estimate:
        """Return the complete Estimate of a point.

        It names the profile tables that were extrapolated beyond their grid.
        """
        watched = self.where.watched()
        return estimate_of(watched, estimates.outcome(watched, self.policy, self.controls(values)))


@dataclass(eq=False)
class CandidateFamily(Family):
    """The spaces of one policy, made when needed."""

    quickest_s: float = 0.0
    """Seconds; no point of these spaces has a lower latency."""


SATURATED_SLACK = 0.25
"""Share by which a full memory holds fewer residents of WAA if batches are larger: more sequences are on their way."""


def candidates(
    policy: str,
    problem: SearchProblem,
    scenario: Callable[[], Scenario],
    variables: tuple[Variable, ...],
    bounds: SpaceLimits,
    ttft_slack: float = 0.0,
    **constants: int,
) -> Candidates:
    """Return a policy's space on one allocation.

    `variables` are searched; `constants` holds the other variables by name. `scenario` is called only when a point is
    evaluated. `ttft_slack` has the same meaning as in `Limits.constraints`.
    """
    limits, (why, widest), disaggregated = problem.limits, problem.widest, TRAITS[policy].disaggregated

    def evaluate(values: Values) -> tuple[Outcome, float]:
        """Return a point's outcome, with a smaller pool if the bounds require it, and its best_below in tokens/s."""
        where, result = space.where, space.outcome(values)
        waits = disaggregated and (result.best_below or values[0] == 1)
        if waits and limits.fullness(where, result) > 1.0:
            space.unshrunk[values] = result.best_below
            result = space.shrink(values, limits, result)
        return result, max(space.unshrunk.get(values, 0.0), result.best_below) * tokens()

    def tokens() -> float:
        return space.where.replicas * space.where.load.workload.output.mean

    def shares(result: Outcome | Needs) -> Shares:
        beyond = result.decode_batch / widest if widest else 2.0 * (result.decode_batch > MAX_TOKENS)
        return limits.memory(space.where, result), beyond

    def simulate(values: Values) -> Evaluation:
        result, best_below = evaluate(values)
        figures = (*shares(result), *limits.figures(space.where, result))
        return Evaluation(result.throughput * tokens(), figures, best_below, result.no_better_above)

    def measure(values: Values) -> Size:
        result, best_below = evaluate(values)
        throughput = max(result.throughput * tokens(), best_below)
        return Size(throughput, shares(result), result.demand.blocks, result.decode_batch)

    def find_shares(values: Values) -> Shares:
        needs = estimates.needs(space.where, policy, space.controls(values))
        return shares(needs) if needs else space.size_of(values).shares

    space = Candidates(
        policy,
        variables,
        limits.constraints(len(variables), why, ttft_slack, SATURATED_SLACK if disaggregated else 0.0),
        simulate,
        bounds.ceiling,
        policy=policy,
        scenario=scenario,
        constants=constants,
        quickest_s=bounds.quickest_s,
        measure=measure,
        find_shares=find_shares,
    )
    return space


def _groups(space: Candidates, side: str) -> dict[str, int]:
    """Return T_P, the degree and the number of grouped devices, of the stages that run one phase."""
    grouped = [s for s in space.where.replica.stages if s.phase in ("both", side) and s.tp > 1]
    return {"tp_degree": grouped[0].tp if grouped else 1, "tp_gpus": sum(s.tp for s in grouped)}


def allocation(space: Candidates) -> dict[str, int]:
    """Return the variables that fix a space's allocation."""
    fixed = {"replicas": space.where.replicas, **_groups(space, "decode")}
    if not TRAITS[space.policy].disaggregated:
        return fixed
    devices = sum(s.tp for s in space.where.replica.stages if s.phase == "encode")
    return fixed | {"encode_tp_degree": _groups(space, "encode")["tp_degree"], "encode_devices": devices}


def schedule(space: Candidates, values: Values, limits: Limits, size: Size | None = None) -> Schedule:
    """Return the Schedule of a point, with the point's size in the steady state or with another `size`."""
    where, controls = space.where, space.controls(values)
    replica, cost_model, size = where.replica, where.replica.cost_model, size or space.size_of(values)
    controls.pop("kv_blocks", None)
    grows = controls.pop("grows", False)
    made = Schedule(
        version=Schedule.VERSION,
        policy=space.policy,
        control=TRAITS[space.policy].record(controls, size.decode_batch),
        admission="grow" if grows else "reserve",
        model=ModelReference(cost_model.model, cost_model.model.fingerprint),
        cluster=cost_model.cluster,
        workload=where.load.question,
        profile=ProfileReference(cost_model.profile.source, cost_model.profile.fingerprint),
        stages=replica.stages,
        kv_blocks=size.blocks,
        dtype=cost_model.profile.dtype,
        kv_dtype=cost_model.kv_dtype,
        latency_bound_s=limits.latency_s,
        ttft_bound_s=limits.ttft_s,
        tpot_bound_s=limits.tpot_s,
        bound=where.bound.name,
        percentile=where.bound.percentile,
        replicas=where.replicas,
        adjust=where.adjust if TRAITS[space.policy].adjustable else None,
        prefix_caching=where.load.cached is not None,
        speculation=where.load.speculation,
    )
    return checked(made)
