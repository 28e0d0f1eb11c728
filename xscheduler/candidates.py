"""The spaces of each policy: which control variables it has, how they are oriented, and the Schedule of a point."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from exegpt.estimate import Estimate
from exegpt.schedule import ModelReference, ProfileReference, Schedule
from exegpt.workload import LengthDistribution
from xscheduler.space import Constraint, Evaluation, Space, Variable
from xsimulator.policies import chunked, iterations, orca, rra, static
from xsimulator.scenario import Scenario

PREFILLS = (1, 2, 4, 8)
"""Prompts an iteration that Orca's spaces enumerate."""
TOKEN_BUDGETS = tuple(2**i for i in range(6, 14))
"""Tokens an iteration that chunked prefill's spaces enumerate."""
MOST = 2048
"""Largest batch that is looked at."""


@dataclass(frozen=True)
class Limits:
    """What a schedule must keep to; None: no bound."""

    latency_s: float | None = None
    tail: bool = False
    """Whether `latency_s` holds for the 99.9th percentile of output lengths too."""
    ttft_s: float | None = None
    """On the 99th percentile."""
    tpot_s: float | None = None
    """On the 99th percentile."""
    resident: int | None = None
    """The most sequences decoded at once."""

    def constraints(self, variables: int) -> tuple[Constraint, ...]:
        """Memory first; latencies and memory rise with every oriented variable."""
        up = (True,) * variables
        bounds = (("latency", self.latency_s), ("ttft", self.ttft_s), ("tpot", self.tpot_s))
        made = [Constraint(name, limit, up) for name, limit in bounds if limit is not None]
        return (Constraint("memory", 1.0, up), Constraint("resident", 1.0, up), *made)

    def latency(self, estimate: Estimate) -> float | None:
        """The latency of an estimate that `latency_s` bounds."""
        return estimate.latency_tail_s if self.tail else estimate.latency_s

    def figures(self, estimate: Estimate) -> tuple[float, ...]:
        """An estimate's figures in the order of the latency constraints."""
        pairs = (
            (self.latency_s, self.latency(estimate)),
            (self.ttft_s, estimate.ttft_p99_s),
            (self.tpot_s, estimate.tpot_p99_s),
        )
        return tuple(0.0 if value is None else value for limit, value in pairs if limit is not None)


@dataclass(eq=False)
class Candidates(Space):
    """One policy's space on one allocation; the variables that are fixed in it complete a point."""

    scenario: Scenario | None = None
    estimate: Callable[[tuple[int, ...]], Estimate] | None = None
    schedule: Callable[[tuple[int, ...]], Schedule] | None = None


