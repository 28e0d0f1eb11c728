"""The common part of iteration-level policies: a steady state is a mixture of iterations; a query stays for many."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xcore.specs.workload import LengthDistribution
from xsimulator.cost.group import Group, PartSeconds
from xsimulator.steady.occupancy import Occupancy
from xsimulator.steady.outcome import Interruptions, Lifetime, Outcome, StageDemand
from xsimulator.steady.pipeline import iteration_times
from xsimulator.steady.prompts import Prompts
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.times import Times

CELLS, FEWEST, MOST = 1536, 64, 384
"""Micro-batches to follow through a pipeline, and the least and the most iterations for them."""


_KINDS = 24
"""Kinds of prefills and of iterations to distinguish in an encoder-decoder's times to first token."""


@dataclass(frozen=True)
class Mixture:
    """Kinds of iterations, as arrays [kinds]."""

    weight: Array
    """Share of the iterations; sums to 1."""
    prompts: Array
    """Prompts, or chunks, prefilled in an iteration."""
    decoding: Array
    """Sequences decoded in the same iteration."""
    chunk: LengthDistribution
    """Tokens of one prefilled prompt, or chunk."""
    prefill_iterations: float
    """Iterations that the prefill of one prompt takes."""
    most_tokens: float = math.inf
    """Most prompt tokens that an iteration takes; the rest waits for the next."""


@dataclass(frozen=True)
class Rounds:
    """Iterations in the steady state, in seconds."""

    mean: float
    """Mean time from one token of a sequence to its next."""
    deviation: float
    times: Times
    """Times from one token to the next, of iterations with and without prompts."""
    first: float
    """Time from the start of the iteration that prefills a prompt, or its last chunk, to the first token."""
    first_deviation: float
    busy: Array
    """[stages]: busy fractions."""
    decoding_share: float
    """Share of the time that would be left without prompts."""


@dataclass(frozen=True)
class Stay:
    """A sequence's time in the system."""

    prefill: Times
    """Seconds of its prefill."""
    between: float
    """Mean seconds from one of its tokens to the next."""
    interrupted: Callable[[Array], Interruptions] | None
    """How other prompts lengthen its decoding, as a function of its iterations [n]; None: unknown."""


@dataclass(frozen=True)
class Encoded:
    """The seconds from the start of a prompt's prefill to its end, on one stage."""

    times: Times
    by_length: Times
    """Mean times of prompts by their length alone."""

    @staticmethod
    def of(seconds: Array, deviation: Array, p: Array) -> "Encoded":
        """Build the times from arrays [lengths, ways]: the mean, the deviation and the probability of each.

        A way is a combination of other prompts in the same iterations.
        """
        times = Times(seconds.ravel(), np.ascontiguousarray(deviation).ravel(), np.ascontiguousarray(p).ravel())
        lengths = p.sum(axis=1)
        return Encoded(times, Times((seconds * p).sum(axis=1) / lengths, np.zeros(len(p)), lengths))


@dataclass(frozen=True)
class Own:
    """One of the prompts that an iteration prefills, as arrays of the iterations' shape."""

    tokens: Array
    """Tokens of the prompt in this iteration."""
    length: Array
    """Tokens of the whole prompt."""


def seconds_of(scenario: Scenario, prompts: Array, tokens: Array, decoding: Array, own: Own | None = None) -> Array:
    """Return the seconds of iterations, or of a micro-batch's part in them: the arguments' shape and [stages].

    They prefill `prompts` chunks of `tokens` tokens together, `own` among them, and decode `decoding` sequences.
    """
    context, inputs = scenario.load.resident_context, scenario.load.prompts
    most = float(np.maximum(prompts.max(), 1.0))

    def of(group: Group) -> PartSeconds:
        each = inputs.attention(group, np.array([1.0, most])) / np.array([1.0, most]) / inputs.mean
        attention: Array = tokens * np.interp(prompts, [1.0, most + 1e-9], each)
        if own:
            attention = attention * (1 - own.tokens / tokens)
            attention = attention + own.tokens / own.length * inputs.attention_of(group, 1.0, own.length)
        return group.mixed(tokens, prompts, decoding, context, attention)

    return scenario.replica.decode.each(of)


def one_stage(scenario: Scenario, mixture: Mixture) -> Rounds:
    """Return the steady state of iterations that run one after the other on one stage."""
    totals, p = Prompts(mixture.chunk).tokens(mixture.prompts)
    weight = np.outer(mixture.weight, p).ravel()
    tokens = _within(totals, (mixture.prompts * mixture.chunk.mean)[:, None], mixture.most_tokens).ravel()
    prompts, decoding = np.repeat(mixture.prompts, len(p)), np.repeat(mixture.decoding, len(p))
    seconds = seconds_of(scenario, prompts, tokens, decoding)[:, 0]
    mean = float(weight @ seconds)
    deviation = float(np.sqrt(weight @ (seconds - mean) ** 2))
    encoding = weight * prompts
    first = float(encoding @ seconds / encoding.sum()) if encoding.sum() else mean
    alone = seconds_of(scenario, prompts * 0, tokens * 0, decoding)[:, 0]
    times = Times(seconds, np.zeros(len(seconds)), weight)
    return Rounds(mean, deviation, times, first, deviation, np.ones(1), float(weight @ alone) / mean)


