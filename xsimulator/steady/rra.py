"""RRA, round-robin allocation (paper section 4.1; docs/theory.md)."""

import functools
import math
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xcore.policies.rra import TRAITS
from xsimulator.steady.adjusted import residents_left, tokens_left, tokens_left_in_part
from xsimulator.steady.closed_form import ClosedForm, Controls, Steady
from xsimulator.steady.load import Load
from xsimulator.steady.outcome import Lifetime, Needs, Outcome, StageDemand
from xsimulator.steady.pipeline import PhaseTimes, phase_times
from xsimulator.steady.residents import SteadyState
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.times import Times

_SURE = 0.999
"""Probability that a micro-batch runs, above which it counts as certain."""


@dataclass(frozen=True)
class Phase:
    """RRA's phase on a pipeline."""

    times: PhaseTimes
    encoding: Array
    """[stages]: seconds of encoding work."""
    decoding: Array
    """[stages]: seconds of decoding work."""


def phase(
    scenario: Scenario,
    encode_batch: int,
    decode_iterations: int,
    encode_micro_batches: int | None = None,
    tagged: bool = False,
) -> Phase:
    """Return the steady phase: B_E sequences are encoded, then N_D decode iterations run.

    Decoding takes one micro-batch for every stage, if there are as many sequences. Encoding takes
    `encode_micro_batches` micro-batches (None: one for every stage). Micro-batches without sequences are skipped. A
    `tagged` query is resident itself, so for it one micro-batch always runs.
    """
    side, prompts = scenario.replica.decode, scenario.load.prompts
    steady = scenario.load.steady(decode_iterations)
    encode_count = micro_batches(scenario, encode_batch, encode_micro_batches)
    parts = decode_parts(scenario, encode_batch, decode_iterations)
    runs = steady.any_active(encode_batch / parts)
    batches = encode_batch * steady.active / parts / np.maximum(runs, 1e-300)  # given that the micro-batch isn't empty
    left = tokens_left_in_part(tokens_left(scenario, encode_batch), encode_count)
    encode = side.each(lambda group: prompts.micro_batches(group, encode_batch / encode_count, encode_count, left))
    cells, hops = side.decode(batches, steady.context), side.decode_hops(float(batches.max()))
    times = phase_times(
        encode,
        cells if runs[-1] > _SURE else _shares(cells, float(hops.sum()), runs, parts, tagged)[:, None] * cells,
        micro_batches=parts,
        hops=(side.hops(encode_batch / encode_count * prompts.mean), hops),
        sequences=encode_batch,
    )
    return Phase(times, encode.sum(axis=0), runs @ cells * parts)


def _shares(cells: Array, way: float, runs: Array, parts: int, tagged: bool) -> Array:
    """Return each iteration's mean time relative to an iteration with all micro-batches [iterations].

    A micro-batch runs with probability `runs`. Even a single micro-batch passes all stages. So an iteration is shorter
    only if the slowest stage has less work, or if no micro-batch runs. `way`: seconds between the stages.
    """
    if parts == 1:
        return np.ones_like(runs) if tagged else runs
    others = parts - tagged
    number = np.arange(others + 1.0)
    chances = _combinations(others) * runs[:, None] ** number * (1.0 - runs[:, None]) ** (others - number)
    work, slowest = cells.sum(axis=-1), cells.max(axis=-1)
    number += tagged
    seconds = np.maximum((work + way)[:, None], number * slowest[:, None]) * (number > 0)
    mean = (chances * seconds).sum(axis=-1)
    shares: Array = np.clip(np.minimum((mean - way) / work, mean / (parts * slowest)), 0.0, 1.0)
    return shares


@functools.cache
def _combinations(count: int) -> Array:
    """Return the binomial coefficients of `count` [count + 1]."""
    return np.array([math.comb(count, chosen) for chosen in range(count + 1)], dtype=np.float64)


def micro_batches(scenario: Scenario, encode_batch: int, asked: int | None) -> int:
    """Return the number of micro-batches that encode `encode_batch` prompts: never more than the prompts."""
    return min(asked or len(scenario.replica.encode.stages), encode_batch)


def decode_parts(scenario: Scenario, encode_batch: int, decode_iterations: int) -> int:
    """Return the number of decoding micro-batches: one for every stage, but no more than sequences."""
    return min(len(scenario.replica.decode.stages), decode_batch(scenario, encode_batch, decode_iterations))