def iteration_counts(output: LengthDistribution, p99_output: int) -> tuple[int, ...]:
    """Values of N_D that are looked at, falling: all up to 64, beyond that steps of 3 % and the least N_D that brings
    a query of the bound's length through in j phases, for every j.
    """
    counts = {*range(1, 65), output.max}
    counts.update(int(64 * 1.03**k) for k in range(1, math.ceil(math.log(max(output.max, 65) / 64, 1.03))))
    for length in (p99_output, output.quantile(0.999)):
        counts.update(-(-(length - 1) // phases) for phases in range(1, length // 64 + 1))
    return tuple(sorted((n for n in counts if 1 <= n <= output.max), reverse=True))


def spaces(policy: str, scenario: Scenario, limits: Limits, fixed: dict[str, int]) -> list[Candidates]:
    """The spaces of a policy in a scenario; `fixed` variables have the one value given."""

    def ascending(name: str, most: int) -> Variable:
        return Variable(name, (fixed[name],) if name in fixed else tuple(range(1, most + 1)))

    def enumerated(name: str, values: tuple[int, ...]) -> tuple[int, ...]:
        return (fixed[name],) if name in fixed else values

    if policy == "rra":
        falling = enumerated(
            "decode_iterations", iteration_counts(scenario.workload.output, scenario.workload.p99_output)
        )
        # A pipeline drains at a phase's end, which weighs most where phases are short; measured times are not smooth.
        smooth = len(scenario.stages) == 1 and scenario.profile.source != "measured"
        return [
            _candidates(
                policy,
                scenario,
                limits,
                (ascending("encode_batch", MOST), Variable("decode_iterations", falling, smooth)),
                lambda v: rra.estimate(scenario, *v),
                lambda v: rra.blocks(scenario, *v),
                lambda v: rra.decode_batch(scenario, *v),
            )
        ]
    if policy == "static":
        return [
            _candidates(
                policy,
                scenario,
                limits,
                (ascending("encode_batch", MOST),),
                lambda v: static.estimate(scenario, *v),
                lambda v: static.blocks(scenario, *v),
                lambda v: v[0],
            )
        ]
    name, values = {
        "orca": ("prefills_per_step", PREFILLS),
        "chunked": ("max_num_batched_tokens", TOKEN_BUDGETS),
    }[policy]
    model = {"orca": orca.estimate, "chunked": chunked.estimate}[policy]
    made = []
    for value in enumerated(name, values):
        most = MOST if policy == "orca" else min(MOST, value)  # vLLM refuses a budget below the sequences
        made.append(
            _candidates(
                policy,
                scenario,
                limits,
                (ascending("max_num_seqs", most),),
                lambda v, value=value: model(scenario, v[0], value),  # type: ignore[misc]
                lambda v: iterations.blocks(scenario, v[0]),
                lambda v: v[0],
                {name: value},
            )
        )
    return made


def _candidates(
    policy: str,
    scenario: Scenario,
    limits: Limits,
    variables: tuple[Variable, ...],
    estimate: Callable[[tuple[int, ...]], Estimate],
    blocks: Callable[[tuple[int, ...]], int],
    resident: Callable[[tuple[int, ...]], int],
    constants: dict[str, int] | None = None,
) -> Candidates:
    # A measured profile is not trusted for batches beyond those it saw.
    seen = [d.decoder.decode_attention.points[0][-1] for d in scenario.profile.degrees]
    widest = min(
        [*([limits.resident] if limits.resident else []), *(seen if scenario.profile.source == "measured" else [])],
        default=None,
    )

    usable = scenario.cluster.device.memory_bytes * scenario.cluster.memory_fraction

    def simulate(values: tuple[int, ...]) -> Evaluation:
        found = estimate(values)
        memory = max(found.memory_bytes) / usable
        beyond = resident(values) / widest if widest else 0.0
        return Evaluation(found.throughput_tok_s, (memory, beyond, *limits.figures(found)), "; ".join(found.violations))

    def schedule(values: tuple[int, ...]) -> Schedule:
        named = dict(zip((v.name for v in variables), values, strict=True)) | (constants or {})
        if policy == "rra":
            named["decode_batch"] = resident(values)
        stages = scenario.stages
        return Schedule(
            version=Schedule.VERSION,
            policy=policy,  # type: ignore[arg-type]
            model=ModelReference(scenario.model, scenario.model.fingerprint),
            cluster=scenario.cluster,
            workload=scenario.workload.laws,
            profile=ProfileReference(scenario.profile.source, scenario.profile.fingerprint),
            stages=stages,
            kv_blocks=blocks(values),
            dtype=scenario.profile.dtype,
            kv_dtype=scenario.kv_dtype,
            latency_bound_s=limits.latency_s,
            bound=scenario.bound,
            tp_degree=stages[0].tp,
            tp_gpus=len(stages) * stages[0].tp if stages[0].tp > 1 else 0,
            **named,  # type: ignore[arg-type]
        )

    name = f"{policy}-tp{scenario.stages[0].tp}" + "".join(f"-{v}" for v in (constants or {}).values())
    return Candidates(
        name,
        variables,
        limits.constraints(len(variables)),
        simulate,
        scenario=scenario,
        estimate=estimate,
        schedule=schedule,
    )
