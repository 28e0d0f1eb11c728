"""WAA, workload-aware allocation (paper section 4.1; docs/theory.md): encoding and decoding on different devices.

The encoding side transfers B_E sequences every T_E seconds, the period of its slowest stage. The decoding side merges
them between two iterations. With k iterations from one KV transfer to the next, the decoding side is exactly RRA's
decoding phase with N_D = k. Its batch is a sawtooth. At the fixed point, these k iterations last T_E: B_D = B_E · E[D]
· T_D(B_D) / T_E, with each iteration at its own batch (`decoding_cycle.py`). If KV transfers come faster than
iterations, m of them join at each, and B_D = m · B_E · E[D].

If memory doesn't hold the fixed point's residents (their 99.9th percentile), the decoding side is saturated and the
encoding side waits. A query gets its blocks when its encoding begins, so that waiting comes before its latency counts.
Every query that finishes frees blocks for the next one: a closed queueing network of as many residents as memory holds.
"""

import bisect
import functools
from dataclasses import dataclass, replace

import numpy as np

from xcore.arrays import Array
from xcore.policies.waa import WAA_C, WAA_M
from xcore.specs.schedule import BLOCK_SIZE
from xsimulator.cost.memo import memoized
from xsimulator.steady.adjusted import tokens_left
from xsimulator.steady.blocks import Reservation
from xsimulator.steady.closed_form import ClosedForm, Controls, Steady, blocks_of
from xsimulator.steady.decoding_cycle import Cycle, Decoding, fixed_point, iteration
from xsimulator.steady.outcome import Lifetime, Outcome, StageDemand
from xsimulator.steady.prompts import Encoding
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.times import Times

BATCHES: list[int] = np.unique(np.rint(2.0 ** np.arange(0, 14, 0.5))).astype(int).tolist()
"""Batches between which the encoding side counts as linear."""
MAX_BLOCKS = 2**62
"""KV blocks of a pool that only memory limits."""
_ROUNDS = 60
"""Most rounds until a saturated decoding side's rate and residents agree."""


@dataclass(frozen=True)
class Flow:
    """The steady state of both sides together."""

    throughput: float
    """Sequences per second."""
    encoder: Encoding
    decoder: Decoding
    resident: float
    """B_D: sequences being decoded just after a KV transfer."""
    blocks: int
    """Blocks that the decoding side holds."""
    busy: Array
    """[stages]: busy fractions."""
    waits: bool
    """Whether the encoding side waits for the decoding side."""
    best_below: float = 0.0
    """No smaller B_E gives a higher throughput than this, where that may exceed `throughput`."""
    no_better_above: bool = False
    """Whether larger B_E give no higher throughput."""


@dataclass(frozen=True)
class Saturated:
    """A decoding side with a constant number of residents, if encoding keeps up."""

    rate: float
    """Sequences that finish per second."""
    resident: float
    batch: float
    """Prompts encoded together, averaged over prompts."""
    encoder: Encoding
    """The encoding side with that batch."""
    more: float
    """Seconds that one more prompt adds."""
    seconds: Array
    """[1]: seconds of an iteration."""
    cells: Array
    """[1, stages]: each stage's work for a micro-batch in the iteration."""


