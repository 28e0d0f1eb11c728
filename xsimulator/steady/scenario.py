"""Scenario: everything about a question but the control variables, with what can be computed once."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from exegpt.cluster import ClusterSpec
from exegpt.model import ModelSpec, activation_bytes
from exegpt.profile import Profile
from exegpt.schedule import Bound, Schedule, Stage
from exegpt.workload import Workload
from xsimulator.cost.group import Group
from xsimulator.cost.side import Side
from xsimulator.cost.stage import StageCost, stage_costs
from xsimulator.steady.memory import BlockDistribution, Reservation, StageMemory, stage_memory
from xsimulator.steady.residents import Form, SteadyState, decode_iterations_of, length_biased_context, steady_state

Array = NDArray[np.float64]
Figure = TypeVar("Figure")


@dataclass(frozen=True, eq=False)
class Scenario:
    """A model on stages of a cluster under a workload, and how to count."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    profile: Profile
    stages: tuple[Stage, ...]
    """Of one replica."""
    kv_dtype: str
    bound: Bound = "p99-length"
    form: Form = "exact"
    variation: bool = True
    """Whether latencies allow for the variation of encoding times."""
    replicas: int = 1
    watched: bool = True
    """Whether it is noted which tables are asked outside their grid."""
    _cache: dict[object, object] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(schedule: Schedule, profile: Profile, workload: Workload | None, form: Form, variation: bool) -> "Scenario":
        """The scenario that a schedule was made for, or its like under another workload."""
        return Scenario(
            schedule.model.spec,
            schedule.cluster,
            workload or schedule.workload,
            profile,
            schedule.stages,
            schedule.kv_dtype,
            schedule.bound,
            form,
            variation,
            schedule.replicas,
        )

    def once(self, key: object, make: Callable[[], Figure]) -> Figure:
        """What all scenarios that share this one's cache need alike, made once."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]  # type: ignore[return-value]

    @property
    def encoder_decoder(self) -> bool:
        """Whether the model has encoder layers."""
        return self.model.encoder_layers > 0

    @property
    def first_by_encoding(self) -> bool:
        """Whether a query's first token comes from its encoding pass, which then is one iteration less."""
        return not self.encoder_decoder and self.form == "exact"

    @property
    def extrapolated(self) -> set[str]:
        """Tables of the profile that were asked outside their grid, by any scenario that shares this one's cache."""
        return set().union(*(self.group(tp).extrapolated for tp in {stage.tp for stage in self.stages}))

    def _side(self, phase: str) -> Side:
        stages = tuple(s for s in self.stages if s.phase in ("both", phase))
        return self.once(("side", stages), lambda: Side(stages, stage_costs(stages, self.group)))

    def group(self, tp: int) -> Group:
        """What iterations cost on a tensor-parallel group of this degree; made once."""
        return self.once(("group", tp), lambda: Group(self.profile.degree(tp), self.profile.overhead, self.watched))

    @functools.cached_property
    def encode(self) -> Side:
        """Where prompts are encoded."""
        return self._side("encode")

    @functools.cached_property
    def decode(self) -> Side:
        """Where tokens are decoded: the same stages as `encode`, unless the schedule parts them."""
        return self.encode if all(s.phase == "both" for s in self.stages) else self._side("decode")

    @functools.cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """What iterations cost on each stage, in the order of `stages`."""
        sides = {"both": iter(self.encode.costs), "encode": iter(self.encode.costs), "decode": iter(self.decode.costs)}
        return tuple(next(sides[s.phase]) for s in self.stages)

    @functools.cached_property
    def lengths(self) -> Array:
        """Output lengths that latencies are told of: the bound's, the median, the 99th percentile and the 99.9th."""
        output = self.workload.output
        p99 = output.quantile(0.99)
        bounded = self.workload.p99_output if self.bound == "p99-length" else p99
        return np.array([bounded, output.quantile(0.5), p99, max(bounded, output.quantile(0.999))], dtype=np.float64)

    @functools.cached_property
    def iterations(self) -> tuple[Array, Array]:
        """D(S) of every output length, and their probabilities."""
        return decode_iterations_of(self.workload.output, self.encoder_decoder, self.form)

    def steady(self, decode_iterations: int) -> SteadyState:
        """RRA's steady state at N_D, computed once."""
        return self.once(
            ("steady", decode_iterations),
            lambda: steady_state(self.workload, decode_iterations, self.encoder_decoder, self.form),
        )

    @functools.cached_property
    def _block_distribution(self) -> BlockDistribution:
        return self.once("block distribution", lambda: BlockDistribution.of(self.workload, self.encoder_decoder))

    def reservation(self, decode_iterations: float | None) -> Reservation:
        """Blocks held per query entering RRA's phases, or (None) a static batch; computed once."""
        return self.once(
            ("reservation", decode_iterations), lambda: self._block_distribution.reservation(decode_iterations)
        )

    @functools.cached_property
    def biased_reservation(self) -> Reservation:
        """Blocks held by one resident of iteration-level scheduling."""
        return self.once(
            "biased reservation",
            lambda: BlockDistribution.of(self.workload, self.encoder_decoder, resident=True).reservation(None),
        )

    @functools.cached_property
    def resident_context(self) -> float:
        """Mean context of a resident query, averaged over iterations."""
        return self.once("resident context", lambda: length_biased_context(self.workload, self.encoder_decoder))

    def hops(self, side: Side, tokens: float) -> Array:
        """[stages]: seconds to hand the hidden states of `tokens` tokens to each stage of a side; 0 for the first."""
        sent = tokens * self.model.hidden * activation_bytes(self.profile.dtype)
        near, far = self._hops(side)
        seconds: Array = np.zeros(len(side.stages))
        if near is not None:
            seconds += near * self.profile.send.at(sent)
        if far is not None:
            seconds += far * self.profile.send_between_nodes.at(sent)
        return seconds

    def way(self, side: Side, tokens: float) -> float:
        """Seconds of all hops of a side together."""
        sent = tokens * self.model.hidden * activation_bytes(self.profile.dtype)
        near, far = self.once(("way", side), lambda: [0.0 if n is None else float(n.sum()) for n in self._hops(side)])
        seconds = near * self.profile.send.at(sent) if near else 0.0
        return seconds + (far * self.profile.send_between_nodes.at(sent) if far else 0.0)

    def _hops(self, side: Side) -> tuple[Array | None, Array | None]:
        """[stages] each: whether the hop to a stage stays within a node, and whether it leaves one; None: no hop."""

        def make() -> tuple[Array | None, Array | None]:
            node = [[rank // self.cluster.devices_per_node for rank in stage.devices] for stage in side.stages]
            crosses = np.array([0.0, *(float(a[-1] != b[0]) for a, b in itertools.pairwise(node))])
            first = np.array([0.0, *([1.0] * (len(node) - 1))])
            near = first * (1 - crosses)
            return near if near.any() else None, crosses if crosses.any() else None

        return self.once(("hops", side), make)

    def send(self, tokens: float) -> float:
        """Seconds of the slowest hop between stages."""
        return float(max(self.hops(self.encode, tokens).max(), self.hops(self.decode, tokens).max()))

    @functools.cached_property
    def _memory_kinds(self) -> tuple[tuple[tuple[str, StageMemory], ...], tuple[int, ...]]:
        """The phases and memories of a device that computes one token at a time, as far as they differ, and which of
        them each stage has.
        """
        kinds: dict[tuple[str, StageCost], tuple[str, StageMemory]] = {}
        for stage, cost in zip(self.stages, self.costs, strict=True):
            if (stage.phase, cost) not in kinds:
                ends = (cost.first, cost.last and not (self.encoder_decoder and stage.phase == "encode"))
                made = stage_memory(self.model, self.cluster, stage, self.profile.dtype, self.kv_dtype, 1, ends)
                kinds[stage.phase, cost] = (stage.phase, made)
        places = {key: place for place, key in enumerate(kinds)}
        of_stages = (places[s.phase, c] for s, c in zip(self.stages, self.costs, strict=True))
        return tuple(kinds.values()), tuple(of_stages)

    def memory_kinds(self, tokens: float, encoding: float | None = None) -> tuple[tuple[str, StageMemory], ...]:
        """Phase and memory of a device where up to `tokens` tokens are computed at once, and up to `encoding` on stages
        that only encode: one of every kind of stage that there is.
        """
        kinds, _ = self._memory_kinds
        computed = {"encode": tokens if encoding is None else encoding, "both": tokens, "decode": tokens}
        return tuple((phase, memory.at_once(computed[phase])) for phase, memory in kinds)

    def memory(self, tokens: float, encoding: float | None = None) -> tuple[StageMemory, ...]:
        """Memory of each stage's devices, as `memory_kinds`."""
        kinds = self.memory_kinds(tokens, encoding)
        return tuple(kinds[place][1] for place in self._memory_kinds[1])

    def room(self, tokens: float, phase: str | None = None) -> int:
        """KV blocks that fit on every stage (None), or every stage of one phase, where so many tokens are computed at
        once.
        """
        kinds = self.memory_kinds(tokens)
        return min(memory.blocks for own, memory in kinds if phase is None or own == phase)
