"""Outcome: the result of a policy's steady state, and the figures of it that bounds and an Estimate need.

A search needs few figures of many outcomes, so each is computed on first use.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array, Flags
from xcore.specs.engine_spec import engine_of
from xcore.specs.estimate import Binding, Estimate
from xcore.specs.schedule import BLOCK_SIZE
from xsimulator.cost.memory import StageMemory
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.times import Times

SIGMAS = 2.33
"""Standard deviations of the prefill time that a latency allows for: the 99th percentile."""


_MANY, _EACH = 4.0, np.arange(12.0)
"""Interruptions beyond which their sum is nearly normal; numbers of them that are counted one by one."""
_FACTORIALS = np.cumprod(np.maximum(_EACH, 1.0))
_FREE = 0.7
"""Share of their variance from which on interruptions count as independent."""


@dataclass(frozen=True)
class Interruptions:
    """Prefills of other prompts while a sequence decodes, at random (Poisson)."""

    count: Array
    """[n]: expected number."""
    seconds: float
    """Mean seconds of one interruption."""
    deviation: float
    scale: Array
    """[n]: share of the sum's variance that remains, since an iteration takes a limited number of prompt tokens."""

    @property
    def variance(self) -> Array:
        """Return [n]: variance of the sum of a sequence's interruptions, in seconds squared."""
        variance: Array = self.scale * self.count * (self.seconds**2 + self.deviation**2)
        return variance

    @property
    def few(self) -> Flags:
        """Return [n]: whether there are so few interruptions that their sum isn't nearly normal."""
        few: Flags = (self.count <= _MANY) & (self.scale > _FREE)
        return few


@dataclass(frozen=True)
class Lifetime:
    """The times of queries of given output lengths, as arrays [n] in seconds."""

    seconds: Array
    """Expected time from the start of the prefill to the last token, without the front end's time."""
    deviation: Array
    """Standard deviation of `seconds` among prompts of one kind (`Outcome.first_token`)."""
    deviation_after: Array
    """Standard deviation of the time from the first token to the last."""
    interruptions: Interruptions | None = None
    """Main part of that deviation, where it is known; a few interruptions are not nearly normal."""
    decoding: Array | float = 0.0
    """[n]: what varying iterations add to `deviation`; the paper's meaning of a bound leaves it out."""
    together: Array | None = None
    """[n]: share of the first tokens' spread that is gone at the last tokens, if a batch ends together; None: 0."""


@dataclass(frozen=True)
class StageDemand:
    """What a stage must hold: KV blocks, and the activations of the largest step."""

    blocks: int
    tokens: float
    """Most tokens in a step."""
    sequences: float
    """Most sequences for which a step samples a token."""

    @property
    def step(self) -> tuple[float, float]:
        """Return the largest step: its tokens and its sampled sequences."""
        return self.tokens, self.sequences


@dataclass(frozen=True)
class Needs:
    """The demand of one replica: the fields of `Outcome` that do not depend on times."""

    demand: StageDemand
    decode_batch: int
    encode_demand: StageDemand | None = None


@dataclass(frozen=True)
class Outcome:
    """One replica in its steady state."""

    throughput: float
    """Sequences per second."""
    lifetime: Callable[[Array], Lifetime]
    """Lifetimes of queries, as a function of their output lengths."""
    find_first_token: Callable[[], Times]
    """Returns `first_token`; a search at a rate never asks for it."""
    demand: StageDemand
    decode_batch: int
    """Most sequences decoded at once, apart from chance: B_D if the policy has it."""
    residents: Callable[[], float]
    """Sequences between the start of their prefill and their last token, averaged over time."""
    busy: Array
    """[stages]: busy fractions."""
    binding: Binding
    seen: tuple[Times, Times] | None = None
    """Latencies and times per token after the first, if every request is known; without the front end's time."""
    kinds: tuple[Array, Array] | None = None
    """Output lengths for percentiles, and their shares; None: the load's."""
    preemptions: float = 0.0
    """Preemptions per request."""
    encode_demand: StageDemand | None = None
    """Demand of stages that only prefill."""
    best_below: float = 0.0
    """No smaller batch gives a higher throughput than this, where that may exceed `throughput`."""
    no_better_above: bool = False
    """Whether larger batches give no higher throughput."""

    @functools.cached_property
    def first_token(self) -> Times:
        """The time to first token by kinds of prompts, without the front end's time."""
        return self.find_first_token()


