"""Iteration-level scheduling of requests that begin together and whose outputs have one length, or are short: they stay
in step, so that many of them, followed prompt by prompt, are the steady state.

Who is encoded in one iteration also ends in one, and is followed by prompts that begin together again. Outputs that
vary would scatter them over all iterations, which is what the other formulas count with. But short ones are hardly
scattered, and a micro-batch without any decoding sequence waits for no token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xcore.specs.workload import LengthDistribution
from xsimulator.cost.group import Group, PartSeconds
from xsimulator.cost.recurrences import repeated, slots
from xsimulator.steady.occupancy import Occupancy
from xsimulator.steady.outcome import Demand, Lifetime, Outcome
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.times import Times

Array = NDArray[np.float64]

_BEFORE, _BEFORE_VARIED = (6, 48, 2000), (6, 480, 8000)
"""The fewest and the most rounds, in each of which every slot is taken once, that let the slots fall in step; and
between these so many that there are so many prompts. Inputs that vary draw them apart slowly."""
_PROMPTS, _PARTS = 256, 2048
"""Prompts that are looked at afterwards, if that is more than a round, and has no more than so many parts."""
_EARLIER, _EARLIER_ALONE = 32, 640
"""Prompts before them that a pipeline is filled with, and where few sequences decode: then they pile up before a slow
stage, a little in every round."""
_MOST = 60_000
"""Parts of prompts that are followed at most."""
_CYCLE = 509
"""Prompts that have all lengths evenly and then come again: a prime number, so that no slot sees few of them."""
_SHORT = 64
"""Output tokens, of the longest, up to which those that vary are followed too."""
_DEEPEST = 8
"""Stages of the deepest pipelines that requests are followed through: the work grows with their square."""
_ITERATION_LESS = 0.55
"""The share of a TTFT of two iterations that one less takes off, the longer one at most."""


@dataclass(frozen=True)
class Turns:
    """Prompts in the order in which they come, and the iterations that encode any of them; arrays."""

    residents: int
    kept: slice
    """The prompts that are looked at; some before them, and a round after them, are known too."""
    starts: Array
    """[prompts]: the first iteration of each."""
    ends: Array
    """[prompts]: the last one."""
    iterations: Array
    """[n]: numbers of the iterations with prompts, or with idle slots, rising."""
    at: Array
    """[parts]: the iteration of each part, rising."""
    prompt: NDArray[np.intp]
    """[parts]"""
    froms: Array
    """[parts]: where in its prompt each begins, in tokens."""
    untils: Array
    """[parts]: and ends."""
    lengths: Array
    """[prompts]: tokens."""
    stays: Array
    """[prompts]: iterations in which their sequences decode."""


@dataclass(frozen=True)
class Moments:
    """When things happen to the prompts that are looked at; arrays [prompts] in seconds."""

    begin: Array
    encoded: Array
    first: Array
    finish: Array
    seconds: float
    """That so many prompts take: from one in a slot to the one that many later, averaged over a round."""
    busy: Array
    """[stages]: busy fractions."""


def in_step(scenario: Scenario) -> bool:
    """Whether all requests have the same number of output tokens, or few, and they are followed."""
    outputs = scenario.load.workload.output
    return len(scenario.replica.stages) <= _DEEPEST and (len(outputs.s) == 1 or outputs.max <= _SHORT)


def ttft_slack(scenario: Scenario) -> float:
    """Return the share by which TTFT may fall where there are more residents."""
    return _ITERATION_LESS if in_step(scenario) else 0.0


def turns(scenario: Scenario, residents: int, budget: float, whole: bool, idle: int = 0) -> Turns | None:
    """Follow prompts with `slots`; None where that would be too long.

    `budget` is in prompts where these are encoded `whole`, else in tokens, of which a sequence that decodes takes one.
    """
    load, share = scenario.load, 0.0 if whole else 1.0
    inputs, outputs = load.workload.input, load.workload.output
    each = 1.0 if whole else 1.0 + inputs.mean // max(budget - share * residents, 1.0)
    before, earlier, count = _counts(scenario, residents, each + 1.0 + idle)
    total = before + count + residents
    most = int(total * (each + 1.0 + idle))
    if most > _MOST:
        return None
    lengths, stays = _lengths(inputs, total, 0), _lengths(outputs, total, 1) - (1.0 if load.first_by_encoding else 0.0)
    starts, ends = np.empty((2, total))
    iterations, at, prompt, froms, untils = np.empty((5, most))
    written = (starts, ends, iterations, at, prompt, froms, untils)
    followed = np.ones(total) if whole else lengths
    n, parts = slots(followed, stays, *written, budget, share, idle, residents)
    if not n:
        return None
    row = int(np.searchsorted(iterations[:n], starts[before - earlier])) - 1
    rows, kept = slice(row, n), slice(int(np.searchsorted(at[:parts], iterations[row])), parts)
    places = prompt[kept].astype(np.intp)
    unit = lengths[places] if whole else 1.0
    parts_of = (at[kept], places, froms[kept] * unit, untils[kept] * unit)
    return Turns(residents, slice(before, before + count), starts, ends, iterations[rows], *parts_of, lengths, stays)


def _counts(scenario: Scenario, residents: int, parts: float) -> tuple[int, int, int]:
    """How many prompts, of so many parts each, go before those that are looked at; with how many of these a pipeline is
    filled; and how many are looked at.
    """
    load = scenario.load
    varied = max(len(load.workload.input.s), len(load.workload.output.s)) > 1
    few = load.mean_iterations < 1.0
    fewest, most, enough = _BEFORE_VARIED if varied else _BEFORE
    enough = min(enough, int(_MOST / 2 / parts))
    before = residents * min(max(enough // residents, fewest), enough if few else most)
    earlier = min(_EARLIER_ALONE if few else _EARLIER, before - residents)
    count = max(residents, min(_PROMPTS, int(_PARTS / parts)))
    return before, earlier, -(-count // _CYCLE) * _CYCLE if varied else count


def _lengths(distribution: LengthDistribution, count: int, seed: int) -> Array:
    """[count]: lengths drawn from a distribution, evenly in every cycle, always the same."""
    quantiles = (np.random.default_rng(seed).permutation(_CYCLE) + 0.5) / _CYCLE
    index = np.searchsorted(np.cumsum(distribution.p), quantiles)
    return np.resize(distribution.s[np.minimum(index, len(distribution.s) - 1)].astype(np.float64), count)


def outcome(scenario: Scenario, turns: Turns, occupancy: Occupancy, most_tokens: float) -> Outcome:
    """Return the steady state of these turns, in iterations of at most so many tokens."""
    load, residents = scenario.load, turns.residents
    shift = 1.0 if load.first_by_encoding else 0.0
    moments = _moments(scenario, turns)
    need = turns.stays[turns.kept]
    begin, encoded, finish = moments.begin, moments.encoded, moments.finish
    after, latency, taken = finish - encoded, finish - begin, moments.first - begin
    rate, between = len(begin) / moments.seconds, float(after.mean() / need.mean()) if need.any() else 0.0

    def lifetime(lengths: Array) -> Lifetime:
        more = np.maximum(lengths - shift, 0.0)
        means = float((encoded - begin).mean()) + more * between
        return Lifetime(means, np.full_like(more, latency.std()), np.full_like(more, after.std()))

    times, gaps = Times.seen(taken), need + shift - 1.0
    many = gaps > 0
    tokens = (finish - moments.first)[many] / gaps[many] if many.any() else np.zeros(1)
    return Outcome(
        throughput=rate,
        lifetime=lifetime,
        first_token=Times.normal(times.mean) if not scenario.variation else times,
        demand=Demand(occupancy.blocks, most_tokens, residents),
        decode_batch=residents,
        residents=lambda: rate * float(latency.mean()),
        busy=moments.busy,
        seen=(Times.seen(latency), Times.seen(tokens)),
        binding="decoding" if _decoding_alone(scenario, turns) > 0.5 * moments.seconds else "encoding",
    )


def _decoding_alone(scenario: Scenario, turns: Turns) -> float:
    """Seconds that the iterations of the turns would take without prompts."""
    if not turns.stays.any():
        return 0.0
    stages = len(scenario.replica.stages)
    parts = min(stages, turns.residents)
    batch, side = turns.residents / parts, scenario.replica.decode
    seconds = side.decode(np.array([batch]), scenario.load.resident_context)[0]
    longest = max(parts * float(seconds.max()), float(seconds.sum()) + (side.hops_together(batch) if stages > 1 else 0))
    return longest * float(_round_mean(turns.starts, turns))


def _round_mean(of: Array, turns: Turns) -> float:
    """By how much something [prompts] grows over the prompts that are looked at, averaged over the slots."""
    kept, n = turns.kept, turns.residents
    return float((of[kept.stop : kept.stop + n] - of[kept.start : kept.start + n]).mean())


def _moments(scenario: Scenario, turns: Turns) -> Moments:
    """Follow the iterations of the turns through the stages, one micro-batch for each of these."""
    side, parts = scenario.replica.decode, len(scenario.replica.stages)
    finishes = turns.ends + turns.stays
    numbers = _changes(turns, finishes)
    decoding = np.stack([_decoding(turns, finishes, numbers, m, parts) for m in range(parts)], axis=1)
    tokens, completed, seconds = _cells(scenario, turns, numbers, decoding)
    sampled = decoding if scenario.load.encoder_decoder else decoding + completed
    repeats = np.append(np.diff(numbers), 1.0)
    waits = np.where(decoding > 0, 1.0, np.where(tokens > 0, 0.0, -1.0))
    firsts, lasts = np.empty((2, *waits.shape))
    free = np.empty(len(numbers))
    gives = (sampled.sum(axis=1) > 0).astype(np.float64)
    repeated(seconds, side.hops_of(tokens + decoding), repeats, waits, gives, firsts, lasts, free)
    prompts = np.arange(turns.kept.start, turns.kept.stop + turns.residents)
    starts, ends, group = turns.starts[prompts], turns.ends[prompts], prompts % parts
    begins = free[np.searchsorted(numbers, starts) - 1]
    count, encoding = turns.kept.stop - turns.kept.start, np.searchsorted(numbers, ends)
    took = float((begins[count:] - begins[: turns.residents]).mean())
    encoded = firsts[encoding, group]
    first = encoded if scenario.load.first_by_encoding else firsts[encoding + 1, group]
    finish = lasts[np.searchsorted(numbers, finishes[prompts], side="right") - 1, group]
    rows = slice(*np.searchsorted(numbers, starts[[0, count]]))
    worked = repeats[rows] @ seconds[rows].sum(axis=1)
    busy = np.minimum(worked / (begins[count] - begins[0]), 1.0)
    return Moments(begins[:count], encoded[:count], first[:count], finish[:count], took, busy)


def _changes(turns: Turns, finishes: Array) -> Array:
    """Numbers of iterations after which all are the same until the next of these numbers."""
    begin, end = turns.iterations[0], turns.starts[-1]
    ended = finishes[(finishes >= begin) & (finishes < end)] if np.ptp(turns.stays) else finishes[:0]
    return np.unique(np.concatenate([turns.iterations, turns.iterations + 1.0, ended + 1.0]))


def _decoding(turns: Turns, finishes: Array, numbers: Array, micro_batch: int, parts: int) -> Array:
    """Sequences of a micro-batch that decode in iterations of these numbers."""
    ends, last = turns.ends[micro_batch::parts], finishes[micro_batch::parts]
    if np.ptp(turns.stays):
        last = np.sort(last)
    return np.asarray(np.searchsorted(ends, numbers) - np.searchsorted(last, numbers), dtype=np.float64)


def _cells(scenario: Scenario, turns: Turns, numbers: Array, decoding: Array) -> tuple[Array, Array, Array]:
    """Prompt tokens of the iterations of these numbers [n, micro-batches], prompts that end in them, and their seconds
    [..., stages].
    """
    shape, count = decoding.shape, decoding.size
    cell = np.searchsorted(numbers, turns.at) * shape[1] + turns.prompt % shape[1]
    sizes, past = turns.untils - turns.froms, turns.froms
    fresh, ends = past == 0, turns.untils >= turns.lengths[turns.prompt]
    beside = np.bincount(cell[fresh], minlength=count).astype(np.float64)
    tokens = np.bincount(cell, sizes, count)
    chunks, completed = (np.bincount(c, None, count).astype(np.float64) for c in (cell, cell[ends]))
    flat = decoding.ravel()

    def of(group: Group) -> PartSeconds:
        together = beside[cell[fresh]]
        attention = np.bincount(cell[fresh], group.prompt_attention(together, sizes[fresh]) / together, count)
        if not fresh.all():
            attention += np.bincount(cell[~fresh], group.chunk_attention(sizes[~fresh], past[~fresh]), count)
        return group.mixed(tokens, chunks, flat, scenario.load.resident_context, attention, completed)

    seconds = scenario.replica.decode.each(of)
    seconds[(tokens == 0) & (flat == 0)] = 0.0
    return np.reshape(tokens, shape), np.reshape(completed, shape), seconds.reshape(*shape, -1)
