"""RRA, round-robin allocation (paper section 4.1; spec sections 3.1 and 5)."""

import numpy as np
from numpy.typing import NDArray

from exegpt.estimate import Estimate
from xsimulator.pipeline import PhaseTimes, phase_times
from xsimulator.scenario import Lifetime, Scenario

Array = NDArray[np.float64]


def phase(scenario: Scenario, encode_batch: int, decode_iterations: int, tagged: bool = False) -> PhaseTimes:
    """The steady phase: B_E sequences encoded, then N_D decoding iterations, a micro-batch for every stage.

    An iteration is skipped where nobody is left; for a `tagged` query, which is resident itself, it always runs.
    """
    steady = scenario.steady(decode_iterations)
    parts = min(len(scenario.stages), encode_batch)
    runs = steady.any_active(encode_batch / parts)
    batches = encode_batch * steady.active / parts / np.maximum(runs, 1e-300)  # given that somebody is there
    encode = [c.encode_parts(encode_batch / parts, scenario.workload.input, parts) for c in scenario.costs]
    decode = np.stack([c.decode(batches, steady.context) for c in scenario.costs], axis=1)
    return phase_times(
        np.stack(encode, axis=1),
        decode if tagged else runs[:, None] * decode,
        micro_batches=parts,
        encode_send=scenario.send(encode_batch / parts * scenario.workload.input.mean),
        decode_send=np.full(decode_iterations, scenario.send(float(batches.max()))),
    )


def estimate(scenario: Scenario, encode_batch: int, decode_iterations: int) -> Estimate:
    """Throughput B_E / T_phase. A query of output length S lasts ceil(D/N_D) - 1 periods and, from its last phase's
    start, until iteration 1 + (D - 1) mod N_D leaves the last stage.
    """
    times = phase(scenario, encode_batch, decode_iterations)
    steady = scenario.steady(decode_iterations)
    parts = min(len(scenario.stages), encode_batch)
    sure = steady.any_active(encode_batch / parts)[-1] > 0.999
    own = times if sure else phase(scenario, encode_batch, decode_iterations, tagged=True)
    law = scenario.workload.input
    deviation = max(float(c.encode_variance(encode_batch, law)) for c in scenario.costs) ** 0.5
    shift = 0.0 if scenario.encoder_decoder or scenario.form == "paper" else 1.0

    def lifetime(lengths: Array) -> Lifetime:
        need = lengths - shift
        phases = np.maximum(np.ceil(need / decode_iterations), 1.0)
        last = np.where(need > 0, own.decoded[((need - 1) % decode_iterations).astype(int)], times.encoded)
        seconds: Array = (phases - 1) * own.period + last
        return Lifetime(seconds, deviation * np.sqrt(phases), deviation * np.sqrt(phases - 1))

    first = times.encoded if shift else float(own.decoded[0])
    encodes = len(times.starts) - decode_iterations * parts
    work = times.ends - times.starts
    encoding, decoding = work[:encodes].sum(axis=0), work[encodes:].sum(axis=0)
    return scenario.estimate(
        throughput=encode_batch / times.period,
        lifetime=lifetime,
        first_token=(first, deviation),
        blocks=blocks(scenario, encode_batch, decode_iterations),
        tokens=max(encode_batch * law.mean, encode_batch * steady.batch_ratio),
        busy=(encoding + decoding) / times.period,
        binding="encoding" if encoding.sum() > decoding.sum() else "decoding",
    )


def blocks(scenario: Scenario, encode_batch: int, decode_iterations: int) -> int:
    """KV blocks that the residents of all phases hold, its 99.9th percentile."""
    most = encode_batch * float(np.ceil(scenario.workload.output.max / decode_iterations))
    return scenario.reservation(decode_iterations).quantile(encode_batch, most)


def decode_batch(scenario: Scenario, encode_batch: int, decode_iterations: int) -> int:
    """B_D, rounded: sequences being decoded at the start of a phase."""
    return max(1, round(encode_batch * scenario.steady(decode_iterations).batch_ratio))
