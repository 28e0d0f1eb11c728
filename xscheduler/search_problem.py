"""A search problem: the constraints on the schedules of a search, and the data that all its spaces share."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from xcore.batching.admission import Admission
from xcore.errors import InputError
from xcore.policies import TRAITS
from xcore.policies.adjustment import USUAL_SHARE
from xcore.specs.bound import ALL_REQUESTS, BoundMeaning
from xcore.specs.deployment import Deployment
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Stage
from xscheduler import ceilings
from xscheduler.allocation import (
    Layout,
    Speeds,
    both_stages,
    layer_speeds,
    most_replicas,
    partial_layouts,
    replica_sizes,
    side_stages,
    uniform_layouts,
)
from xscheduler.space import Constraint
from xsimulator.cost.cost_model import CostModel
from xsimulator.cost.memo import memoized
from xsimulator.estimates import GROWING
from xsimulator.steady.load import Load
from xsimulator.steady.outcome import Needs, Outcome, latency, memory_share, per_token, ttft
from xsimulator.steady.scenario import Scenario

ENCODE_MICRO_BATCHES = (1, 2, 4)
"""Numbers of encoding micro-batches per stage that the spaces of RRA and hybrid enumerate."""
_BOTH, _ENCODERS = ("tp_degree", "tp_gpus", "replicas"), ("encode_devices", "encode_tp_degree")
ALLOCATION = (*_BOTH, *_ENCODERS)
"""The variables of the allocation that the user can fix, besides control variables."""


def variables_of(policy: str) -> tuple[str, ...]:
    """Return the variables that a policy has; those of the encoding side only if separate devices encode."""
    traits = TRAITS[policy]
    return (*traits.searched, *_BOTH, *(_ENCODERS if traits.disaggregated else ()))


def with_variables(policies: tuple[str, ...], fixed: Iterable[str]) -> tuple[str, ...]:
    """Return the policies that have all of these variables; InputError if no policy has them."""
    lacking = {policy: [name for name in fixed if name not in variables_of(policy)] for policy in policies}
    having = tuple(policy for policy, names in lacking.items() if not names)
    if not having:
        names = " and ".join(lacking[policies[0]] if len(policies) == 1 else fixed)
        who = (
            f"Policy {policies[0]} has no" if len(policies) == 1 else f"None of the policies {', '.join(policies)} has"
        )
        able = [policy for policy in TRAITS if set(fixed) <= set(variables_of(policy))]
        way = (
            f"{', '.join(able)} {'has' if len(able) == 1 else 'have'}"
            if able
            else ("leave one out, because no policy has all of them")
        )
        raise InputError(f"{who} {names}; {way}.")
    return having


@dataclass(frozen=True, eq=False)
class Division:
    """Another division of a mixture's experts among devices, with its times on both engines."""

    model: ModelSpec
    on: Deployment
    own: Deployment | None
    """This project's engine, for the policies that the profile's engine doesn't run."""


