"""WAA, workload-aware allocation (paper section 4.1; docs/theory.md): encoding and decoding on devices of their own.

The encoding side transfers B_E sequences every T_E seconds, the period of its slowest stage; the decoding side merges
them between two iterations. With k iterations from one KV transfer to the next the decoding side sees exactly RRA's
decoding phase with N_D = k, so its batch is a sawtooth, and the k at which those iterations last T_E is the fixed point
of B_D = B_E · E[D] · T_D(B_D) / T_E with each iteration at its own batch. Where KV transfers come faster than
iterations, m of them join at each, and B_D = m · B_E · E[D].

Where memory doesn't hold the fixed point's residents (its 99.9th percentile), the encoding side waits: room is kept
for a query when its encoding begins, so that waiting comes before its latency counts.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from exegpt.schedule import BLOCK_SIZE
from xsimulator.steady.memory import Reservation
from xsimulator.steady.outcome import Demand, Lifetime, Outcome
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.waa_decoding import Cycle, Decoding, fixed_point
from xsimulator.steady.waa_encoding import Encoding, encoding
from xsimulator.steady.waa_full import crowd, room_for

Array = NDArray[np.float64]


def blocks(scenario: Scenario, encode_batch: int, stride: float, underway: float) -> int:
    """KV blocks held on the decoding side, its 99.9th percentile: by its residents and, since room is kept from the
    moment that a batch's encoding begins, by the `underway` batches that are being encoded and transferred.
    """
    held = scenario.reservation(max(stride, 1.0)).times(1.0 / min(stride, 1.0))
    phases = np.ceil(scenario.workload.output.max / max(stride, 1.0)) / min(stride, 1.0) + underway
    together = held + scenario.reservation(None).times(underway)
    return together.quantile(encode_batch, encode_batch * float(phases))


@dataclass(frozen=True)
class Flow:
    """Both sides together."""

    throughput: float
    """Sequences per second."""
    encoder: Encoding
    decoder: Decoding
    resident: float
    """B_D: sequences being decoded just after a KV transfer."""
    blocks: int
    """That the decoding side holds."""
    busy: Array
    """[stages]: busy fractions."""
    waits: bool
    """Whether the encoding side waits for the decoding side."""
    crest: float = 0.0
    """No smaller B_E gives more than this, where that may be more than `throughput`."""
    falls: bool = False
    """Whether larger B_E give no more."""


def flow(scenario: Scenario, encode_batch: int, micro_batches: int) -> Flow:
    """The steady state: full batches every T_E. Where the decoding side can't keep up with them, or memory doesn't hold
    who is then resident even for batches of one, a full memory; larger batches than memory holds need more than there
    is.
    """
    encoder = encoding(scenario, encode_batch)
    decoder = fixed_point(scenario, encode_batch, micro_batches, encoder.period)
    resident, need = _demand(scenario, encode_batch, encoder, decoder)
    room = room_for(scenario, resident, micro_batches)
    rate = encode_batch / max(encoder.period, decoder.period)
    waits = decoder.period > encoder.period * 1.001  # whatever the batch: residents grow until memory is full
    runs = room >= scenario.reservation(None).longest and scenario.iterations[0].any()
    if runs and (waits or (need > room and _crowds_anyway(scenario, micro_batches))):
        return crowded(scenario, encode_batch, micro_batches, room)
    busy = np.concatenate([encoder.busy, decoder.busy]) / max(encoder.period, decoder.period)
    return Flow(rate, encoder, decoder, resident, need, busy, waits)


def _demand(scenario: Scenario, encode_batch: int, encoder: Encoding, decoder: Decoding) -> tuple[float, int]:
    """B_D, and the KV blocks that it and those on their way hold."""
    stride, (iterations, p) = decoder.stride, scenario.iterations
    resident = encode_batch * float(p @ np.ceil(iterations / max(stride, 1.0))) / min(stride, 1.0)
    underway = 1.0 + (encoder.traversal + encoder.kv_transfer) / encoder.period
    return resident, blocks(scenario, encode_batch, stride, underway)


def _crowds_anyway(scenario: Scenario, micro_batches: int) -> bool:
    """Whether memory doesn't hold the residents of batches of one."""

    def make() -> bool:
        encoder = encoding(scenario, 1)
        decoder = fixed_point(scenario, 1, micro_batches, encoder.period)
        resident, need = _demand(scenario, 1, encoder, decoder)
        return need > room_for(scenario, resident, micro_batches)

    return scenario.once(("crowds anyway", scenario.encode, scenario.decode, micro_batches), make)


