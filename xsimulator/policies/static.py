"""Static batches (FasterTransformer): encoded together, decoded to the batch's longest output, no early termination."""

import numpy as np
from numpy.typing import NDArray

from exegpt.estimate import Estimate
from exegpt.workload import LengthDistribution
from xsimulator.pipeline import PhaseTimes, phase_times
from xsimulator.scenario import Lifetime, Scenario

Array = NDArray[np.float64]


def expected_longest(law: LengthDistribution, batch: int) -> float:
    """Expected greatest of `batch` independent lengths."""
    below = np.concatenate([[0.0], np.cumsum(law.p)]) ** batch
    return float(law.s @ np.diff(below))


def phase(scenario: Scenario, batch: int) -> PhaseTimes:
    """One batch from an empty pipeline to the greatest output length; the batch is cut into as many micro-batches as
    there are stages. Finished rows are computed along, at their last position.
    """
    parts = min(len(scenario.stages), batch)
    share = batch / parts
    iterations = max(1, int(scenario.iterations[0].max()))
    need, p = scenario.iterations
    contexts = scenario.workload.input.mean + np.minimum(np.arange(1, iterations + 1)[:, None], need) @ p
    encode = [c.encode_parts(share, scenario.workload.input, parts) for c in scenario.costs]
    decode = np.stack([c.decode(share, contexts) for c in scenario.costs], axis=1)
    return phase_times(
        np.stack(encode, axis=1),
        decode,
        micro_batches=parts,
        encode_send=scenario.send(share * scenario.workload.input.mean),
        decode_send=np.full(iterations, scenario.send(share)),
        repeats=False,
    )


def estimate(scenario: Scenario, batch: int) -> Estimate:
    """A batch lasts until its longest output ends, on average `expected_longest`; a query's own latency ends with its
    own last token.
    """
    times = phase(scenario, batch)
    shift = 0.0 if scenario.encoder_decoder or scenario.form == "paper" else 1.0
    ends = np.concatenate([[times.encoded], times.decoded])
    law = scenario.workload.input
    deviation = max(float(c.encode_variance(batch, law)) for c in scenario.costs) ** 0.5

    def lifetime(lengths: Array) -> Lifetime:
        seconds = np.interp(lengths - shift, np.arange(len(ends)), ends)
        return Lifetime(seconds, np.full_like(seconds, deviation), np.zeros_like(seconds))

    longest = expected_longest(scenario.workload.output, batch) - shift
    duration = float(np.interp(longest, np.arange(len(ends)), ends))
    encodes = min(len(scenario.stages), batch)
    work = times.ends - times.starts
    decoding = work[encodes:].sum(axis=0) * longest / max(len(ends) - 1, 1)
    encoding = work[:encodes].sum(axis=0)
    first = times.encoded if shift else float(times.decoded[0])
    return scenario.estimate(
        throughput=batch / duration,
        lifetime=lifetime,
        first_token=(first, deviation),
        blocks=blocks(scenario, batch),
        tokens=max(batch * law.mean, batch),
        busy=(encoding + decoding) / duration,
        binding="encoding" if encoding.sum() > decoding.sum() else "decoding",
    )


def blocks(scenario: Scenario, batch: int) -> int:
    """KV blocks that a batch holds, its 99.9th percentile."""
    return scenario.reservation(None).quantile(batch, batch)
