"""Scenario: everything about a question but the control variables, with what can be computed once."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from exegpt.cluster import ClusterSpec
from exegpt.model import BYTES, ModelSpec
from exegpt.profile import Profile
from exegpt.schedule import Bound, Schedule, Stage
from exegpt.workload import Workload
from xsimulator.memory import Reservation, StageMemory, biased_reservation, reservation, stage_memory
from xsimulator.stage import StageCost, stage_costs
from xsimulator.steady_state import Form, SteadyState, decode_iterations_of, steady_state

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Side:
    """The stages that one phase runs through, in order, and what iterations cost on each."""

    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]

    @functools.cached_property
    def _kinds(self) -> tuple[tuple[StageCost, ...], NDArray[np.intp]]:
        """The costs that differ, and which of them each stage has."""
        kinds = list({id(cost): cost for cost in self.costs}.values())
        places = {id(cost): i for i, cost in enumerate(kinds)}
        return tuple(kinds), np.array([places[id(cost)] for cost in self.costs])

    def each(self, seconds: Callable[[StageCost], Array]) -> Array:
        """What `seconds` gives on every stage, [..., stages]; it is called once for equal stages."""
        kinds, index = self._kinds
        if len(kinds) == 1:
            one = np.asarray(seconds(kinds[0]))
            return np.broadcast_to(one[..., None], (*one.shape, len(index)))
        found: Array = np.stack([seconds(cost) for cost in kinds], axis=-1)[..., index]
        return found


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

    @property
    def encoder_decoder(self) -> bool:
        """Whether the model has encoder layers."""
        return self.model.encoder_layers > 0

    @property
    def first_by_encoding(self) -> bool:
        """Whether a query's first token comes from its encoding pass, which then is one iteration less."""
        return not self.encoder_decoder and self.form == "exact"

    @functools.cached_property
    def extrapolated(self) -> set[str]:
        """Tables of the profile that were asked outside their grid."""
        return set()

    def _side(self, phase: str) -> Side:
        stages = tuple(s for s in self.stages if s.phase in ("both", phase))
        return Side(stages, stage_costs(stages, self.profile, self.extrapolated))

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
    def iterations(self) -> tuple[Array, Array]:
        """D(S) of every output length, and their probabilities."""
        return decode_iterations_of(self.workload.output, self.encoder_decoder, self.form)

    def steady(self, decode_iterations: int) -> SteadyState:
        """RRA's steady state at N_D, computed once."""
        key = ("steady", decode_iterations)
        if key not in self._cache:
            self._cache[key] = steady_state(self.workload, decode_iterations, self.encoder_decoder, self.form)
        return self._cache[key]  # type: ignore[return-value]

    def reservation(self, decode_iterations: int | None) -> Reservation:
        """Blocks held per query entering RRA's phases, or (None) a static batch; computed once."""
        key = ("reservation", decode_iterations)
        if key not in self._cache:
            self._cache[key] = reservation(self.workload, decode_iterations, self.encoder_decoder)
        return self._cache[key]  # type: ignore[return-value]

    @functools.cached_property
    def biased_reservation(self) -> Reservation:
        """Blocks held by one resident of iteration-level scheduling."""
        return biased_reservation(self.workload, self.encoder_decoder)

    def hops(self, side: Side, tokens: float) -> Array:
        """[stages]: seconds to hand the hidden states of `tokens` tokens to each stage of a side; 0 for the first."""
        sent, per_node = tokens * self.model.hidden * BYTES[self.profile.dtype], self.cluster.devices_per_node
        seconds = np.zeros(len(side.stages))
        if len(seconds) == 1:
            return seconds
        near, far = float(self.profile.send(sent)), float(self.profile.send_between_nodes(sent))
        for i, (a, b) in enumerate(zip(side.stages, side.stages[1:], strict=False), 1):
            seconds[i] = near if a.devices[-1] // per_node == b.devices[0] // per_node else far
        return seconds

    def send(self, tokens: float) -> float:
        """Seconds of the slowest hop between stages."""
        return float(max(self.hops(self.encode, tokens).max(), self.hops(self.decode, tokens).max()))

    def memory(self, tokens: float, encoding: float | None = None) -> tuple[StageMemory, ...]:
        """Memory of each stage's devices where up to `tokens` tokens are computed at once; on stages that only encode,
        up to `encoding`.
        """
        made = []
        for stage, cost in zip(self.stages, self.costs, strict=True):
            at_once = tokens if stage.phase != "encode" or encoding is None else encoding
            ends = (cost.first, cost.last and not (self.encoder_decoder and stage.phase == "encode"))
            made.append(
                stage_memory(self.model, self.cluster, stage, self.profile.dtype, self.kv_dtype, int(at_once), ends)
            )
        return tuple(made)
