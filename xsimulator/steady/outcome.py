"""Outcome: the result of a policy's steady state, and the figures that bounds and an Estimate need of it.

A search needs few figures of many outcomes, so each is computed on first use.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exegpt.estimate import Binding, Estimate
from exegpt.schedule import BLOCK_SIZE
from xsimulator.cost.memory import StageMemory
from xsimulator.cost.normal import even_normal
from xsimulator.steady.scenario import Scenario

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


@dataclass(frozen=True)
class Demand:
    """What a stage must hold: KV blocks, and the activations of the largest step."""

    blocks: int
    tokens: float
    """The most that a step computes."""
    sequences: float
    """The most of which a step samples a token."""

    @property
    def step(self) -> tuple[float, float]:
        """The largest step."""
        return self.tokens, self.sequences


@dataclass(frozen=True)
class Outcome:
    """One replica in its steady state."""

    throughput: float
    """Sequences per second."""
    lifetime: Callable[[Array], Lifetime]
    """Of queries by their output lengths."""
    first_token: tuple[float, float]
    """Mean and deviation of the time to first token."""
    demand: Demand
    decode_batch: int
    """The most sequences decoded at once, but for chance: B_D where the policy has it."""
    busy: Array
    """[stages]: busy fractions."""
    binding: Binding
    preemptions: float = 0.0
    """Per request."""
    encode_demand: Demand | None = None
    """Of stages that only encode."""
    crest: float = 0.0
    """No smaller batch gives more than this, where that may be more than `throughput`."""
    falls: bool = False
    """Whether larger batches give no more."""


def memory(scenario: Scenario, outcome: Outcome) -> tuple[tuple[StageMemory, int], ...]:
    """Every stage's memory and the blocks that it must hold."""
    encoding = outcome.encode_demand
    stages = scenario.replica.memory(outcome.demand.step, encoding.step if encoding else None)
    blocks = [
        encoding.blocks if encoding and stage.phase == "encode" else outcome.demand.blocks
        for stage in scenario.replica.stages
    ]
    return tuple(zip(stages, blocks, strict=True))


def memory_share(scenario: Scenario, outcome: Outcome) -> float:
    """The fullest device's use over what may be used."""
    demand, encoding = outcome.demand, outcome.encode_demand
    kinds = scenario.replica.memory_kinds(demand.step, encoding.step if encoding else None)
    encode_blocks = {"encode": encoding.blocks} if encoding else {}
    return max(stage.share(encode_blocks.get(phase, demand.blocks)) for phase, stage in kinds)


def latencies(scenario: Scenario, outcome: Outcome) -> tuple[float, float]:
    """The latency at the bound's meaning, and that of the 99.9th percentile of output lengths."""
    bounded, _, _, tail = _latencies(scenario, outcome)
    return bounded, tail


def _latencies(scenario: Scenario, outcome: Outcome) -> tuple[float, float, float, float]:
    """At the bound's meaning, the median (expected), the 99th percentile and the 99.9th of output lengths."""
    life = outcome.lifetime(scenario.lengths)
    bounded, _, p99, tail = life.seconds + _sigmas(scenario) * life.deviation
    return float(bounded), float(life.seconds[1]), float(p99), float(tail)


def _sigmas(scenario: Scenario) -> float:
    return SIGMAS if scenario.variation else 0.0


def ttft_p99(scenario: Scenario, outcome: Outcome) -> float:
    """The 99th percentile of the time to first token."""
    mean, deviation = outcome.first_token
    return mean + _sigmas(scenario) * deviation


def per_token(scenario: Scenario, outcome: Outcome) -> tuple[float | None, float | None]:
    """Mean and 99th percentile over queries of more than one token of the time per token after the first."""
    output = scenario.load.workload.output
    many = output.s > 1
    if not many.any():
        return None, None
    gaps, weight = output.s[many] - 1, output.p[many] / output.p[many].sum()
    life = outcome.lifetime(output.s[many])
    mean = (life.seconds - outcome.first_token[0]) / gaps
    if not scenario.variation or not life.deviation_after.any():
        return float(mean @ weight), _quantile(mean, weight, 0.99)
    spread = mean[:, None] + (life.deviation_after / gaps)[:, None] * _NODES
    return float(mean @ weight), _quantile(spread.ravel(), np.repeat(weight, len(_NODES)), 0.99)


_NODES = even_normal(48)


def _quantile(values: Array, weights: Array, q: float) -> float:
    """The smallest value whose cumulative weight reaches the share `q`."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, q - 1e-12)), len(values) - 1)])


def estimate_of(scenario: Scenario, outcome: Outcome) -> Estimate:
    """The whole Estimate. Bounds allow for `SIGMAS` deviations, means for none; replicas add up."""
    held = memory(scenario, outcome)
    violations = tuple(
        f"memory: {blocks:,} KV blocks are needed, {max(stage.blocks, 0):,} fit beside the weights"
        for stage, blocks in dict.fromkeys(held)
        if stage.blocks < blocks
    )
    bounded, median, p99, tail = _latencies(scenario, outcome)
    tpot, tpot_p99 = per_token(scenario, outcome)
    ranks = [i for i, stage in enumerate(scenario.replica.stages) for _ in stage.devices] * scenario.replicas
    throughput = outcome.throughput * scenario.replicas
    return Estimate(
        throughput_seq_s=throughput,
        throughput_tok_s=throughput * scenario.load.workload.output.mean,
        latency_s=bounded,
        latency_tail_s=tail,
        latency_p50_s=median,
        latency_p99_s=p99,
        ttft_s=outcome.first_token[0],
        ttft_p99_s=ttft_p99(scenario, outcome),
        tpot_s=tpot,
        tpot_p99_s=tpot_p99,
        memory_bytes=tuple(held[i][0].bytes(held[i][1]) for i in ranks),
        usable_bytes=held[0][0].usable,
        kv_blocks=outcome.demand.blocks,
        kv_tokens=outcome.demand.blocks * BLOCK_SIZE,
        utilisation=tuple(float(min(1.0, outcome.busy[i])) for i in ranks),
        binding=outcome.binding,
        preemptions_per_request=outcome.preemptions,
        feasible=not violations,
        violations=violations,
        extrapolated=tuple(sorted(scenario.replica.extrapolated)),
    )
