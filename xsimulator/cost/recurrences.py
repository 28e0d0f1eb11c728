"""The recurrences as in recurrences.c, which Python loads instead where it was compiled.

The arithmetic is the same, cell by cell, so that results are equal to the last digit. See recurrences.pyi for the
arguments.
"""

import bisect
import math
from dataclasses import dataclass, field

import numpy as np

from xcore.arrays import Array, Places
from xcore.grid_arrays import bilerp, check_arrays, check_sizes, lerp_rows

Row = list[float]

_LONGEST_CYCLE = 12
"""Phases of the longest cycle to look for."""


def decode_seconds(
    places: Places,
    layers: Array,
    sequences: Array,
    rest: Array,
    batches: Array,
    contexts: Array,
    attention: Array,
    batch: Array,
    context: Array,
    out: Array,
) -> None:
    """Write the seconds of a `DecodeTableCache` at `batch` and `context` [n] to `out` [n, stages of the side]."""
    check_arrays((places,), np.intp)
    check_arrays((layers, sequences, rest, batches, contexts, attention, batch, context, out))
    stages = out.size // batch.size if batch.size else 0
    check_sizes(places.size > 0 < sequences.size and layers.size == places.size and context.size == batch.size)
    check_sizes(rest.size == sequences.size * places.size and attention.size == batches.size * contexts.size > 0)
    check_sizes(out.size == batch.size * stages)
    if not batch.size:
        return
    check_sizes(0 <= places.min() <= places.max() < stages)
    decoding = np.maximum(batch.ravel(), 1.0)
    attended = bilerp(attention.ravel(), batches.ravel(), contexts.ravel(), decoding, context.ravel())
    each = lerp_rows(sequences.ravel(), rest.reshape(sequences.size, -1), decoding)
    out.reshape(batch.size, stages)[:, places] = each + layers.ravel() * attended[:, None]


def rounds(seconds: Array, out: Array, micro_batches: float, way: float) -> None:
    """Write the seconds of iterations of equal micro-batches to `out` [iterations]."""
    check_arrays((seconds, out))
    micro_batches, way = float(micro_batches), float(way)
    check_sizes(seconds.size % out.size == 0 if out.size else not seconds.size)
    if not out.size:
        return
    each = seconds.reshape(out.size, -1)
    around, slowest = np.full(out.size, way), np.zeros(out.size)
    for stage in each.T:
        around, slowest = around + stage, np.maximum(slowest, stage)
    out.ravel()[:] = np.maximum(micro_batches * slowest, around)


def phases(
    encode: Array,
    decode: Array,
    encode_hop: Array,
    decode_hop: Array,
    decoded: Array,
    micro_batches: int,
    joins: int,
    most: int,
) -> tuple[float, float, tuple[float, float], tuple[float, float]]:
    """Return the figures of a `PhaseTimes` in order, and write `decoded` [iterations]."""
    check_arrays((encode, decode, encode_hop, decode_hop, decoded))
    stages, iterations = encode_hop.size, decoded.size
    check_sizes(stages * iterations > 0 and micro_batches > 0 < joins and most > 0 and decode_hop.size == stages)
    variants = decode.size // (stages * iterations)
    check_sizes(
        variants in (1, micro_batches) and decode.size == stages * iterations * variants and encode.size % stages == 0
    )
    cells = decode.reshape(iterations, variants, stages).tolist()
    phase = _Phase(
        encode.reshape(-1, stages).tolist(),
        [cell if variants > 1 else cell * micro_batches for cell in cells],
        encode_hop.tolist(),
        decode_hop.tolist(),
        int(joins),
        [0.0] * stages,
        [0.0] * micro_batches,
    )
    if most > 1:
        period, started = _settled(phase, most)
    else:
        started = phase.run(0)
        period = max(phase.free_at)
    return phase.summary(started, period, decoded)


