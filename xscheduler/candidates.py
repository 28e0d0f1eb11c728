"""Candidates: one policy's space on one allocation, and the Estimate and the Schedule of a point of it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from exegpt.estimate import Estimate
from exegpt.policies import TRAITS, checked
from exegpt.schedule import ModelReference, ProfileReference, Schedule
from xscheduler.question import Limits, Question
from xscheduler.space import Evaluation, Family, Space, Variable
from xsimulator import estimates
from xsimulator.steady.outcome import Outcome, estimate_of
from xsimulator.steady.scenario import Scenario

Values = tuple[int, ...]


@dataclass(eq=False)
class Candidates(Space):
    """One policy's space on one allocation."""

    policy: str = ""
    scenario: Callable[[], Scenario] | None = None
    constants: dict[str, int] = field(default_factory=dict)
    """The variables that are fixed in it."""
    quickest_s: float = 0.0
    """No point has a lower latency."""

    @property
    def where(self) -> Scenario:
        """The scenario, which many spaces share and some searches never ask for."""
        assert self.scenario is not None
        return self.scenario()

    def controls(self, values: Values) -> dict[str, int | None]:
        """All control variables of a point by their names in a Schedule."""
        return {**dict(zip((v.name for v in self.variables), values, strict=True)), **self.constants}

    def outcome(self, values: Values) -> Outcome:
        """The evaluation of a point."""
        return estimates.outcome(self.where, self.policy, self.controls(values))

    def estimate(self, values: Values) -> Estimate:
        """A point's whole Estimate, in a scenario made anew: which tables it asked beyond their grid is its own."""
        fresh = replace(self.where, watched=True, _cache={})
        return estimate_of(fresh, estimates.outcome(fresh, self.policy, self.controls(values)))


@dataclass(eq=False)
class CandidateFamily(Family):
    """Spaces of one policy."""

    quickest_s: float = 0.0
    """No point of them has a lower latency."""


@dataclass(frozen=True)
class Bounds:
    """What no point of a space exceeds: output tokens per second, and from below seconds of latency."""

    ceiling: float
    quickest_s: float


def candidates(
    policy: str,
    question: Question,
    scenario: Callable[[], Scenario],
    variables: tuple[Variable, ...],
    bounds: Bounds,
    **constants: int,
) -> Candidates:
    """A policy's space on one allocation: `variables` are searched, `constants` are the others by name, and `scenario`
    is asked for only when a point is.
    """
    limits, (why, widest) = question.limits, question.widest

    def simulate(values: Values) -> Evaluation:
        where, result = space.where, space.outcome(values)
        beyond = resident(space, values) / widest if widest else 0.0
        figures = (limits.memory(where, result), beyond, *limits.figures(where, result))
        tokens = where.replicas * where.workload.output.mean
        return Evaluation(result.throughput * tokens, figures, result.crest * tokens, result.falls)

    space = Candidates(
        policy,
        variables,
        limits.constraints(len(variables), why),
        simulate,
        bounds.ceiling,
        policy=policy,
        scenario=scenario,
        constants=constants,
        quickest_s=bounds.quickest_s,
    )
    return space


def resident(space: Candidates, values: Values) -> int:
    """Sequences decoded at once at a point, by one replica."""
    decode_batch = estimates.steady(space.policy).decode_batch
    return decode_batch(space.where, space.controls(values)) if decode_batch else values[0]


def schedule(space: Candidates, values: Values, limits: Limits) -> Schedule:
    """The Schedule of a point."""
    where, controls, traits = space.where, space.controls(values), TRAITS[space.policy]
    if traits.adjustable:
        controls["decode_batch"] = resident(space, values)

    def partial(side: str) -> tuple[int, int]:
        """T_P: the degree, and the devices in groups."""
        grouped = [s for s in where.stages if s.phase in ("both", side) and s.tp > 1]
        return (grouped[0].tp if grouped else 1), sum(s.tp for s in grouped)

    controls["tp_degree"], controls["tp_gpus"] = partial("decode")
    if traits.disaggregated:
        controls["encode_tp_degree"], controls["encode_tp_gpus"] = partial("encode")
    made = Schedule(
        version=Schedule.VERSION,
        policy=space.policy,
        model=ModelReference(where.model, where.model.fingerprint),
        cluster=where.cluster,
        workload=where.workload.without_requests,
        profile=ProfileReference(where.profile.source, where.profile.fingerprint),
        stages=where.stages,
        kv_blocks=space.outcome(values).demand.blocks,
        dtype=where.profile.dtype,
        kv_dtype=where.kv_dtype,
        latency_bound_s=limits.latency_s,
        bound=where.bound,
        replicas=where.replicas,
        **controls,  # type: ignore[arg-type]
    )
    return checked(made)