def pipelined(scenario: Scenario, mixture: Mixture, residents: float) -> Rounds:
    """Return the steady state of iterations on a pipeline, by simulating many rounds.

    There are as many micro-batches as stages, or as residents if these are fewer. A prompt is in a single micro-batch,
    which then delays the other micro-batches: the bubbles that the paper describes. Kinds and lengths are drawn evenly
    from their distributions, always in the same order.
    """
    parts = min(len(scenario.replica.stages), max(1, round(residents)))
    count = min(MOST, max(FEWEST, CELLS // parts))
    u, v, w = _draws(count, parts)
    kind = np.minimum(np.searchsorted(np.cumsum(mixture.weight), u), len(mixture.weight) - 1)
    each, extra = np.divmod(mixture.prompts[kind] / parts, 1.0)
    turn = (w[:, None] + np.arange(parts) / parts) % 1.0
    prompts = each[:, None] + (turn < extra[:, None])
    tokens = _drawn(prompts, mixture.chunk, v.reshape(prompts.shape))
    totals, mean = tokens.sum(axis=1), mixture.prompts[kind] * mixture.chunk.mean
    tokens = tokens * (_within(totals, mean, mixture.most_tokens) / np.maximum(totals, 1.0))[:, None]
    decoding = np.broadcast_to(mixture.decoding[kind, None] / parts, prompts.shape)
    cells = seconds_of(scenario, prompts, tokens, decoding)
    hop = scenario.replica.decode.hops(float(tokens.mean() + scenario.replica.decode.rows * decoding.mean()))
    begin, end = iteration_times(cells, hop)
    settled = slice(count // 8, None)
    out = end[:, :, -1]
    between = np.diff(out, axis=0)[settled]
    # A step begins as the first stage is free; a single sequence leaves it free until its token comes out of the last.
    start = end[:-1, -1:, 0] if parts > 1 else begin[1:, :, 0]
    first = (out[1:] - start)[settled][prompts[1:][settled] > 0]
    first_s, deviation = (first.mean(), first.std()) if first.size else _lone_prompt(scenario, mixture, parts)
    span = float(between.mean())
    nothing = np.zeros(len(mixture.decoding))
    alone = mixture.weight @ seconds_of(scenario, nothing, nothing, mixture.decoding / parts)
    return Rounds(
        mean=span,
        deviation=float(between.std()),
        times=Times.seen(between),
        first=float(first_s),
        first_deviation=float(deviation),
        busy=(end - begin).sum(axis=1)[settled].mean(axis=0) / span,
        decoding_share=float(alone.sum() / cells.mean(axis=(0, 1)).sum()),
    )


def _lone_prompt(scenario: Scenario, mixture: Mixture, parts: int) -> tuple[float, float]:
    """Return the mean and the deviation of the seconds in which a prompt, or its last chunk, passes all stages alone.

    Few of the simulated rounds have a prompt, or none, if sequences are long and few.
    """
    tokens, p = Prompts(mixture.chunk).tokens(1.0)
    decoding = np.full(tokens.shape, float(mixture.weight @ mixture.decoding) / parts)
    side = scenario.replica.decode
    hops = side.hops_together(float(tokens @ p) + side.rows * float(decoding[0]))
    seconds = seconds_of(scenario, np.ones(tokens.shape), tokens, decoding).sum(axis=-1) + hops
    mean = float(seconds @ p)
    return mean, float(np.sqrt((seconds - mean) ** 2 @ p))


@functools.cache
def _draws(count: int, parts: int) -> tuple[Array, Array, Array]:
    """Return even draws from (0, 1) in a random order, always the same.

    Returns:
        One per iteration [count], one per micro-batch [count * parts], and one more per iteration [count].
    """
    rng = np.random.default_rng(0)
    u, v = ((rng.permutation(n) + 0.5) / n for n in (count, count * parts))
    return u, v, rng.random(count)


def _within(totals: Array, mean: Array, most: float) -> Array:
    """Move the tokens of iterations towards their mean until none exceeds `most`.

    A prompt that is too long for one iteration waits for the next. If the mean itself is `most`, all iterations become
    equal.
    """
    excess = float((totals - mean).max())
    if excess <= 0 or not math.isfinite(most):
        return totals
    return mean + min(1.0, max(0.0, most - float(mean.max())) / excess) * (totals - mean)


def _drawn(prompts: Array, chunk: LengthDistribution, u: Array) -> Array:
    """Return the tokens of `prompts` chunks together, at the quantiles `u` of their distribution."""
    index = np.minimum(np.searchsorted(np.cumsum(chunk.p), u), len(chunk.s) - 1)
    tokens: Array = prompts * chunk.mean + np.sqrt(prompts) * (chunk.s[index] - chunk.mean)
    return tokens


def _parts(scenario: Scenario, mixture: Mixture, rounds: Rounds, first: float, residents: float) -> tuple[float, float]:
    """Return the seconds of a sequence's prefill, about `first`, and from one of its tokens to its next.

    Iterations with a prefill are longer, and a sequence doesn't decode in the iterations of its own prefill. The mean
    over a whole stay is `rounds.mean`. Its decode steps are therefore shorter by the excess of its own prefill over
    this mean, but not shorter than iterations without prompts. With few decode iterations, this difference says little
    about one of them. A decode step then has the duration with other sequences' prompts, and the prefill has the
    remaining time.
    """
    need, iterations = scenario.load.mean_iterations, mixture.prefill_iterations
    stay = (iterations + need) * rounds.mean
    if not need:
        return stay, rounds.mean
    one = len(scenario.replica.stages) == 1
    shortest = _idle(scenario, mixture) if one else 0.0
    rest = stay - min(first, max(stay - need * shortest, iterations * shortest))
    beside = shortest + (rounds.mean - shortest) * (1.0 - 1.0 / max(residents, 1.0)) if one else rounds.mean
    between = (rest + iterations * beside) / (need + iterations)
    return stay - need * between, between


def _idle(scenario: Scenario, mixture: Mixture) -> float:
    """Return the seconds of an iteration without prompts."""
    decoding = np.array([float(mixture.decoding[0])])
    return float(seconds_of(scenario, np.zeros(1), np.zeros(1), decoding)[0, 0])


def _interrupted(
    scenario: Scenario, mixture: Mixture, rounds: Rounds, by_length: Times, others: float
) -> Callable[[Array], Interruptions]:
    """Return how other prompts lengthen a sequence's decoding, as a function of its iterations [n].

    `others` prompts arrive per iteration. An iteration takes a limited number of prompt tokens. If prompts fill nearly
    all iterations, these hardly differ.
    """
    idle = _idle(scenario, mixture)
    longer = max(0.0, by_length.mean - mixture.prefill_iterations * idle)
    deviation, square = by_length.between, rounds.mean - idle
    full = longer / max(mixture.prefill_iterations, 1.0)

    def of(need: Array) -> Interruptions:
        count = need * others
        most = need**2 * max(0.0, square * (full - square))
        variance = count * (longer**2 + deviation**2)
        scale = np.minimum(1.0, most / np.maximum(variance, 1e-300))
        return Interruptions(count, longer, deviation, scale)

    return of


def from_iterations(
    scenario: Scenario,
    mixture: Mixture,
    rate: float,
    max_num_seqs: int,
    occupancy: Occupancy,
    most_tokens: float,
    encoded: Callable[[], Encoded],
) -> Outcome:
    """Return the steady state in which `rate` queries enter an iteration of at most `most_tokens` tokens."""
    one = len(scenario.replica.stages) == 1
    rounds = one_stage(scenario, mixture) if one else pipelined(scenario, mixture, occupancy.residents)
    others = rate * occupancy.prefills * max(0.0, 1.0 - 1.0 / max(occupancy.residents, 1.0))
    wait_s = occupancy.wait_iterations * rounds.mean
    shift = 1.0 if scenario.load.first_by_encoding else 0.0

    @functools.cache
    def stay() -> Stay:
        first = (mixture.prefill_iterations - 1) * rounds.mean + rounds.first
        found = encoded() if one else None
        times = found.times if found else Times.normal(first, rounds.first_deviation)
        encode_s, between = _parts(scenario, mixture, rounds, times.mean, occupancy.residents)
        longer = encode_s - times.mean
        times = times.later(longer) if longer > 0 else times.scaled(encode_s / times.mean)
        interrupted = _interrupted(scenario, mixture, rounds, found.by_length, others) if found else None
        return Stay(times, between, interrupted)

    def lifetime(lengths: Array) -> Lifetime:
        times, between, interrupted = stay().prefill, stay().between, stay().interrupted
        need = np.maximum(lengths - shift, 0.0)
        preempted = np.minimum(need, 1.0) * occupancy.preemptions  # Poisson, each for an exponential time
        seconds = times.mean + need * between + preempted * wait_s
        later = need if shift else np.maximum(need - 1.0, 0.0)  # after the first token, whose times vary themselves
        interruptions = interrupted(later) if interrupted else None
        variance = interruptions.variance if interruptions else rounds.deviation**2 * later
        after = np.sqrt(variance + 2 * preempted * wait_s**2)
        return Lifetime(seconds, np.hypot(after, times.within), after, interruptions)

    def first_token() -> Times:
        if shift:
            return stay().prefill
        # An encoder-decoder's comes from its first decoding iteration.
        followed = stay().prefill.merged(_KINDS)
        after = followed.seconds + stay().between
        return rounds.times.merged(_KINDS).beside(after, followed.deviation, followed.p)

    return Outcome(
        throughput=rate / rounds.mean,
        lifetime=lifetime,
        find_first_token=first_token,
        demand=StageDemand(occupancy.blocks, most_tokens, max_num_seqs),
        decode_batch=max_num_seqs,
        residents=lambda: rate * (mixture.prefill_iterations + scenario.load.mean_iterations),
        busy=rounds.busy,
        binding="decoding" if rounds.decoding_share > 0.5 else "encoding",
        preemptions=occupancy.preemptions,
    )
