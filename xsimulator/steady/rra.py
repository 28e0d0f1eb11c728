"""RRA, round-robin allocation (paper section 4.1; docs/theory.md)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xsimulator.steady.load import Load
from xsimulator.steady.outcome import Demand, Lifetime, Outcome
from xsimulator.steady.pipeline import PhaseTimes, phase_times
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.times import Times

Array = NDArray[np.float64]


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
    """The steady phase: B_E sequences encoded in so many micro-batches (None: one for every stage), then N_D decoding
    iterations, a micro-batch for every stage.

    An iteration is skipped without sequences; for a `tagged` query, which is resident itself, it always runs.
    """
    side, prompts = scenario.replica.decode, scenario.load.prompts
    steady = scenario.load.steady(decode_iterations)
    encode_count = micro_batches(scenario, encode_batch, encode_micro_batches)
    parts = decode_parts(scenario, encode_batch, decode_iterations)
    runs = steady.any_active(encode_batch / parts)
    batches = encode_batch * steady.active / parts / np.maximum(runs, 1e-300)  # given that the micro-batch isn't empty
    encode = side.each(lambda group: prompts.micro_batches(group, encode_batch / encode_count, encode_count))
    decode = side.decode(batches, steady.context)
    if not tagged:
        decode = runs[:, None] * decode
    times = phase_times(
        encode,
        decode,
        micro_batches=parts,
        hops=(
            side.hops(encode_batch / encode_count * prompts.mean),
            side.hops(float(batches.max())),
        ),
        sequences=encode_batch,
    )
    return Phase(times, encode.sum(axis=0), decode.sum(axis=0) * parts)


def micro_batches(scenario: Scenario, encode_batch: int, asked: int | None) -> int:
    """How many micro-batches `encode_batch` prompts are encoded in: never more than there are prompts."""
    return min(asked or len(scenario.replica.encode.stages), encode_batch)


def decode_parts(scenario: Scenario, encode_batch: int, decode_iterations: int) -> int:
    """How many micro-batches the decoding batch is split into: one for every stage, as long as there are sequences."""
    return min(len(scenario.replica.decode.stages), decode_batch(scenario, encode_batch, decode_iterations))


def outcome(
    scenario: Scenario, encode_batch: int, decode_iterations: int, encode_micro_batches: int | None = None
) -> Outcome:
    """Throughput B_E / T_phase. A query of output length S lasts ceil(D/N_D) - 1 periods and, from its last phase's
    start, until iteration 1 + (D - 1) mod N_D leaves the last stage.
    """
    steady_phase = phase(scenario, encode_batch, decode_iterations, encode_micro_batches)
    times = tagged = steady_phase.times
    load, steady = scenario.load, scenario.load.steady(decode_iterations)
    encode_count = micro_batches(scenario, encode_batch, encode_micro_batches)
    parts = decode_parts(scenario, encode_batch, decode_iterations)
    if steady.any_active(encode_batch / parts)[-1] <= 0.999:
        tagged = phase(scenario, encode_batch, decode_iterations, encode_micro_batches, tagged=True).times
    deviation = load.prompts.deviation(scenario.replica.encode, encode_batch)
    shift, ends = 1.0 if load.first_by_encoding else 0.0, np.concatenate([[times.encoded], tagged.decoded])

    def lifetime(lengths: Array) -> Lifetime:
        need = lengths - shift
        phases = np.maximum(np.ceil(np.round(need / decode_iterations, 9)), 1.0)  # a mean of 24 may be 24.0000001
        last = np.interp(need - (phases - 1) * decode_iterations, np.arange(decode_iterations + 1), ends)
        seconds: Array = (phases - 1) * tagged.period + last
        return Lifetime(seconds, deviation * np.sqrt(phases), deviation * np.sqrt(phases - 1))

    first, spread = times.first_encoded if shift else tagged.first_decoded
    return Outcome(
        throughput=encode_batch / times.period,
        lifetime=lifetime,
        first_token=Times.normal(first, float(np.hypot(deviation, spread))),
        kinds=load.lengths,
        demand=Demand(
            blocks(scenario, encode_batch, decode_iterations),
            encode_batch * max(load.prompts.mean / encode_count, steady.batch_ratio / parts),
            encode_batch * max(1 / encode_count, steady.batch_ratio / parts),
        ),
        decode_batch=decode_batch(scenario, encode_batch, decode_iterations),
        residents=lambda: encode_batch * _stay(load, steady.active, times, tagged) / times.period,
        busy=(steady_phase.encoding + steady_phase.decoding) / times.period,
        binding="encoding" if steady_phase.encoding.sum() > steady_phase.decoding.sum() else "decoding",
    )


def _stay(load: Load, active: Array, times: PhaseTimes, tagged: PhaseTimes) -> float:
    """Seconds that a query stays on average. Of those that entered before, and are `active` at a phase's first
    iteration beside the new ones, as many are there at the end of the phase before, until it ends. Iterations in which
    a query is active run, as for a tagged one.
    """
    need, p = load.iterations
    before = float(active[0] - p[need > 0].sum())
    iterations = np.diff(tagged.decoded, prepend=tagged.encoded)
    return float((before + 1) * times.encoded + active @ iterations + before * (times.period - times.decoded[-1]))


def blocks(scenario: Scenario, encode_batch: int, decode_iterations: int) -> int:
    """KV blocks that the residents of all phases hold, its 99.9th percentile."""
    most = encode_batch * float(np.ceil(scenario.load.workload.output.max / decode_iterations))
    return scenario.load.reservation(decode_iterations).quantile(encode_batch, most)


def decode_batch(scenario: Scenario, encode_batch: int, decode_iterations: int) -> int:
    """B_D, rounded: sequences being decoded at the start of a phase."""
    return max(1, round(encode_batch * scenario.load.steady(decode_iterations).batch_ratio))