def outcome(
    scenario: Scenario, encode_batch: int, decode_iterations: int, encode_micro_batches: int | None = None
) -> Outcome:
    """Return the steady state, with the throughput B_E / T_phase.

    A query of output length S lasts ceil(D/N_D) - 1 periods. Its last phase counts from the phase's start until
    iteration 1 + (D - 1) mod N_D leaves the last stage.
    """
    steady_phase = phase(scenario, encode_batch, decode_iterations, encode_micro_batches)
    needed = needs(scenario, encode_batch, decode_iterations, encode_micro_batches)
    times = tagged = steady_phase.times
    load, steady = scenario.load, scenario.load.steady(decode_iterations)
    encode_count = micro_batches(scenario, encode_batch, encode_micro_batches)
    parts = decode_parts(scenario, encode_batch, decode_iterations)
    if steady.any_active(encode_batch / parts)[-1] <= _SURE:
        tagged = phase(scenario, encode_batch, decode_iterations, encode_micro_batches, tagged=True).times
    deviation = tokens_left(scenario, encode_batch) * load.prompts.deviation(scenario.replica.encode, encode_batch)
    if load.first_by_encoding:
        shift, first = 1.0, Times.even(*times.first_encoded, encode_count, deviation)
    else:
        shift, first = 0.0, Times.even(*tagged.first_decoded, parts, deviation)
    ends = np.concatenate([[times.first_encoded[0]], tagged.decoded - tagged.lead])

    share = tagged.together(load.first_by_encoding)
    behind = share * (1.0 - 1.0 / encode_count) / 2  # share of the encoding after a sequence's own

    def lifetime(lengths: Array) -> Lifetime:
        need = lengths - shift
        phases = np.maximum(np.ceil(np.round(need / decode_iterations, 9)), 1.0)  # a mean of 24 may be 24.0000001
        last = np.interp(need - (phases - 1) * decode_iterations, np.arange(decode_iterations + 1), ends)
        seconds: Array = (phases - 1) * tagged.period + last
        together = np.where(need > 0, share, 0.0) if len(first.p) > 1 else None
        others = (phases - 1) * decode_iterations / load.mean_residual  # others take their place in the meantime
        mean = _iterations_vary(scenario, encode_batch, steady, parts) * np.sqrt(_persisting(others))
        after_first = deviation * np.sqrt(phases - 1 + behind) + mean * (lengths - 1.0)
        decoding = mean * np.maximum(need, 0.0)
        return Lifetime(seconds, deviation * np.sqrt(phases), after_first, decoding=decoding, together=together)

    return Outcome(
        throughput=encode_batch / times.period,
        lifetime=lifetime,
        find_first_token=lambda: first,
        kinds=load.lengths,
        demand=needed.demand,
        decode_batch=needed.decode_batch,
        residents=lambda: encode_batch * _stay(load, steady.active, times, tagged) / times.period,
        busy=(steady_phase.encoding + steady_phase.decoding) / times.period,
        binding="encoding" if steady_phase.encoding.sum() > steady_phase.decoding.sum() else "decoding",
    )


def needs(
    scenario: Scenario, encode_batch: int, decode_iterations: int, encode_micro_batches: int | None = None
) -> Needs:
    """Return what the residents of all phases, and the largest step of either kind, need."""
    encode_count = micro_batches(scenario, encode_batch, encode_micro_batches)
    parts = decode_parts(scenario, encode_batch, decode_iterations)
    ratio = scenario.load.steady(decode_iterations).batch_ratio
    demand = StageDemand(
        blocks(scenario, encode_batch, decode_iterations),
        encode_batch * max(scenario.load.prompts.mean / encode_count, ratio / parts),
        encode_batch * max(1 / encode_count, ratio / parts),
    )
    return Needs(demand, decode_batch(scenario, encode_batch, decode_iterations))


def _iterations_vary(scenario: Scenario, encode_batch: int, steady: SteadyState, parts: int) -> float:
    """Return the standard deviation of an iteration's seconds: the inputs and the number of its sequences vary."""
    load, resident = scenario.load, max(encode_batch * float(steady.active.mean()), 1.0)
    number = residents_left(scenario) * math.sqrt(encode_batch * steady.variance)
    return load.prompts.decode_deviation(scenario.replica.decode, resident, load.resident_context, parts, number)


def _persisting(times: Array) -> Array:
    """Return the variance of a mean over several stays, relative to the variance at one moment.

    Assumes an exponential correlation over a stay.
    """
    x = np.maximum(times, 1e-3)
    shares: Array = 2.0 * (x - 1.0 + np.exp(-x)) / x**2
    return shares


def _stay(load: Load, active: Array, times: PhaseTimes, tagged: PhaseTimes) -> float:
    """Return the mean seconds that a query stays.

    At a phase's first iteration, `active` queries are resident; queries that entered in earlier phases were also
    resident from the end of the previous phase's decoding to its period's end. An iteration with an active query always
    runs, so the times of `tagged` apply.
    """
    need, p = load.iterations
    decoding = float(p[need > 0].sum())
    before = float(active[0] - decoding)
    iterations = np.diff(tagged.decoded, prepend=times.encoded)
    encoding = (before + decoding) * times.encoded + (1.0 - decoding) * times.first_encoded[0] - decoding * tagged.lead
    return float(encoding + active @ iterations + before * (tagged.period - tagged.decoded[-1]))


def blocks(scenario: Scenario, encode_batch: int, decode_iterations: int) -> int:
    """Return the 99.9th percentile of the KV blocks that the residents of all phases hold."""
    most = encode_batch * float(np.ceil(scenario.load.steps.max / decode_iterations))
    return scenario.load.reservation(decode_iterations).quantile(encode_batch, most)


def decode_batch(scenario: Scenario, encode_batch: int, decode_iterations: int) -> int:
    """Return B_D, rounded: sequences being decoded at the start of a phase."""
    return max(1, round(encode_batch * scenario.load.steady(decode_iterations).batch_ratio))


def _variables(controls: Controls) -> tuple[int, int, int | None]:
    return controls["encode_batch"], controls["decode_iterations"], controls.get("encode_micro_batches")


def _steady(scenario: Scenario) -> Steady:
    return lambda controls: outcome(scenario, *_variables(controls))


def _needs(scenario: Scenario, controls: Controls) -> Needs:
    return needs(scenario, *_variables(controls))


CLOSED_FORM = ClosedForm((TRAITS.name,), _steady, needs=_needs)