def _kinds_of(scenario: Scenario, outcome: Outcome) -> tuple[Array, Array, Array]:
    """Return output lengths in tokens and in iterations, and their shares; with speculation, iterations vary."""
    (lengths, p), load = outcome.kinds or scenario.load.outputs, scenario.load
    if load.speculation is None:
        return lengths, lengths, p
    if not scenario.variation:
        return lengths, load.steps_of(lengths), p
    count = min(_MOST_POINTS, max(_FEWEST_POINTS, _POINTS // len(lengths)))
    return np.tile(lengths, count), load.step_points(lengths, count).ravel(), np.tile(p / count, count)


_FEWEST_POINTS, _MOST_POINTS, _POINTS = 3, 64, 400
"""Points of the iterations that give an output length: the fewest, the most, and for all lengths together."""


def memory(scenario: Scenario, outcome: Outcome) -> tuple[tuple[StageMemory, int], ...]:
    """Return every stage's memory and the blocks that it must hold."""
    encoding = outcome.encode_demand
    stages = scenario.replica.memory(outcome.demand.step, encoding.step if encoding else None)
    blocks = [
        encoding.blocks if encoding and stage.phase == "encode" else outcome.demand.blocks
        for stage in scenario.replica.stages
    ]
    return tuple(zip(stages, blocks, strict=True))


def memory_share(scenario: Scenario, outcome: Outcome | Needs) -> float:
    """Return the largest share of the usable memory that any device uses."""
    demand, encoding = outcome.demand, outcome.encode_demand
    kinds = scenario.replica.memory_kinds(demand.step, encoding.step if encoding else None)
    encode_blocks = {"encode": encoding.blocks} if encoding else {}
    return max(stage.share(encode_blocks.get(phase, demand.blocks)) for phase, stage in kinds)


def latency(scenario: Scenario, outcome: Outcome) -> float:
    """Return the latency that the scenario's bound limits."""
    if not scenario.bound.of_length:
        return latency_times(scenario, outcome).quantile(scenario.bound.share)
    life = outcome.lifetime(scenario.load.steps_of(np.array([float(scenario.load.workload.p99_output)])))
    between = outcome.first_token.between * (1.0 if life.together is None else 1.0 - life.together[0])
    return scenario.front_end_s + float(life.seconds[0] + _sigmas(scenario) * np.hypot(life.deviation[0], between))


def _sigmas(scenario: Scenario) -> float:
    return SIGMAS if scenario.variation else 0.0


def latency_times(scenario: Scenario, outcome: Outcome) -> Times:
    """Return the latencies of all requests."""
    if outcome.seen:
        return outcome.seen[0].later(scenario.front_end_s)
    _, steps, p = _kinds_of(scenario, outcome)
    life = outcome.lifetime(steps)
    if not scenario.variation:
        return Times(scenario.front_end_s + life.seconds, np.zeros(len(p)), p)
    first, deviation = outcome.first_token.merged(_KINDS), life.deviation + life.decoding
    columns = scenario.front_end_s + life.seconds, deviation, p
    if life.together is None:
        return first.beside(*columns)
    together = life.together > 0
    left = np.hypot(deviation, (1.0 - life.together) * first.between)  # the remaining differences are nearly normal
    if together.all():
        return Times(columns[0], left, p)
    last_together = Times(columns[0][together], left[together], p[together])
    return last_together.joined(first.beside(*(column[~together] for column in columns)))


_KINDS = 12
"""Kinds of times to first token to distinguish in latencies."""


def ttft(scenario: Scenario, outcome: Outcome, share: float) -> float:
    """Return the time to first token that the share `share` of the requests doesn't exceed."""
    first = outcome.first_token
    return scenario.front_end_s + (first.quantile(share) if scenario.variation else first.mean)


def per_token(scenario: Scenario, outcome: Outcome) -> Times | None:
    """Return the time per token after the first, of all requests with more than one token; None if there are none."""
    lengths, steps, p = _kinds_of(scenario, outcome)
    many = lengths > 1
    if not many.any():
        return None
    if outcome.seen:
        return outcome.seen[1]
    lengths, p = lengths[many], p[many] / p[many].sum()
    life = outcome.lifetime(steps[many])
    gaps = lengths - 1
    seconds = life.seconds - outcome.first_token.mean
    if not scenario.variation:
        return Times(seconds / gaps, np.zeros(len(p)), p)
    if life.together is not None and life.together.any() and len(outcome.first_token.p) > 1:
        return _ending_together(seconds, life, outcome.first_token.merged(_KINDS), gaps, p)
    if life.interruptions is None or not life.interruptions.few.any():
        return Times(seconds / gaps, life.deviation_after / gaps, p)
    return _interrupted(seconds, life, gaps, p)


def _ending_together(seconds: Array, life: Lifetime, first: Times, gaps: Array, p: Array) -> Times:
    """Return the time per token of sequences that end together.

    The earlier a sequence's first token is, the longer is the time to its last one.
    """
    assert life.together is not None
    means = seconds[:, None] + life.together[:, None] * (first.mean - first.seconds)
    deviations = np.repeat(life.deviation_after / gaps, len(first.p))
    return Times((means / gaps[:, None]).ravel(), deviations, (p[:, None] * first.p).ravel())


def _interrupted(seconds: Array, life: Lifetime, gaps: Array, p: Array) -> Times:
    """Return the time per token of sequences; few interruptions give one kind for each number of them."""
    found = life.interruptions
    assert found is not None
    few = found.few
    count = found.count[few, None]
    share = np.exp(-count) * count**_EACH / _FACTORIALS
    share[:, -1] += 1.0 - share.sum(axis=1)
    rest = np.maximum(life.deviation_after[few] ** 2 - found.variance[few], 0.0)
    means = seconds[few, None] + (_EACH - count) * found.seconds
    deviations = np.sqrt(rest[:, None] + _EACH * found.deviation**2)
    kept = share > 1e-6
    return Times(
        np.concatenate([(means / gaps[few, None])[kept], (seconds / gaps)[~few]]),
        np.concatenate([(deviations / gaps[few, None])[kept], (life.deviation_after / gaps)[~few]]),
        np.concatenate([(p[few, None] * share)[kept], p[~few]]),
    )


def estimate_of(scenario: Scenario, outcome: Outcome) -> Estimate:
    """Return the complete Estimate, summed over replicas."""
    held = memory(scenario, outcome)
    violations = tuple(
        f"memory: {blocks:,} KV blocks are needed, but only {max(stage.blocks, 0):,} fit besides the weights"
        for stage, blocks in dict.fromkeys(held)
        if stage.blocks < blocks
    )
    bounded, share = latency(scenario, outcome), scenario.bound.share
    times, tpot = latency_times(scenario, outcome), per_token(scenario, outcome)
    ranks = [i for i, stage in enumerate(scenario.replica.stages) for _ in stage.devices] * scenario.replicas
    idle = (0.0,) * (scenario.replica.cost_model.cluster.devices - len(ranks))
    throughput = outcome.throughput * scenario.replicas
    return Estimate(
        throughput_seq_s=throughput,
        throughput_tok_s=throughput * scenario.load.workload.output.mean,
        latency_s=bounded,
        latency_mean_s=times.mean,
        latency_p50_s=times.quantile(0.5),
        latency_p99_s=times.quantile(0.99),
        ttft_s=scenario.front_end_s + outcome.first_token.mean,
        ttft_p99_s=ttft(scenario, outcome, 0.99),
        ttft_bounded_s=ttft(scenario, outcome, share),
        tpot_s=tpot.mean if tpot else None,
        tpot_p99_s=tpot.quantile(0.99) if tpot else None,
        tpot_bounded_s=tpot.quantile(share) if tpot else None,
        residents=outcome.residents() * scenario.replicas,
        memory_bytes=tuple(held[i][0].bytes(held[i][1]) for i in ranks) + idle,
        usable_bytes=held[0][0].usable,
        kv_blocks=outcome.demand.blocks,
        kv_tokens=outcome.demand.blocks * BLOCK_SIZE,
        utilisation=tuple(float(min(1.0, outcome.busy[i])) for i in ranks) + idle,
        binding=outcome.binding if scenario.load.mean_iterations else "encoding",  # else nothing decodes
        preemptions_per_request=outcome.preemptions,
        feasible=not violations,
        violations=violations,
        engine=engine_of(scenario.replica.cost_model.profile).name,
        extrapolated=tuple(sorted(scenario.replica.extrapolated)),
    )