@dataclass(frozen=True, eq=False)
class WAA:
    """WAA's two sides with B_m micro-batches of decoding, for any B_E (`encode_batch`)."""

    scenario: Scenario
    micro_batches: int

    def outcome(self, encode_batch: int, most_blocks: int | None = None) -> Outcome:
        """Return the steady state for one B_E.

        A query's phases are its batch's encoding, the KV transfer, the wait for an iteration's end, and D iterations.
        `most_blocks` are the KV blocks of the decoding side's pool; None: as many as memory holds.
        """
        flow, load = self.flow(encode_batch), self.scenario.load
        if most_blocks is not None and most_blocks < flow.blocks:
            flow = self.flow(encode_batch, most_blocks)
        encoder, decoder = flow.encoder, flow.decoder
        shift = 1.0 if load.first_by_encoding else 0.0
        iteration_s = float(decoder.fast.seconds.mean())
        runs = min(1.0, decoder.period / encoder.period)  # a side that has run empty begins at once
        merged = encoder.traversal + encoder.kv_transfer + runs * iteration_s / 2

        def lifetime(lengths: Array) -> Lifetime:
            need = np.maximum(lengths - shift, 0.0)
            seconds = np.where(need > 0, merged + decoder.lived(need), encoder.traversal)
            waiting = np.where(need > 0, iteration_s / 12**0.5, 0.0)
            return Lifetime(seconds, np.hypot(encoder.deviation, waiting), waiting)

        first = encoder.traversal if shift else merged + float(decoder.lived(np.ones(1))[0])
        encoding_blocks = self.prompt_blocks(encode_batch, encoder.kv_transfer / encoder.period)
        return Outcome(
            throughput=flow.throughput,
            lifetime=lifetime,
            find_first_token=lambda: Times.normal(first, encoder.deviation),
            demand=StageDemand(flow.blocks, *[flow.resident / self.micro_batches] * 2),
            decode_batch=max(1, round(flow.resident)),
            residents=lambda: flow.throughput * merged + decoder.residents / max(encoder.period, decoder.period),
            busy=flow.busy,
            binding="decoding" if flow.waits else "encoding",
            encode_demand=StageDemand(encoding_blocks, encode_batch * load.prompts.mean, encode_batch),
            best_below=flow.best_below,
            no_better_above=flow.no_better_above,
        )

    def flow(self, encode_batch: int, most_blocks: int = MAX_BLOCKS) -> Flow:
        """Return the steady state: full batches every T_E.

        If the decoding side can't keep up with the batches, its memory is saturated. The same holds if memory is too
        small for the residents even of batches of one. Otherwise, batches that are too large for memory need more
        blocks than exist.
        """
        load, encoder = self.scenario.load, self.encoding(encode_batch, tokens_left(self.scenario, encode_batch))
        decoder = fixed_point(self.scenario, encode_batch, self.micro_batches, encoder.period)
        resident, need = self._demand(encode_batch, encoder, decoder)
        room = min(self.room_for(resident), most_blocks)
        period = max(encoder.period, decoder.period)
        waits = decoder.period > encoder.period * 1.001  # whatever the batch: residents grow until memory is full
        runs = room >= load.reservation(None).longest and load.iterations[0].any()
        if runs and (waits or (need > room and self._saturates_anyway(most_blocks))):
            return self._saturated_flow(encode_batch, room)
        busy = np.concatenate([encoder.busy, decoder.busy]) / period
        return Flow(encode_batch / period, encoder, decoder, resident, need, busy, waits)

    # ---- the encoding side ----

    @memoized
    def encoding(self, encode_batch: int, left: float = 1.0) -> Encoding:
        """Return the encoding side with batches of B_E, one after the other through its stages.

        The share `left` of the standard deviation of their tokens remains: all of it where memory limits the batches.
        """
        replica, prompts = self.scenario.replica, self.scenario.load.prompts
        batches = prompts.batches(replica.encode, encode_batch, left)
        kv_transfer = replica.kv_transfer_seconds(encode_batch * prompts.mean)
        return replace(batches, kv_transfer=kv_transfer, period=max(batches.period, kv_transfer / 2))

    def encoding_between(self, batch: float) -> tuple[Encoding, float]:
        """Return the encoding side with `batch` prompts at once on average, and the seconds that one more prompt adds.

        It is interpolated linearly between the whole numbers of `BATCHES`.
        """
        place = min(bisect.bisect_right(BATCHES, batch), len(BATCHES) - 1)
        low, high = BATCHES[place - 1], BATCHES[place]
        few, many = self.encoding(low), self.encoding(high)
        return few.towards(many, (batch - low) / (high - low)), (many.alone - few.alone) / (high - low)

    def prompt_blocks(self, encode_batch: int, leaving: float) -> int:
        """Return the 99.9th percentile of the KV blocks that an encoding stage holds.

        It holds the batch that it works on and the batches that leave.
        """
        if self.scenario.load.encoder_decoder:
            return 0
        inputs, batches = self.scenario.load.workload.input, 1.0 + np.ceil(leaving)
        each = Reservation(
            (inputs.mean + (BLOCK_SIZE - 1) / 2) / BLOCK_SIZE,
            (inputs.std**2 + BLOCK_SIZE**2 / 12) / BLOCK_SIZE**2,
            0.0,
            -(-inputs.max // BLOCK_SIZE),
        )
        return each.quantile(encode_batch * batches, encode_batch * batches)

    # ---- the decoding side's memory ----

    def blocks(self, encode_batch: int, stride: float, underway: float) -> int:
        """Return the 99.9th percentile of the KV blocks held on the decoding side.

        Its residents hold blocks. A batch gets its blocks when its encoding begins, so the `underway` batches in
        encoding and transfer hold blocks too.
        """
        load = self.scenario.load
        held = load.reservation(max(stride, 1.0)).times(1.0 / min(stride, 1.0))
        phases = np.ceil(load.steps.max / max(stride, 1.0)) / min(stride, 1.0) + underway
        together = held + load.reservation(None).times(underway)
        return together.quantile(encode_batch, encode_batch * float(phases))

    def _demand(self, encode_batch: int, encoder: Encoding, decoder: Decoding) -> tuple[float, int]:
        """Return B_D, and the KV blocks held by those sequences and by the sequences on their way."""
        stride, (iterations, p) = decoder.stride, self.scenario.load.iterations
        resident = encode_batch * float(p @ np.ceil(iterations / max(stride, 1.0))) / min(stride, 1.0)
        underway = 1.0 + (encoder.traversal + encoder.kv_transfer) / encoder.period
        return resident, self.blocks(encode_batch, stride, underway)

    def room_for(self, resident: float) -> int:
        """Return the KV blocks that fit on every decoding stage with the workspace of `resident` sequences.

        If these sequences don't fit, the workspace is for as many as fit.
        """
        load = self.scenario.load
        most = self._room / (load.reservation(1).mean / max(load.mean_iterations, 1.0))
        tokens = min(resident, max(most, 1.0)) / self.micro_batches
        return self.scenario.replica.room((tokens, tokens), "decode")

    @functools.cached_property
    def _room(self) -> int:
        """Return the KV blocks on every decoding stage whose workspace is for a single token."""
        return self.scenario.replica.room((1.0, 1.0), "decode")

    # ---- saturated ----

    def _saturates_anyway(self, most_blocks: int) -> bool:
        """Return whether the pool is too small for the residents of batches of one."""
        need, room = self._of_one
        return need > min(room, most_blocks)

    @functools.cached_property
    def _of_one(self) -> tuple[int, int]:
        """Return the KV blocks that batches of one need, and the KV blocks that then fit."""
        encoder = self.encoding(1)
        decoder = fixed_point(self.scenario, 1, self.micro_batches, encoder.period)
        resident, need = self._demand(1, encoder, decoder)
        return need, self.room_for(resident)

    def _saturated_flow(self, encode_batch: int, room: int) -> Flow:
        """Return the steady state if the decoding side's memory is full.

        B_E is then only the largest number of prompts encoded together. In larger batches, each sequence is longer on
        its way and holds blocks without decoding. Once encoding keeps up, the throughput therefore falls with B_E; it
        is highest for batches of one.
        """
        full = self.saturated(encode_batch, room)
        rate = min(full.rate, encode_batch / self.encoding(encode_batch).period)
        deviation = float(np.hypot(full.encoder.deviation, full.more * (full.batch - 1) ** 0.5))
        # the encoding side seldom has two batches at once
        encoder = replace(full.encoder, traversal=full.encoder.alone, deviation=deviation)
        iteration_s = float(full.seconds[0])
        cycle = Cycle(
            full.batch / (rate * iteration_s),
            np.array([full.resident]),
            full.seconds,
            np.ones(1),
            full.cells,
            self.micro_batches,
        )
        busy = np.concatenate([encoder.busy * (rate / full.batch), full.cells[0] * (self.micro_batches / iteration_s)])
        held, best_below = min(room, self.room_for(full.resident)), max(self.saturated(1, room).rate, rate)
        decoder = Decoding(cycle, cycle, 0.0)
        return Flow(rate, encoder, decoder, full.resident, held, busy, True, best_below, rate == full.rate)

    @memoized
    def saturated(self, most: int, room: int) -> Saturated:
        """Return the two sides with `room` blocks of memory, which stay full on average.

        Prompts are encoded a few at a time: up to `most`, as many as get blocks until an iteration ends and the first
        stage is free again. The number of residents hardly changes.

        n residents hold E[blocks | resident] each. The X · (encoding + KV transfer + half an iteration) sequences on
        their way hold E[blocks] each. The next sequence, which doesn't fit yet, leaves half of its own blocks free. The
        rate is X = n / (E[D] · T_D(n)). The more residents, the more sequences are on their way: n is the number at
        which both fill `room`, found by false position (Illinois).
        """
        load = self.scenario.load
        each, held = load.reservation(None).mean, load.reservation(1).mean / load.mean_iterations

        def left(state: Saturated) -> float:
            """Return the number of additional residents that would fit."""
            encoder = state.encoder
            on_the_way = state.rate * (encoder.alone + encoder.kv_transfer + float(state.seconds[0]) / 2)
            return (room - each * (0.5 + on_the_way)) / held - state.resident

        few, many = (self._of_residents(n, most) for n in (1.0, max(room / held, 1.0)))
        above, below = left(few), left(many)
        if above <= 0:
            return few
        last = 0.0
        for _ in range(_ROUNDS):
            resident = (few.resident * -below + many.resident * above) / (above - below)
            full = self._of_residents(resident, most)
            rest = left(full)
            if abs(rest) <= 1e-9 * resident:
                break
            if rest > 0:
                few, above, below = full, rest, below / 2 if last > 0 else below
            else:
                many, below, above = full, rest, above / 2 if last < 0 else above
            last = rest
        return full

    def _of_residents(self, resident: float, most: int) -> Saturated:
        """Return the two sides with `resident` residents; memory is not considered."""
        load = self.scenario.load
        context = np.array([load.resident_context])
        joining = max(resident / load.mean_iterations, 1.0)  # the sequences that joined last are taken over meanwhile
        seconds, cells = iteration(self.scenario, np.array([resident]), context, self.micro_batches, joining)
        iteration_s = float(seconds[0])
        rate = resident / (load.mean_iterations * iteration_s)
        batch = self._batch_found(rate, iteration_s, most)
        encoder, more = self.encoding_between(batch)
        return Saturated(rate, resident, batch, encoder, more, seconds, cells)

    def _batch_found(self, rate: float, iteration_s: float, most: int) -> float:
        """Return the prompts in a batch, as a prompt finds it, if prompts arrive one by one; at most `most`.

        The batch holds the prompt itself and a Poisson number of prompts that arrive until the side's first stage is
        free and an iteration ends.


        """

        def more_come(batch: int) -> float:
            return 1.0 + rate * max(self.encoding(batch).period, iteration_s) - batch

        low, above = 1.0, more_come(1)
        for high in BATCHES[1:]:
            if low >= most:
                break
            below = more_come(high)
            if below <= 0:
                return min(low + (high - low) * above / (above - below), float(most))
            low, above = float(high), below
        return float(most)


def _steady(scenario: Scenario) -> Steady:
    sides = functools.cache(functools.partial(WAA, scenario))

    def outcome(controls: Controls) -> Outcome:
        return sides(controls["micro_batches"]).outcome(controls["encode_batch"], blocks_of(controls))

    return outcome


CLOSED_FORM = ClosedForm((WAA_C.name, WAA_M.name), _steady)
