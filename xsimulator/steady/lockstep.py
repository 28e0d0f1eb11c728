"""Closed form of iteration-level scheduling for requests that stay in step.

Requests that begin together and have equal or short outputs also end together, so later requests begin together too.
This module follows some hundred of them, prompt by prompt. Outputs of many lengths spread over all iterations; the
other formulas assume that. Short outputs hardly spread. A micro-batch without decoding sequences waits for no token.
"""

import functools
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array, Places
from xcore.specs.copula import at_ranks
from xsimulator.cost.group import Group, PartSeconds
from xsimulator.cost.recurrences import repeated, slots
from xsimulator.steady.decode_steps import SHORT_OUTPUT
from xsimulator.steady.load import Load
from xsimulator.steady.occupancy import Occupancy
from xsimulator.steady.outcome import Lifetime, Outcome, StageDemand
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.times import Times

_BEFORE, _BEFORE_VARIED = (6, 48, 2000), (6, 480, 8000)
"""Warm-up: the fewest rounds, the most rounds, and the prompts that suffice. A round fills each slot once. Inputs of
several lengths leave the step slowly, so they need more rounds.
"""
_PROMPTS, _PARTS = 256, 2048
"""Prompts to measure after the warm-up (at least one round), and the most chunks of these."""
_EARLIER, _EARLIER_ALONE = 32, 640
"""Prompts that fill a pipeline before the measured ones. Where few sequences decode, prompts pile up before a slow
stage, a little in every round, so they need more.
"""
_MOST = 60_000
"""Most chunks to follow."""
_CYCLE = 509
"""Prompts per cycle of lengths. Each cycle has all lengths evenly. A prime number: no slot sees few of the lengths."""
_SHORT = 64
"""Longest output, in iterations, up to which varied outputs are followed."""
_DEEPEST = 8
"""Most stages to follow requests through: the work grows with their square."""
_ITERATION_LESS = 0.55
"""Largest share of a two-iteration TTFT that one iteration less removes: that of the longer iteration."""


@dataclass(frozen=True)
class Turns:
    """Prompts in order of arrival, and the iterations that prefill them; arrays."""

    residents: int
    kept: "slice[int, int, None]"
    """The measured prompts. Some earlier ones, and the next round, are known too."""
    starts: Array
    """[prompts]: the first iteration of each."""
    ends: Array
    """[prompts]: the last iteration of each."""
    iterations: Array
    """[n]: rising numbers of the iterations with prompts or idle slots."""
    at: Array
    """[chunks]: the iteration of each chunk, rising."""
    prompt: Places
    """[chunks]: the prompt of each chunk."""
    froms: Array
    """[chunks]: first token of each chunk in its prompt."""
    untils: Array
    """[chunks]: end of each chunk in its prompt."""
    lengths: Array
    """[prompts]: tokens."""
    stays: Array
    """[prompts]: decoding iterations."""
    tokens: Array
    """[prompts]: tokens of the output."""


@dataclass(frozen=True)
class Moments:
    """Event times of the measured prompts; arrays [prompts] in seconds."""

    begin: Array
    encoded: Array
    first: Array
    finish: Array
    seconds: float
    """Seconds per this number of prompts: between a prompt in a slot and that many prompts later, averaged over a
    round.
    """
    busy: Array
    """[stages]: busy fractions."""


def in_step(scenario: Scenario) -> bool:
    """Return whether this method applies: outputs of one length, or short ones, and a pipeline of few stages."""
    load, outputs = scenario.load, scenario.load.workload.output
    one = load.speculation is None and len(outputs.s) == 1
    short = load.steps.max <= _SHORT and outputs.max <= SHORT_OUTPUT
    return len(scenario.replica.stages) <= _DEEPEST and (one or short)


def ttft_slack(scenario: Scenario) -> float:
    """Return the share by which TTFT may fall with more residents."""
    return _ITERATION_LESS if in_step(scenario) else 0.0


def turns(scenario: Scenario, residents: int, budget: float, whole: bool, idle: int = 0) -> Turns | None:
    """Return the turns of prompts, computed by `slots` in C; None if they have too many chunks.

    `budget` counts prompts if these are prefilled `whole`. Else it counts tokens, those of decoding sequences too.
    """
    load, share = scenario.load, 0.0 if whole else float(scenario.replica.decode.rows)
    inputs = load.workload.input
    each = 1.0 if whole else 1.0 + inputs.mean // max(budget - share * residents, 1.0)
    before, earlier, count = _counts(scenario, residents, each + 1.0 + idle)
    total = before + count + residents
    most = int(total * (each + 1.0 + idle))
    if most > _MOST:
        return None
    shift = 1.0 if load.first_by_encoding else 0.0
    lengths, stays = _lengths(load, total)
    stays = stays - shift
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
    tokens = load.tokens_of(stays + shift)
    measured = slice(before, before + count)
    return Turns(residents, measured, starts, ends, iterations[rows], *parts_of, lengths, stays, tokens)


