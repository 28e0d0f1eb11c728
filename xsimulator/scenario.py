"""Scenario: everything about a question but the control variables, with what can be computed once."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from exegpt.cluster import ClusterSpec
from exegpt.estimate import Binding, Estimate
from exegpt.model import BYTES, ModelSpec
from exegpt.profile import Profile
from exegpt.schedule import Bound, Schedule, Stage
from exegpt.workload import Workload
from xsimulator.memory import Reservation, StageMemory, biased_reservation, reservation, stage_memory
from xsimulator.stage import StageCost, stage_cost
from xsimulator.steady_state import Form, SteadyState, decode_iterations_of, steady_state

Array = NDArray[np.float64]

SIGMAS = 2.33
"""Standard deviations of the encoding time that a latency allows for: the 99th percentile."""


@dataclass(frozen=True)
class Lifetime:
    """What queries of given output lengths live through, arrays [n] in seconds."""

    seconds: Array
    """From the start of the encoding to the last token, expected."""
    deviation: Array
    """The standard deviation of that."""
    deviation_after: Array
    """The standard deviation of the time from the first token to the last."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """A model on stages of a cluster under a workload, and how to count."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    profile: Profile
    stages: tuple[Stage, ...]
    kv_dtype: str
    bound: Bound = "p99-length"
    form: Form = "exact"
    variation: bool = True
    """Whether latencies allow for the variation of encoding times."""
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
        )

    @property
    def encoder_decoder(self) -> bool:
        """Whether the model has encoder layers."""
        return self.model.encoder_layers > 0

    @functools.cached_property
    def extrapolated(self) -> set[str]:
        """Tables of the profile that were asked outside their grid."""
        return set()

    @functools.cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """What iterations cost on each stage."""
        count = len(self.stages)
        return tuple(stage_cost(self.profile, s, count, i, self.extrapolated) for i, s in enumerate(self.stages))

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

    def send(self, tokens: float) -> float:
        """Seconds to hand the hidden states of `tokens` tokens to the next stage."""
        if len(self.stages) == 1:
            return 0.0
        per_node = self.cluster.devices_per_node
        crosses = any(a.devices[-1] // per_node != b.devices[0] // per_node for a, b in itertools.pairwise(self.stages))
        table = self.profile.send_between_nodes if crosses else self.profile.send
        return float(table(tokens * self.model.hidden * BYTES[self.profile.dtype]))

    def memory(self, tokens: float) -> tuple[StageMemory, ...]:
        """Memory of each stage's devices where up to `tokens` tokens are computed at once."""
        last = len(self.stages) - 1
        return tuple(
            stage_memory(
                self.model, self.cluster, s, self.profile.dtype, self.kv_dtype, int(tokens), (i == 0, i == last)
            )
            for i, s in enumerate(self.stages)
        )

    def estimate(
        self,
        throughput: float,
        lifetime: Callable[[Array], Lifetime],
        first_token: tuple[float, float],
        blocks: int,
        tokens: float,
        busy: Array,
        binding: Binding,
    ) -> Estimate:
        """An Estimate from a policy's figures.

        `throughput` in sequences/s; `lifetime` maps output lengths to what their queries live through; `first_token`
        is the mean and the deviation of the time to first token; `blocks` KV blocks are needed and `tokens` tokens
        computed at once; `busy` [stages] are busy fractions. Bounds allow for `SIGMAS` deviations, means for none.
        """
        output = self.workload.output
        memory = self.memory(tokens)
        fit = min(m.blocks for m in memory)
        violations = []
        if fit < blocks:
            violations.append(f"memory: {blocks} KV blocks are needed, {max(fit, 0)} fit beside the weights")
        length = self.workload.p99_output if self.bound == "p99-length" else output.quantile(0.99)
        sigmas = SIGMAS if self.variation else 0.0
        lengths = [length, output.quantile(0.5), output.quantile(0.99), max(length, output.quantile(0.999))]
        life = lifetime(np.array(lengths, dtype=np.float64))
        bounded, _, p99, tail = life.seconds + sigmas * life.deviation
        first, first_deviation = first_token
        tpot, tpot_p99 = self._per_token(lifetime, first)
        ranks = [i for i, stage in enumerate(self.stages) for _ in stage.devices]
        return Estimate(
            throughput_seq_s=throughput,
            throughput_tok_s=throughput * output.mean,
            latency_s=float(bounded),
            latency_tail_s=float(tail),
            latency_p50_s=float(life.seconds[1]),
            latency_p99_s=float(p99),
            ttft_s=first,
            ttft_p99_s=first + sigmas * first_deviation,
            tpot_s=tpot,
            tpot_p99_s=tpot_p99,
            memory_bytes=tuple(memory[i].bytes(blocks) for i in ranks),
            utilisation=tuple(float(min(1.0, busy[i])) for i in ranks),
            binding=binding,
            feasible=not violations,
            violations=tuple(violations),
            extrapolated=tuple(sorted(self.extrapolated)),
        )

    def _per_token(self, lifetime: Callable[[Array], Lifetime], first: float) -> tuple[float | None, float | None]:
        """Mean and 99th percentile over queries of more than one token of the time per token after the first."""
        output = self.workload.output
        many = output.s > 1
        if not many.any():
            return None, None
        gaps, weight = output.s[many] - 1, output.p[many] / output.p[many].sum()
        life = lifetime(output.s[many])
        mean = (life.seconds - first) / gaps
        if not self.variation or not life.deviation_after.any():
            return float(mean @ weight), _quantile(mean, weight, 0.99)
        spread = mean[:, None] + (life.deviation_after / gaps)[:, None] * _NODES
        return float(mean @ weight), _quantile(spread.ravel(), np.repeat(weight, len(_NODES)), 0.99)


_NODES = ndtri((np.arange(48) + 0.5) / 48)
"""Equally likely values of a standard normal."""


def _quantile(values: Array, weights: Array, q: float) -> float:
    """The smallest value whose cumulative weight reaches the share `q`."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, q - 1e-12)), len(values) - 1)])
