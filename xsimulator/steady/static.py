"""Static batches: encoded together, decoded to the batch's longest output, without early termination.

FasterTransformer splits a batch into as many micro-batches as stages. DeepSpeed's hybrid scheduling takes more of them
for encoding, against bubbles, and fewer for decoding.
"""

import numpy as np

from xcore.arrays import Array
from xcore.policies.static import TRAITS
from xsimulator.steady.closed_form import ClosedForm, Controls, Steady
from xsimulator.steady.load import Load
from xsimulator.steady.outcome import Lifetime, Needs, Outcome, StageDemand
from xsimulator.steady.pipeline import PhaseTimes, phase_times
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.times import Times


def phase(scenario: Scenario, batch: int, encode_count: int, parts: int) -> tuple[PhaseTimes, Array, Array]:
    """Return the times of one batch from an empty pipeline to the greatest output length, and the stages' work.

    The batch is encoded in `encode_count` micro-batches and decoded in `parts`. Finished rows are still computed, at
    their last position.

    Returns:
        The times, each stage's seconds of encoding work [stages], and of decoding work [stages].
    """
    side, prompts = scenario.replica.decode, scenario.load.prompts
    encode = side.each(lambda group: prompts.micro_batches(group, batch / encode_count, encode_count))
    decode = side.decode(batch / parts, scenario.load.static_contexts)
    hops = side.hops(batch / encode_count * prompts.mean), side.decode_hops(batch / parts)
    times = phase_times(encode, decode, parts, hops, repeats=False)
    return times, encode.sum(axis=0), decode.sum(axis=0) * parts


def outcome(
    scenario: Scenario, batch: int, encode_micro_batches: int | None = None, micro_batches: int | None = None
) -> Outcome:
    """Return the steady state of static batches.

    A batch lasts until its longest output ends. A query's own latency ends with its own last token. Without counts,
    there are as many micro-batches as stages.
    """
    side, load = scenario.replica.decode, scenario.load
    encode_count, parts = _counts(scenario, batch, encode_micro_batches, micro_batches)
    needed = needs(scenario, batch, encode_micro_batches, micro_batches)
    times, encoding, decoding = phase(scenario, batch, encode_count, parts)
    shift = 1.0 if load.first_by_encoding else 0.0
    ends = np.concatenate([[times.encoded], times.decoded])
    deviation = load.prompts.deviation(side, batch)
    first_times, count = (times.first_encoded, encode_count) if shift else (times.first_decoded, parts)
    first = Times.even(*first_times, count, deviation)
    share = times.together(load.first_by_encoding)
    behind = share * (1.0 - 1.0 / encode_count) / 2  # share of the encoding after a sequence's own

    def lifetime(lengths: Array) -> Lifetime:
        need = lengths - shift
        seconds = np.interp(need, np.arange(len(ends)), [times.first_encoded[0], *(times.decoded - times.lead)])
        together = np.where(need > 0, share, 0.0) if len(first.p) > 1 else None
        iteration = load.prompts.decode_deviation(side, batch, load.resident_context, parts)
        decoding = np.maximum(need, 0.0) * iteration
        after_first = deviation * behind**0.5 + (lengths - 1.0) * iteration
        return Lifetime(seconds, np.full_like(seconds, deviation), after_first, decoding=decoding, together=together)

    longest, chances = load.steps.s - shift, load.longest_of(batch)
    duration = float(np.interp(longest, np.arange(len(ends)), ends) @ chances)
    decoding = decoding * float(longest @ chances) / max(len(ends) - 1, 1)
    return Outcome(
        throughput=batch / duration,
        lifetime=lifetime,
        find_first_token=lambda: first,
        kinds=load.lengths,
        demand=needed.demand,
        decode_batch=needed.decode_batch,
        residents=lambda: _residents(load, batch, times, duration),
        busy=(encoding + decoding) / duration,
        binding="encoding" if encoding.sum() > decoding.sum() else "decoding",
    )


def _counts(
    scenario: Scenario, batch: int, encode_micro_batches: int | None, micro_batches: int | None
) -> tuple[int, int]:
    """Return the micro-batches of encoding and of decoding; without counts, as many as stages."""
    stages = len(scenario.replica.decode.stages)
    return min(encode_micro_batches or stages, batch), min(micro_batches or stages, batch)


def needs(
    scenario: Scenario, batch: int, encode_micro_batches: int | None = None, micro_batches: int | None = None
) -> Needs:
    """Return what a batch, and the largest step of either kind, need."""
    encode_count, parts = _counts(scenario, batch, encode_micro_batches, micro_batches)
    tokens = batch * max(scenario.load.prompts.mean / encode_count, 1 / parts)
    return Needs(StageDemand(blocks(scenario, batch), tokens, batch / min(encode_count, parts)), batch)


def _residents(load: Load, batch: int, times: PhaseTimes, duration: float) -> float:
    """Return the mean number of sequences whose last token isn't out, over a batch's time."""
    need, p = load.iterations
    ended = np.concatenate([[0.0], np.cumsum(p)])[np.searchsorted(need, np.arange(1, len(times.decoded) + 1))]
    iterations = np.diff(times.decoded, prepend=times.encoded)
    decoding = float(p[need > 0].sum())
    encoding = decoding * (times.encoded - times.lead) + (1.0 - decoding) * times.first_encoded[0]
    return batch * (encoding + float(iterations @ (1.0 - ended))) / duration


def blocks(scenario: Scenario, batch: int) -> int:
    """Return the 99.9th percentile of the KV blocks that a batch holds."""
    return scenario.load.reservation(None).quantile(batch, batch)


def _steady(scenario: Scenario) -> Steady:
    return lambda controls: outcome(scenario, controls["encode_batch"], controls.get("encode_micro_batches"))


def _needs(scenario: Scenario, controls: Controls) -> Needs:
    return needs(scenario, controls["encode_batch"], controls.get("encode_micro_batches"))


CLOSED_FORM = ClosedForm((TRAITS.name,), _steady, needs=_needs)