@dataclass(frozen=True)
class Limits:
    """The limits that a schedule must keep; None: no bound."""

    latency_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    resident: int | None = None
    """The most sequences that one replica may decode at a time."""
    kv_blocks: int | None = None
    """The most blocks of a KV pool, if the cache exists already."""

    def constraints(
        self, variables: int, widest: str = "resident", ttft_slack: float = 0.0, widest_slack: float = 0.0
    ) -> tuple[Constraint, ...]:
        """Return the constraints, memory first.

        Latencies and memory rise with every oriented variable, except for a share `ttft_slack` of the TTFT and
        `widest_slack` of the sequences decoded together. `widest` is the name from `SearchProblem.widest`.
        """
        up = (True,) * variables
        bounds = (("latency", self.latency_s, 0.0), ("ttft", self.ttft_s, ttft_slack), ("tpot", self.tpot_s, 0.0))
        constraints = [Constraint(name, limit, up, slack) for name, limit, slack in bounds if limit is not None]
        return (Constraint("memory", 1.0, up), Constraint(widest, 1.0, up, widest_slack), *constraints)

    def memory(self, scenario: Scenario, outcome: Outcome | Needs) -> float:
        """Return the fullest device's memory use as a share of its usable memory, or of the cache if that is more."""
        share = memory_share(scenario, outcome)
        return max(share, outcome.demand.blocks / self.kv_blocks) if self.kv_blocks else share

    def figures(self, scenario: Scenario, outcome: Outcome) -> tuple[float, ...]:
        """Return an outcome's figures in the order of the latency constraints."""
        figures = []
        if self.latency_s is not None:
            figures.append(latency(scenario, outcome))
        if self.ttft_s is not None:
            figures.append(ttft(scenario, outcome, scenario.bound.share))
        if self.tpot_s is not None:
            times = per_token(scenario, outcome)
            figures.append(times.quantile(scenario.bound.share) if times else 0.0)
        return tuple(figures)

    def fullness(self, scenario: Scenario, outcome: Outcome) -> float:
        """Return the largest ratio of a latency figure to its bound; 0 without a bound."""
        bounds = [bound for bound in (self.latency_s, self.ttft_s, self.tpot_s) if bound is not None]
        figures = self.figures(scenario, outcome) if bounds else ()
        return max((figure / bound for figure, bound in zip(figures, bounds, strict=True)), default=0.0)


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """A search problem: the constraints on schedules, with the data that all of its spaces share."""

    cost_model: CostModel
    load: Load
    limits: Limits
    fixed: dict[str, int]
    bound: BoundMeaning = ALL_REQUESTS
    variation: bool = True
    """Whether latencies include a margin for the variation of encoding times."""
    encode_micro_batches: tuple[int, ...] = ENCODE_MICRO_BATCHES
    partial: bool = True
    """Whether tensor-parallel groups may cover only a part of the devices."""
    admission: tuple[Admission, ...] = ("reserve",)
    """The admission rules to search, for policies that support them."""
    wider: float = 1.0
    """Factor on the most sequences decoded at a time."""
    open_system: bool = False
    """Whether requests arrive over time. Variables that decide the admission of waiting prompts then get finer grids.
    """
    finite: bool = False
    """Whether the requests are a short list, all of whose prompts may be encoded in one iteration."""
    adjust: float | None = USUAL_SHARE
    """`Schedule.adjust` of the policies that have a target."""

    @property
    def widest(self) -> tuple[str, int | None]:
        """The origin and the value of the limit on the sequences that one replica decodes at a time.

        The origin is `resident`, the user's limit, or `measured`, the largest batch of a measured profile. The value
        None means any number that a schedule allows.
        """
        profile, most = self.cost_model.profile, self.limits.resident
        why = "resident"
        if profile.source == "measured":
            seen = min(int(d.decoder.decode_attention.points[0][-1]) for d in profile.degrees)
            why, most = ("measured", seen) if most is None or seen < most else (why, most)
        return why, most and int(self.wider * most)

    def admissions(self, policy: str) -> tuple[Admission, ...]:
        """Return the searched admission rules that a policy and its steady state support."""
        grows = TRAITS[policy].grows and policy in GROWING
        return tuple(rule for rule in self.admission if rule == "reserve" or grows)

    @functools.cached_property
    def speeds(self) -> Speeds:
        """The speeds of layers at each tensor-parallel degree."""
        return layer_speeds(self.load.workload, self.cost_model.profile)

    def replica_sizes(self) -> tuple[int, ...]:
        """Return the device counts that a replica may have: one with attention data parallelism."""
        cluster, asked = self.cost_model.cluster, self.fixed.get("replicas")
        sizes = (1,) if self.cost_model.model.attention_dp > 1 else replica_sizes(cluster)
        return tuple(n for n in sizes if asked is None or most_replicas(cluster, n) == asked)

    def layouts(self, devices: int, uniform: bool, side: str = "decode") -> tuple[Layout, ...]:
        """Return the layouts of `devices` devices that match the tensor parallelism that the user fixed.

        WAA: `tp_degree` and `tp_gpus` apply to the decoding side.
        """
        cluster, model = self.cost_model.cluster, self.cost_model.model
        make = uniform_layouts if uniform or not self.partial else partial_layouts
        layouts = make(model, devices, cluster.devices_per_node, sorted(self.speeds))
        if side == "encode":
            asked = self.fixed.get("encode_tp_degree")
            return tuple(layout for layout in layouts if asked in (None, layout.degree))
        degree, gpus = self.fixed.get("tp_degree"), self.fixed.get("tp_gpus")
        return tuple(
            layout
            for layout in layouts
            if (degree is None or layout.degree == degree)
            and (gpus is None or layout.degree == 1 or layout.gpus == gpus)
        )

    def _scenario(self, stages: tuple[Stage, ...], devices: int) -> Scenario:
        """Return the scenario of these stages, with as many replicas of `devices` devices as fit on the cluster."""
        replicas = most_replicas(self.cost_model.cluster, devices)
        replica = self.cost_model.replica(stages)
        return Scenario(replica, self.load, self.bound, self.variation, replicas, self.adjust)

    @memoized
    def both(self, layout: Layout) -> Scenario:
        """Return the scenario of a layout whose stages encode and decode."""
        return self._scenario(both_stages(self.cost_model.model, self.speeds, layout), layout.devices)

    @memoized
    def side(self, layout: Layout, phase: Literal["encode", "decode"], offset: int = 0) -> tuple[Stage, ...]:
        """Return the stages of one of WAA's sides."""
        return side_stages(self.cost_model.model, self.speeds, layout, phase, offset)

    @memoized
    def split(self, encode: Layout, decode: Layout) -> Scenario:
        """Return the scenario of WAA's two sides."""
        stages = self.side(encode, "encode") + self.side(decode, "decode", encode.devices)
        return self._scenario(stages, encode.devices + decode.devices)

    @property
    def longest(self) -> int:
        """The output length in iterations that a latency bound applies to.

        Only the requests that may miss the bound are longer.
        """
        if self.bound.of_length:
            return round(float(self.load.steps_of(np.array([float(self.load.workload.p99_output)]))[0]))
        return self.load.steps.quantile(self.bound.share)

    @property
    def needs(self) -> tuple[float, float]:
        """Decode iterations of a query: the mean, and those of the length that the latency bound applies to."""
        return self.load.mean_iterations, self.longest - (1.0 if self.load.first_by_encoding else 0.0)

    @memoized
    def encoders(self, devices: int) -> dict[Layout, ceilings.EncodeReach]:
        """Return the layouts of WAA's encoding side on which the weights fit, with the best case of each."""
        layouts = self.layouts(devices, uniform=False, side="encode")
        sides = {layout: self.cost_model.replica(self.side(layout, "encode")) for layout in layouts}
        reach = {layout: ceilings.encode_reach(side, self.load.prompts) for layout, side in sides.items()}
        return {layout: encoder_reach for layout, encoder_reach in reach.items() if encoder_reach.rate}

    @property
    def slowest_iteration_s(self) -> float:
        """The most seconds that WAA's iterations may last on average under the bound on the time per token.

        Each token after the first takes an iteration. Between two KV transfers the first iterations have the most
        residents, and a query begins with them. So every query's mean time per token is at least the iterations' mean,
        and so is each percentile from the 50th on. No limit is known if an iteration may give several tokens, or if
        the first of them gives the first token, which does not count. Answers of one token have no such time: the
        bound is for the others, however few there are.
        """
        single = self.load.first_by_encoding and self.load.speculation is None and self.load.workload.output.max > 1
        return inf if self.limits.tpot_s is None or not single else self.limits.tpot_s

    @property
    def slowest_first_s(self) -> float:
        """The most seconds that encoding a prompt alone may take under the bound on WAA's time to first token.

        Batches take no less than one prompt, and a normal distribution's percentiles from the 50th on no less than its
        mean.
        """
        return inf if self.limits.ttft_s is None else self.limits.ttft_s

    @memoized
    def decoder(self, layout: Layout, micro_batches: int | None = None) -> ceilings.Reach | None:
        """Return the best case of a layout of WAA's decoding side; None if its weights don't fit.

        `micro_batches` has the same meaning as in `ceilings.reach`.
        """
        side = self.cost_model.replica(self.side(layout, "decode"))
        fit = ceilings.residents_that_fit(side, self.load)
        return ceilings.reach(side.decode, self.load.resident_context, fit, micro_batches) if fit >= 1 else None

    @memoized
    def _reach(self, layout: Layout, admission: Admission = "reserve") -> ceilings.Reach:
        """Return the best case of a layout whose stages encode and decode."""
        replica = self.both(layout).replica
        fit = ceilings.residents_that_fit(replica, self.load, admission)
        return ceilings.reach(replica.decode, self.load.resident_context, fit)

    @memoized
    def _interleaved(self, stages: int) -> ceilings.Interleaved:
        return ceilings.Interleaved.of(self.load, self.needs[1], stages)

    @memoized
    def phased_bounds(self, layout: Layout, interleaved: bool = False) -> ceilings.SpaceLimits:
        """Return the limits of throughput and latency for policies whose steps either encode or decode.

        `interleaved`: prompts are encoded while other queries are between their decode iterations (RRA).
        """
        scenario, reach, (mean, longest) = self.both(layout), self._reach(layout), self.needs
        encode = ceilings.encode_seconds(scenario.replica.decode, self.load.prompts)
        bound = self.limits.latency_s
        if interleaved and bound is not None:
            rate = self._interleaved(len(layout.degrees)).rate(reach, mean, longest, bound, encode)
        else:
            rate = ceilings.decode_rate(reach, mean, longest, bound)
        ceiling = self.tokens_s(1.0 / (encode + 1.0 / rate) if rate else 0.0, layout.devices)
        return ceilings.SpaceLimits(ceiling, ceilings.quickest(scenario, reach, longest, splits=False))

    @memoized
    def mixed_bounds(self, layout: Layout, admission: Admission, splits: bool) -> ceilings.SpaceLimits:
        """Return the limits of throughput and latency for policies that encode and decode in the same step.

        Such a step reads the weights once for both. `splits`: a prompt may be encoded in several steps.
        """
        scenario, reach, (mean, longest) = self.both(layout), self._reach(layout, admission), self.needs
        rate = ceilings.decode_rate(reach, mean, longest, self.limits.latency_s)
        tokens = self.load.prompts.mean + self.cost_model.rows * mean
        work = float(ceilings.token_seconds(scenario.replica.decode).max()) * tokens
        ceiling = self.tokens_s(min(rate, 1.0 / work), layout.devices)
        return ceilings.SpaceLimits(ceiling, ceilings.quickest(scenario, reach, longest, splits))

    def tokens_s(self, rate: float, devices: int) -> float:
        """Return the cluster's output tokens/s if replicas of `devices` devices serve `rate` sequences/s each.

        Includes the ceilings' margin.
        """
        replicas = most_replicas(self.cost_model.cluster, devices)
        return rate * ceilings.MARGIN * replicas * self.load.workload.output.mean