def _counts(scenario: Scenario, residents: int, parts: float) -> tuple[int, int, int]:
    """Return the numbers of prompts for the warm-up, for filling a pipeline within it, and for the measurement."""
    load = scenario.load
    varied = max(len(load.workload.input.s), len(load.steps.s)) > 1
    few = load.mean_iterations < 1.0
    fewest, most, enough = _BEFORE_VARIED if varied else _BEFORE
    enough = min(enough, int(_MOST / 2 / parts))
    before = residents * min(max(enough // residents, fewest), enough if few else most)
    earlier = min(_EARLIER_ALONE if few else _EARLIER, before - residents)
    count = max(residents, min(_PROMPTS, int(_PARTS / parts)))
    return before, earlier, -(-count // _CYCLE) * _CYCLE if varied else count


def _lengths(load: Load, count: int) -> tuple[Array, Array]:
    """Draw the inputs and outputs of `count` requests evenly in every cycle, always the same ones."""
    inputs, outputs = _cycle(load)
    return np.resize(inputs, count), np.resize(outputs, count)


@functools.lru_cache(maxsize=4)
def _cycle(load: Load) -> tuple[Array, Array]:
    """Return the inputs and outputs of a cycle; many evaluations of a search share a load."""
    workload = load.counted
    inputs, outputs = (np.random.default_rng(seed).permutation(_CYCLE) for seed in (0, 1))
    if workload.copula:
        drawn = workload.copula.output_ranks((inputs + 0.5) / _CYCLE, np.random.default_rng(1))
        outputs = np.argsort(np.argsort(drawn))  # each rank once
    of_input, of_output = ((ranks + 0.5) / _CYCLE for ranks in (inputs, outputs))
    return at_ranks(workload.input, of_input), at_ranks(workload.output, of_output)


def outcome(scenario: Scenario, turns: Turns, occupancy: Occupancy, most_tokens: float) -> Outcome:
    """Return the steady state of these turns; an iteration has at most `most_tokens` tokens."""
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

    times, gaps = Times.seen(taken), turns.tokens[turns.kept] - 1.0
    many = gaps > 0
    tokens = (finish - moments.first)[many] / gaps[many] if many.any() else np.zeros(1)
    return Outcome(
        throughput=rate,
        lifetime=lifetime,
        find_first_token=lambda: Times.normal(times.mean) if not scenario.variation else times,
        demand=StageDemand(occupancy.blocks, most_tokens, residents),
        decode_batch=residents,
        residents=lambda: rate * float(latency.mean()),
        busy=moments.busy,
        seen=(Times.seen(latency), Times.seen(tokens)),
        binding="decoding" if _decoding_alone(scenario, turns) > 0.5 * moments.seconds else "encoding",
    )


def _decoding_alone(scenario: Scenario, turns: Turns) -> float:
    """Return the seconds of the measured iterations as they would be without prompts."""
    if not turns.stays.any():
        return 0.0
    stages = len(scenario.replica.stages)
    parts = min(stages, turns.residents)
    batch, side = turns.residents / parts, scenario.replica.decode
    seconds = side.decode(np.array([batch]), scenario.load.resident_context)[0]
    longest = max(
        parts * float(seconds.max()),
        float(seconds.sum()) + (side.hops_together(side.rows * batch) if stages > 1 else 0),
    )
    return longest * float(_round_mean(turns.starts, turns))


def _round_mean(of: Array, turns: Turns) -> float:
    """Return the growth of `of` [prompts] over the measured prompts, averaged over the slots."""
    kept, n = turns.kept, turns.residents
    return float((of[kept.stop : kept.stop + n] - of[kept.start : kept.start + n]).mean())


def _moments(scenario: Scenario, turns: Turns) -> Moments:
    """Simulate the iterations on the stages, with one micro-batch per stage."""
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
    repeated(seconds, side.hops_of(tokens + side.rows * decoding), repeats, waits, gives, firsts, lasts, free)
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
    """Return the numbers of the iterations that differ from the one before."""
    begin, end = turns.iterations[0], turns.starts[-1]
    ended = finishes[(finishes >= begin) & (finishes < end)] if np.ptp(turns.stays) else finishes[:0]
    return np.unique(np.concatenate([turns.iterations, turns.iterations + 1.0, ended + 1.0]))


def _decoding(turns: Turns, finishes: Array, numbers: Array, micro_batch: int, parts: int) -> Array:
    """Count a micro-batch's decoding sequences in these iterations."""
    ends, last = turns.ends[micro_batch::parts], finishes[micro_batch::parts]
    if np.ptp(turns.stays):
        last = np.sort(last)
    return np.asarray(np.searchsorted(ends, numbers) - np.searchsorted(last, numbers), dtype=np.float64)


def _cells(scenario: Scenario, turns: Turns, numbers: Array, decoding: Array) -> tuple[Array, Array, Array]:
    """Return the prompt tokens, completed prompts and seconds of these iterations.

    Returns:
        Tokens [n, micro-batches], completed prompts [n, micro-batches], and seconds [n, micro-batches, stages].
    """
    shape, count = decoding.shape, decoding.size
    cell = np.searchsorted(numbers, turns.at) * shape[1] + turns.prompt % shape[1]
    sizes, past = turns.untils - turns.froms, turns.froms + scenario.load.prompts.past * turns.lengths[turns.prompt]
    fresh, ends = past == 0, turns.untils >= turns.lengths[turns.prompt]
    beside = np.bincount(cell[fresh], minlength=count).astype(np.float64)
    tokens = np.bincount(cell, sizes, count)
    chunks, completed = (np.bincount(c, None, count).astype(np.float64) for c in (cell, cell[ends]))
    flat = decoding.ravel()

    def of(group: Group) -> PartSeconds:
        together, attention = beside[cell[fresh]], np.zeros(count)
        if fresh.any():
            attention += np.bincount(cell[fresh], group.prompt_attention(together, sizes[fresh]) / together, count)
        if not fresh.all():
            attention += np.bincount(cell[~fresh], group.chunk_attention(sizes[~fresh], past[~fresh]), count)
        return group.mixed(tokens, chunks, flat, scenario.load.resident_context, attention, completed)

    seconds = scenario.replica.decode.each(of)
    seconds[(tokens == 0) & (flat == 0)] = 0.0
    return np.reshape(tokens, shape), np.reshape(completed, shape), seconds.reshape(*shape, -1)