@dataclass
class _Phase:
    """A phase: encoding micro-batches, then decoding iterations."""

    encode: list[Row]
    """[micro-batches, stages]."""
    decode: list[list[Row]]
    """[iterations, micro-batches, stages]."""
    encode_hop: Row
    decode_hop: Row
    joins: int
    """Micro-batches that new sequences join, in turn if they are fewer than all."""
    free_at: Row
    """[stages]: when each stage is free."""
    previous: Row
    """[micro-batches]: when each one's last token is out."""
    encoded: Row = field(default_factory=list)
    """When each encoding micro-batch leaves the last stage."""
    out: list[Row] = field(default_factory=list)
    """[iterations, micro-batches]: when each cell leaves the last stage."""

    def run(self, turn: int) -> float:
        """Run the phase; return when it starts."""
        started = self.free_at[0]
        self.encoded = [_passed(self.free_at[0], cell, self.encode_hop, self.free_at) for cell in self.encode]
        self.out = []
        for iteration, cells in enumerate(self.decode):
            ends = []
            for m, seconds in enumerate(cells):
                ready = max(self.free_at[0], self.previous[m])
                if iteration == 0:
                    ready = max(ready, self._encoded_for(m, turn))
                    if m == 0 and not self.encode:
                        started = ready
                self.previous[m] = _passed(ready, seconds, self.decode_hop, self.free_at)
                ends.append(self.previous[m])
            self.out.append(ends)
        return started

    def _encoded_for(self, micro_batch: int, turn: int) -> float:
        """Return when the sequences that join a micro-batch have been encoded; 0 if none join."""
        encodes, count = len(self.encoded), len(self.previous)
        if not encodes:
            return 0.0
        if self.joins >= count:
            return self.encoded[max(0, min((micro_batch + 1) * encodes // count - 1, encodes - 1))]
        place = (micro_batch - turn) % count
        return self.encoded[place * encodes // self.joins] if place < self.joins else 0.0

    def summary(
        self, started: float, period: float, decoded: Array
    ) -> tuple[float, float, tuple[float, float], tuple[float, float]]:
        """Return the figures, and write when each iteration's last micro-batch is out."""
        encoded = [end - started for end in self.encoded]
        out = [[end - started for end in ends] for ends in self.out]
        decoded.ravel()[:] = [max(ends) for ends in out]
        first = _mean_and_deviation(encoded) if encoded else (0.0, 0.0)
        return period, encoded[-1] if encoded else 0.0, first, _mean_and_deviation(out[0])


def _settled(phase: _Phase, most: int) -> tuple[float, float]:
    """Run phases until the state repeats, at most `most`; return the seconds per phase, and the last one's start."""
    states: list[Row] = []
    started, count = phase.run(0), len(phase.previous)
    for n in range(most):
        states.append([*phase.free_at, *phase.previous])
        for back in range(1, min(n, _LONGEST_CYCLE) + 1):
            if phase.joins < count and back * phase.joins % count:
                continue  # another micro-batch's turn
            later = _later_by(states[-1], states[-1 - back])
            if later >= 0.0:
                return later / back, started
        started = phase.run((n + 1) * phase.joins % count)
    longest = max([0.0, *(b - a for a, b in zip(states[most // 2], states[-1], strict=True))])
    return longest / max(1, most - 1 - most // 2), started


def _passed(ready: float, seconds: Row, hop: Row, free_at: Row) -> float:
    """Run one item through the stages from `ready` on; return when it leaves the last one."""
    for s, own in enumerate(seconds):
        if s:
            ready = max(free_at[s], ready + hop[s])
        ready += own
        free_at[s] = ready
    return ready


def _later_by(state: Row, earlier: Row) -> float:
    """Return the time by which a state is later than an earlier one; negative if it differs between places."""
    low, high = math.inf, -math.inf
    for a, b in zip(state, earlier, strict=True):
        low, high = min(low, a - b), max(high, a - b)
        if high - low > 1e-9 * high:
            return -1.0
    return high


def _mean_and_deviation(values: Row) -> tuple[float, float]:
    total = squares = 0.0
    for value in values:
        total += value
    mean = total / len(values)
    for value in values:
        squares += (value - mean) * (value - mean)
    return mean, math.sqrt(squares / len(values))


def iterations(decode: Array, hop: Array, previous: Array, starts: Array, ends: Array) -> None:
    """Write the start and end of every cell of `decode` [iterations, micro-batches, stages], from an empty pipeline."""
    check_arrays((decode, hop, previous, starts, ends))
    row = hop.size * previous.size
    check_sizes(row > 0 and decode.size % row == 0 and starts.size == ends.size == decode.size)
    free_at, hops, waits = [0.0] * hop.size, hop.tolist(), previous.tolist()
    begun, done = starts.reshape(-1, hop.size), ends.reshape(-1, hop.size)
    for cell, seconds in enumerate(decode.reshape(-1, hop.size).tolist()):
        m = cell % previous.size
        begun[cell], done[cell] = _cell(waits[m], seconds, hops, free_at)
        waits[m] = free_at[-1]
    previous.ravel()[:] = waits


def _cell(ready: float, seconds: Row, hops: Row, free_at: Row, first_hop: bool = False) -> tuple[Row, Row]:
    """Run a cell from `ready` on; return its start and its end on each stage."""
    begun, done = [], []
    for s, own in enumerate(seconds):
        arrives = ready + hops[s] if s or first_hop else ready
        ready = max(free_at[s], arrives)
        begun.append(ready)
        ready += own
        free_at[s] = ready
        done.append(ready)
    return begun, done


def tandem(seconds: Array, hop: Array, starts: Array, outs: Array, most: int) -> None:
    """Write the start of every item [items] of `seconds` [items, stages], and the time it leaves the last stage."""
    check_arrays((seconds, hop, starts, outs))
    check_sizes(hop.size > 0 < most and seconds.size == starts.size * hop.size and outs.size == starts.size)
    free_at, hops = [0.0] * hop.size, hop.tolist()
    for i, own in enumerate(seconds.reshape(-1, hop.size).tolist()):
        starts[i] = max(free_at[0], float(outs[i - most]) if i >= most else 0.0)
        outs[i] = _passed(float(starts[i]), own, hops, free_at)


def follow(
    seconds: Array,
    hops: Array,
    ready: Array,
    free: Array,
    busy: Array,
    starts: Array,
    ends: Array,
    now: float,
    until: float,
    ahead: bool,
) -> tuple[int, float]:
    """Run iterations until the next one would be decided at `until` or later; return their number, and that time."""
    check_arrays((seconds, hops, ready, free, busy, starts, ends))
    now, until, ahead = float(now), float(until), bool(int(ahead))
    count, stages = ready.size, free.size
    check_sizes(count * stages > 0 and seconds.size % (count * stages) == 0 and hops.size == count * stages)
    check_sizes(busy.size == stages and starts.size == ends.size == seconds.size)
    shape, free_at, waits, works = (-1, count, stages), free.tolist(), ready.tolist(), busy.tolist()
    cells, begun, done = seconds.reshape(shape), starts.reshape(shape), ends.reshape(shape)
    ways, ran = hops.reshape(count, stages).tolist(), 0
    for iteration in cells.tolist():
        for p, own in enumerate(iteration):
            begun[ran, p], done[ran, p] = _cell(max(now, waits[p]), own, ways[p], free_at, first_hop=True)
            works = [work + more for work, more in zip(works, own, strict=True)]
            waits[p] = free_at[-1]
        now = float(begun[ran, 0, 0]) if ahead else max(now, free_at[0])
        ran += 1
        if now >= until:
            break
    free.ravel()[:], ready.ravel()[:], busy.ravel()[:] = free_at, waits, works
    return ran, now


def repeated(
    seconds: Array,
    hops: Array,
    repeats: Array,
    waits: Array,
    gives: Array,
    firsts: Array,
    lasts: Array,
    frees: Array,
) -> None:
    """Run iterations one after the other from an empty pipeline, each one `repeats` [n] times."""
    check_arrays((seconds, hops, repeats, waits, gives, firsts, lasts, frees))
    count, cells = repeats.size, waits.size
    check_sizes(count > 0 < cells and cells % count == 0 and seconds.size >= cells and seconds.size % cells == 0)
    check_sizes(hops.size == seconds.size and gives.size == frees.size == count and firsts.size == lasts.size == cells)
    micro_batches, stages = cells // count, seconds.size // cells
    shape = (count, micro_batches, stages)
    rows = _Rows(
        seconds.reshape(shape).tolist(),
        hops.reshape(shape).tolist(),
        waits.reshape(count, -1).tolist(),
        gives.tolist(),
        [0.0] * stages,
        [0.0] * micro_batches,
        [0.0] * (2 * stages - 1),
    )
    first, last = firsts.reshape(count, -1), lasts.reshape(count, -1)
    for row, times in enumerate(repeats.tolist()):
        rows.run(row)
        first[row] = rows.token
        rows.run_again(row, times - 1.0)
        last[row] = rows.token
        frees[row] = rows.free_at[0]


@dataclass
class _Rows:
    """Iterations one after the other through a pipeline, micro-batch by micro-batch."""

    seconds: list[list[Row]]
    hops: list[list[Row]]
    waits: list[Row]
    gives: Row
    free_at: Row
    """[stages]: when each stage is free."""
    token: Row
    """[micro-batches]: when each one's last token is out."""
    outs: Row
    """When the last token-giving iterations were out, as many as may be in flight."""
    sent: int = 0

    def run(self, row: int) -> None:
        """Run a row once: decoding micro-batches wait for their tokens, a row of empty ones for all stages."""
        some, free_at, stages = False, self.free_at, len(self.free_at)
        for m, wait in enumerate(self.waits[row]):
            if wait < 0.0:
                continue
            seconds, hops = self.seconds[row][m], self.hops[row][m]
            ready = max(self.token[m] if wait > 0.0 else 0.0, free_at[0])
            self.token[m] = _passed(ready, seconds, hops, free_at)
            some = True
        if not some:
            free_at[0] = max(free_at)
        if stages > 1:
            if self.gives[row]:
                self.outs[self.sent % len(self.outs)] = free_at[-1]
                self.sent += 1
            free_at[0] = max(free_at[0], self.outs[self.sent % len(self.outs)])
        for m, wait in enumerate(self.waits[row]):
            if wait < 0.0:
                self.token[m] = free_at[0]

    def run_again(self, row: int, repeats: float) -> None:
        """Repeat a row: once one repeat has moved everything by the same time, the rest run at once."""
        left = repeats
        while left > 0.0:
            before = [*self.free_at, *self.token]
            self.run(row)
            later = _later_by([*self.free_at, *self.token], before)
            if later >= 0.0:
                for times in (self.free_at, self.token, self.outs):
                    times[:] = [time + later * (left - 1.0) for time in times]
                return
            left -= 1.0


def slots(
    lengths: Array,
    stays: Array,
    starts: Array,
    ends: Array,
    iterations: Array,
    at: Array,
    prompt: Array,
    froms: Array,
    untils: Array,
    budget: float,
    share: float,
    idle: float,
    residents: int,
) -> tuple[int, int]:
    """Follow prompts of some `lengths` [prompts] that share iterations; return the iterations and chunks written."""
    check_arrays((lengths, stays, starts, ends, iterations, at, prompt, froms, untils))
    budget, share, idle = float(budget), float(share), float(idle)
    check_sizes(residents > 0 and stays.size == starts.size == ends.size == lengths.size)
    check_sizes(at.size == prompt.size == froms.size == untils.size == iterations.size)
    turns = _Turns(stays.tolist(), iterations.size, starts, ends)
    chunks = turns.follow(lengths.tolist(), budget, share, idle, residents)
    if chunks is None:
        return 0, 0
    iterations.ravel()[: len(turns.iterations)] = turns.iterations
    for array, column in zip((at, prompt, froms, untils), zip(*chunks, strict=True), strict=False):
        array.ravel()[: len(chunks)] = column
    return len(turns.iterations), len(chunks)


@dataclass
class _Turns:
    """Prompts that share iterations, first come, first served."""

    stays: Row
    most: int
    starts: Array
    ends: Array
    iterations: Row = field(default_factory=list)
    """Iterations with prompts or empty slots."""
    _decoding: Row = field(default_factory=list)
    """The last iterations of decoding sequences, in order."""
    _prefilled: int = 0
    """Prompts whose last iteration is over."""

    def follow(
        self, lengths: Row, budget: float, share: float, idle: float, residents: int
    ) -> list[tuple[float, float, float, float]] | None:
        """Return each chunk's iteration, prompt and range; None if the arrays are too short."""
        chunks: list[tuple[float, float, float, float]] = []
        free: Row = []
        now, room = -1.0, 0.0
        for j, length in enumerate(lengths):
            arrival, done = 0.0 if j < residents else free.pop(0), 0.0
            while done < length:
                if room <= 0.0 or arrival > now:
                    empty = max(arrival - idle, now + 1.0)
                    while empty < arrival:
                        if self._begin(empty, j) is None:
                            return None
                        empty += 1.0
                    now = max(arrival, now + 1.0)
                    decoding = self._begin(now, j)
                    if decoding is None:
                        return None
                    room = budget - share * decoding
                    if room <= 0.0:
                        continue
                if len(chunks) == self.most:
                    return None
                if done == 0.0:
                    self.starts[j] = now
                part = min(length - done, room)
                chunks.append((now, float(j), done, done + part))
                done += part
                room -= part
            self.ends[j] = now
            bisect.insort(free, now + self.stays[j] + idle + 1.0)
        return chunks

    def _begin(self, now: float, prompt: int) -> int | None:
        """Begin iteration `now`; return how many sequences decode in it, or None if there are too many iterations."""
        if len(self.iterations) == self.most:
            return None
        while self._prefilled < prompt and self.ends[self._prefilled] < now:
            bisect.insort(self._decoding, float(self.ends[self._prefilled]) + self.stays[self._prefilled])
            self._prefilled += 1
        del self._decoding[: bisect.bisect_left(self._decoding, now)]
        self.iterations.append(now)
        return len(self._decoding)


def transfers(order: Places, prepared: Array, seconds: Array, arrived: Array, senders: int, receivers: int) -> None:
    """Write when items have `arrived` [items] that are sent in an `order`, each from when it is `prepared`."""
    check_arrays((order,), np.intp)
    check_arrays((prepared, seconds, arrived))
    check_sizes(senders > 0 < receivers and order.size == prepared.size == seconds.size == arrived.size)
    check_sizes(not order.size or 0 <= order.min() <= order.max() < order.size)
    sending, receiving = [0.0] * senders, [0.0] * receivers
    begins, lasts = prepared.tolist(), seconds.tolist()
    for turn, item in enumerate(order.tolist()):
        sender, receiver = item % senders, turn % receivers
        end = max(begins[item], sending[sender], receiving[receiver]) + lasts[item]
        sending[sender] = receiving[receiver] = arrived[item] = end


def mixture_quantile(mean: Array, deviation: Array, p: Array, q: float) -> float:
    """Return the quantile `q` of a mixture of normal distributions, to a millionth."""
    check_arrays((mean, deviation, p))
    check_sizes(0 < mean.size == deviation.size == p.size)
    parts = list(zip(mean.tolist(), deviation.tolist(), p.tolist(), strict=True))
    low, high = min(m - 9.0 * d for m, d, _ in parts), max(m + 9.0 * d for m, d, _ in parts)
    while high - low > 1e-6 * (abs(high) + abs(low)) + 1e-300:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _share_below(parts, middle) < q - 1e-12 else (low, middle)
    return high


def _share_below(parts: list[tuple[float, float, float]], x: float) -> float:
    """Return the share of a mixture of normal distributions at or below x."""
    share = 0.0
    for mean, deviation, p in parts:
        beyond, far = x - mean, 6.0 * deviation
        if beyond >= far:
            share += p
        elif beyond > -far:
            share += p * 0.5 * math.erfc(-beyond / (deviation * 1.4142135623730951))
    return share