def crowded(scenario: Scenario, encode_batch: int, micro_batches: int, room: int) -> Flow:
    """The steady state where the decoding side's memory is full.

    B_E is then but the most that are encoded together: the more there are, the longer each is on its way and holds
    room that it doesn't decode in. So throughput falls with B_E once encoding keeps up, from a crest at batches of one.
    """
    full = crowd(scenario, encode_batch, micro_batches, room)
    key = ("crest", scenario.encode, scenario.decode, micro_batches, room)
    crest = scenario.once(key, lambda: (full if encode_batch == 1 else crowd(scenario, 1, micro_batches, room)).rate)
    rate = min(full.rate, encode_batch / encoding(scenario, encode_batch).period)
    deviation = float(np.hypot(full.encoder.deviation, full.more * (full.batch - 1) ** 0.5))
    # it seldom has two batches at once
    encoder = replace(full.encoder, traversal=full.encoder.alone, deviation=deviation)
    iteration_s = float(full.seconds[0])
    steady = Cycle(full.batch / (rate * iteration_s), full.seconds, np.ones(1), full.cells, micro_batches)
    busy = np.concatenate([encoder.busy * (rate / full.batch), full.cells[0] * (micro_batches / iteration_s)])
    blocks_held = min(room, room_for(scenario, full.resident, micro_batches))
    decoder = Decoding(steady, steady, 0.0)
    return Flow(rate, encoder, decoder, full.resident, blocks_held, busy, True, max(crest, rate), rate == full.rate)


def outcome(scenario: Scenario, encode_batch: int, micro_batches: int) -> Outcome:
    """A query's phases: its batch's encoding, the KV transfer, the wait for an iteration's end, D iterations."""
    steady = flow(scenario, encode_batch, micro_batches)
    encoder, decoder, distribution = steady.encoder, steady.decoder, scenario.workload.input
    shift = 1.0 if scenario.first_by_encoding else 0.0
    iteration_s = float(decoder.fast.seconds.mean())
    runs = min(1.0, decoder.period / encoder.period)  # a side that has run empty begins at once
    merged = encoder.traversal + encoder.kv_transfer + runs * iteration_s / 2

    def lifetime(lengths: Array) -> Lifetime:
        need = np.maximum(lengths - shift, 0.0)
        seconds = np.where(need > 0, merged + decoder.lived(need), encoder.traversal)
        waiting = np.where(need > 0, iteration_s / 12**0.5, 0.0)
        return Lifetime(seconds, np.hypot(encoder.deviation, waiting), waiting)

    first = encoder.traversal if shift else merged + float(decoder.lived(np.ones(1))[0])
    return Outcome(
        throughput=steady.throughput,
        lifetime=lifetime,
        first_token=(first, encoder.deviation),
        demand=Demand(steady.blocks, steady.resident / micro_batches),
        busy=steady.busy,
        binding="decoding" if steady.waits else "encoding",
        encode_demand=Demand(
            prompt_blocks(scenario, encode_batch, encoder.kv_transfer / encoder.period),
            encode_batch * distribution.mean,
        ),
        crest=steady.crest,
        falls=steady.falls,
    )


def prompt_blocks(scenario: Scenario, encode_batch: int, leaving: float) -> int:
    """KV blocks that an encoding stage holds, its 99.9th percentile: the batch it works on and those that leave."""
    if scenario.encoder_decoder:
        return 0
    distribution, batches = scenario.workload.input, 1.0 + np.ceil(leaving)
    each = Reservation(
        (distribution.mean + (BLOCK_SIZE - 1) / 2) / BLOCK_SIZE,
        (distribution.std**2 + BLOCK_SIZE**2 / 12) / BLOCK_SIZE**2,
        0.0,
        -(-distribution.max // BLOCK_SIZE),
    )
    return each.quantile(encode_batch * batches, encode_batch * batches)


def decode_batch(scenario: Scenario, encode_batch: int, micro_batches: int) -> int:
    """B_D, rounded: sequences being decoded just after a KV transfer."""
    return max(1, round(flow(scenario, encode_batch, micro_batches).resident))
