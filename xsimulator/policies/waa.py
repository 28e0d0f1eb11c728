"""WAA, workload-aware allocation (paper section 4.1; spec section 3.2): encoding and decoding on devices of their own.

The encoding side hands over B_E sequences every T_E seconds, the period of its slowest stage; the decoding side merges
them between two iterations. With k iterations from one handover to the next the decoding side sees exactly RRA's
decoding phase with N_D = k, so its batch is a sawtooth, and the k at which those iterations last T_E is the fixed point
of B_D = B_E · E[D] · T_D(B_D) / T_E with each iteration at its own batch. Where handovers come faster than iterations,
m of them join at each, and B_D = m · B_E · E[D].

Where memory doesn't hold the fixed point's residents (its 99.9th percentile), the encoding side waits: room is kept
for a query when its encoding begins, so that waiting comes before its latency counts.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from exegpt.policies.waa import most_underway
from exegpt.schedule import BLOCK_SIZE
from xsimulator.handover import handover_seconds
from xsimulator.memory import Reservation
from xsimulator.outcome import Demand, Lifetime, Outcome
from xsimulator.pipeline import tandem
from xsimulator.scenario import Scenario
from xsimulator.steady_state import length_biased_context

Array = NDArray[np.float64]


MOST_JOINED = 4096
"""Handovers that join one iteration at most."""
_QUANTILES = 32
_SHUFFLED = np.concatenate([np.random.default_rng(seed).permutation(_QUANTILES) for seed in range(8)])
"""Batches that are followed through the encoding side, by the quantile of their time."""
_ROUNDS = 60
"""After which at the latest a crowded decoding side's rate and residents agree."""


@dataclass(frozen=True)
class Encoding:
    """The encoding side, seconds."""

    period: float
    """T_E: from one batch to the next, the slowest stage or its transfer."""
    alone: float
    """From a batch's start to its end on the last stage, where none is in its way."""
    traversal: float
    """The same with others before and behind it."""
    handover: float
    """From there until the decoding side can merge it."""
    deviation: float
    """Of a batch's encoding time, for its lengths vary."""
    busy: Array
    """[stages]: seconds of work per batch."""


def encoding(scenario: Scenario, encode_batch: int) -> Encoding:
    """The encoding side with batches of B_E, one after the other through its stages.

    Their lengths vary, so that short batches wait behind long ones: some hundred, at the quantiles of their law, are
    followed through the stages, with no more under way than the policy allows.
    """
    found = scenario.once(("encoding", scenario.encode, encode_batch), lambda: _encoding(scenario, encode_batch))
    handover = handover_seconds(scenario, encode_batch * scenario.workload.input.mean)
    return replace(found, handover=handover, period=max(found.period, handover / 2))


def _encoding(scenario: Scenario, encode_batch: int) -> Encoding:
    """The same where nothing is handed over."""
    side, law = scenario.encode, scenario.workload.input
    seconds = side.each(lambda group: group.encode(encode_batch, law))
    hops = scenario.hops(side, encode_batch * law.mean)
    alone, period, traversal = float(seconds.sum() + hops.sum()), float(seconds.max()), 0.0
    deviation = side.encode_deviation(encode_batch, law)
    if len(side.stages) > 1:
        drawn = side.each(lambda group: group.encode_parts(encode_batch, law, _QUANTILES))[_SHUFFLED]
        period, traversal, deviation = tandem(drawn, hops, most_underway(len(side.stages)))
    return Encoding(period, alone, max(traversal, alone), 0.0, deviation, seconds)


_BATCHES: list[int] = np.unique(np.rint(2.0 ** np.arange(0, 14, 0.5))).astype(int).tolist()
"""Between which the encoding side is taken to be linear."""


def between(scenario: Scenario, batch: float) -> tuple[Encoding, float]:
    """The encoding side with `batch` prompts at once on average, on a line between some whole numbers of them; and the
    seconds that one more takes.
    """
    place = min(bisect.bisect_right(_BATCHES, batch), len(_BATCHES) - 1)
    low, high = _BATCHES[place - 1], _BATCHES[place]
    few, many = encoding(scenario, low), encoding(scenario, high)
    share = (batch - low) / (high - low)
    pairs = zip(vars(few).values(), vars(many).values(), strict=True)
    more = (many.alone - few.alone) / (high - low)
    return Encoding(*((1 - share) * one + share * other for one, other in pairs)), more


def iteration(
    scenario: Scenario, batch: Array, context: Array, micro_batches: int, joined: Array
) -> tuple[Array, Array]:
    """Seconds of decoding iterations of `batch` sequences with these mean contexts [iterations], and of each stage's
    work in them [iterations, stages]; `joined` of that is for those who join.

    With equal micro-batches the pipeline's recurrence repeats itself: an iteration lasts as long as its slowest stage
    has micro-batches to do, or as a micro-batch needs to come around.
    """
    side = scenario.decode
    share = batch / micro_batches
    cells = side.decode(share, context) + joined / micro_batches
    around = cells.sum(axis=-1) + scenario.hops(side, float(np.max(share))).sum()
    return np.maximum(micro_batches * cells.max(axis=-1), around), micro_batches * cells


@dataclass(frozen=True)
class Cycle:
    """The decoding side from one handover to the next; whole iterations, or one that several handovers join."""

    stride: float
    """k: iterations per handover; 1/m where m handovers join one."""
    seconds: Array
    """[max(k, 1)]: each iteration."""
    runs: Array
    """[max(k, 1)]: whether there is one, for it takes somebody to decode; how often, on average."""
    busy: Array
    """[stages]: seconds of work per handover."""

    @property
    def period(self) -> float:
        """Seconds per handover."""
        return float(self.seconds @ self.runs) * min(self.stride, 1.0)

    def lived(self, need: Array) -> Array:
        """Seconds of the first `need` iterations after a handover, for somebody who is there for all of them."""
        before = np.concatenate([[0.0], np.cumsum(self.seconds)])
        cycles, rest = np.divmod(need.astype(np.intp), len(self.seconds))
        seconds: Array = cycles * before[-1] + before[rest]
        return seconds


def cycle(scenario: Scenario, encode_batch: int, micro_batches: int, stride: float) -> Cycle:
    """The decoding side at a given stride: whole numbers, or any number below one."""
    if stride >= 1:
        steady = scenario.steady(int(stride))
        batch, context = encode_batch * steady.active, steady.context
    else:
        need, p = scenario.iterations
        batch = np.array([encode_batch / stride * float(need @ p)])
        context = np.array([length_biased_context(scenario.workload, scenario.encoder_decoder)])
    share = min(stride, 1.0)
    joined = np.zeros((len(batch), len(scenario.decode.stages)))
    joined[0] = side_work(scenario, encode_batch / share)
    seconds, work = iteration(scenario, batch, context, micro_batches, joined)
    runs = np.minimum(1.0, batch)
    return Cycle(stride, seconds, runs, share * runs @ work)


def side_work(scenario: Scenario, encode_batch: float) -> Array:
    """[decoding stages]: seconds in which an encoder-decoder's decoders take over a batch of encoded prompts."""
    tokens = encode_batch * scenario.workload.input.mean
    return scenario.decode.handover(tokens)


def blocks(scenario: Scenario, encode_batch: int, stride: float, underway: float) -> int:
    """KV blocks held on the decoding side, its 99.9th percentile: by its residents and, since room is kept from the
    moment that a batch's encoding begins, by the `underway` batches that are being encoded and handed over.
    """
    held = scenario.reservation(max(stride, 1.0)).times(1.0 / min(stride, 1.0))
    phases = np.ceil(scenario.workload.output.max / max(stride, 1.0)) / min(stride, 1.0) + underway
    together = held + scenario.reservation(None).times(underway)
    return together.quantile(encode_batch, encode_batch * float(phases))


@dataclass(frozen=True)
class Decoding:
    """The decoding side at its fixed point: between two cycles, `share` of the slower one."""

    fast: Cycle
    slow: Cycle
    share: float

    @property
    def stride(self) -> float:
        """k: iterations per handover, on average."""
        return (1 - self.share) * self.fast.stride + self.share * self.slow.stride

    @property
    def period(self) -> float:
        """Seconds per handover."""
        return (1 - self.share) * self.fast.period + self.share * self.slow.period

    @property
    def busy(self) -> Array:
        """[stages]: seconds of work per handover."""
        return (1 - self.share) * self.fast.busy + self.share * self.slow.busy

    def lived(self, need: Array) -> Array:
        """Seconds of the first `need` iterations after a handover."""
        return (1 - self.share) * self.fast.lived(need) + self.share * self.slow.lived(need)


def fixed_point(scenario: Scenario, encode_batch: int, micro_batches: int, period: float) -> Decoding:
    """The decoding side under a handover every `period` seconds, memory aside; its quickest cycle where even that one
    lasts longer.
    """

    def at(stride: float) -> Cycle:
        return cycle(scenario, encode_batch, micro_batches, stride)

    fast = at(1.0)
    if fast.period > period:
        joined = at(1.0 / MOST_JOINED)
        if joined.period < period:
            joined, _ = bracket(at, period, joined, fast, ratio=1.001)
        return Decoding(joined, joined, 0.0)
    slow = at(max(1, int(scenario.iterations[0].max())))
    if slow.period <= period:  # everybody has left before the next handover
        return Decoding(slow, slow, 0.0)
    fast, slow = bracket(at, period, fast, slow)
    return Decoding(fast, slow, (period - fast.period) / (slow.period - fast.period))


def bracket(
    at: Callable[[float], Cycle], period: float, fast: Cycle, slow: Cycle, ratio: float | None = None
) -> tuple[Cycle, Cycle]:
    """The slowest cycle that takes `period` at most, and the next one: at whole strides, or (`ratio`) at any that are
    so close. `fast` takes no longer than that, `slow` does.

    Periods grow almost in proportion to the stride, so the next stride tried is where the line between the two would
    be, as long as that halves what lies between them; else the middle.
    """
    halved = True
    while (slow.stride > ratio * fast.stride) if ratio else (slow.stride - fast.stride > 1):
        low, high = fast.stride, slow.stride
        share = (period - fast.period) / (slow.period - fast.period) if halved else 0.5
        if ratio:
            nearest = (ratio**0.5, 1 / ratio**0.5)
            stride = min(max(low + share * (high - low), low * nearest[0]), high * nearest[1])
        else:
            stride = min(max(int(low + share * (high - low)), low + 1), high - 1)
        tried = at(stride)
        fast, slow = (tried, slow) if tried.period <= period else (fast, tried)
        halved = slow.stride - fast.stride <= (high - low) / 2
    return fast, slow


@dataclass(frozen=True)
class Flow:
    """Both sides together."""

    throughput: float
    """Sequences per second."""
    encoder: Encoding
    decoder: Decoding
    resident: float
    """B_D: sequences being decoded just after a handover."""
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
    underway = 1.0 + (encoder.traversal + encoder.handover) / encoder.period
    return resident, blocks(scenario, encode_batch, stride, underway)


def _crowds_anyway(scenario: Scenario, micro_batches: int) -> bool:
    """Whether memory doesn't hold the residents of batches of one."""
    encoder = encoding(scenario, 1)
    decoder = fixed_point(scenario, 1, micro_batches, encoder.period)
    resident, need = _demand(scenario, 1, encoder, decoder)
    return need > room_for(scenario, resident, micro_batches)


def room_for(scenario: Scenario, resident: float, micro_batches: int) -> int:
    """KV blocks that fit on every decoding stage beside the workspace of `resident` sequences, as far as those fit."""
    need, p = scenario.iterations
    each = scenario.reservation(1).mean / max(float(need @ p), 1.0)
    most = scenario.room(1.0, "decode") / each
    tokens = min(resident, max(most, 1.0)) / micro_batches
    return scenario.room(tokens, "decode")


@dataclass(frozen=True)
class Crowd:
    """A decoding side whose memory is full, as far as encoding keeps up with it."""

    rate: float
    """Sequences per second that finish."""
    resident: float
    batch: float
    """Prompts encoded together, as one of them finds it on average."""
    encoder: Encoding
    """With that batch."""
    more: float
    """Seconds that one more prompt takes."""
    seconds: Array
    """[1]: an iteration."""
    work: Array
    """[1, stages]: each stage's work in it."""


def crowd(scenario: Scenario, most: int, micro_batches: int, room: int) -> Crowd:
    """Whoever finishes makes room for the next, so that memory stays full on average, prompts are encoded a few at a
    time, as many (up to `most`) as find room until an iteration ends and the first stage is free again, and the number
    of residents hardly changes.

    n residents hold E[blocks | resident] each, the X · (encoding + handover + half an iteration) sequences on their
    way E[blocks], and the next one that doesn't fit yet leaves half of its own free; X = n / (E[D] · T_D(n)). The more
    residents, the more are on their way: n is where both fill the room, found by false position (Illinois).
    """
    each, held = scenario.reservation(None).mean, scenario.reservation(1).mean / mean_iterations(scenario)

    def left(found: Crowd) -> float:
        """Residents for whom there is room still."""
        encoder = found.encoder
        on_the_way = found.rate * (encoder.alone + encoder.handover + float(found.seconds[0]) / 2)
        return (room - each * (0.5 + on_the_way)) / held - found.resident

    few, many = (resident_crowd(scenario, n, most, micro_batches) for n in (1.0, max(room / held, 1.0)))
    above, below = left(few), left(many)
    if above <= 0:
        return few
    last = 0.0
    for _ in range(_ROUNDS):
        resident = (few.resident * -below + many.resident * above) / (above - below)
        found = resident_crowd(scenario, resident, most, micro_batches)
        rest = left(found)
        if abs(rest) <= 1e-9 * resident:
            break
        if rest > 0:
            few, above, below = found, rest, below / 2 if last > 0 else below
        else:
            many, below, above = found, rest, above / 2 if last < 0 else above
        last = rest
    return found


def resident_crowd(scenario: Scenario, resident: float, most: int, micro_batches: int) -> Crowd:
    """What so many residents make of the two sides, memory aside."""
    mean = mean_iterations(scenario)
    context = np.array([length_biased_context(scenario.workload, scenario.encoder_decoder)])
    joined = side_work(scenario, max(resident / mean, 1.0))  # who joined last is taken over meanwhile
    seconds, work = iteration(scenario, np.array([resident]), context, micro_batches, joined[None])
    one = float(seconds[0])
    rate = resident / (mean * one)
    batch = admitted_together(scenario, rate, one, most)
    encoder, more = between(scenario, batch)
    return Crowd(rate, resident, batch, encoder, more, seconds, work)


def admitted_together(scenario: Scenario, rate: float, iteration_s: float, most: int) -> float:
    """Prompts in a batch, as a prompt finds it, where they come one by one: itself and those (Poisson) that come until
    the side's first stage is free and an iteration ends; at most `most`.
    """

    def more_come(batch: float) -> float:
        return 1.0 + rate * max(between(scenario, batch)[0].period, iteration_s) - batch

    low, above = 1.0, more_come(1.0)
    for high in _BATCHES[1:]:
        if low >= most:
            break
        below = more_come(high)
        if below <= 0:
            return min(low + (high - low) * above / (above - below), float(most))
        low, above = float(high), below
    return float(most)


def mean_iterations(scenario: Scenario) -> float:
    """E[D]"""
    need, p = scenario.iterations
    return float(need @ p)


def crowded(scenario: Scenario, encode_batch: int, micro_batches: int, room: int) -> Flow:
    """The steady state where the decoding side's memory is full.

    B_E is then but the most that are encoded together: the more there are, the longer each is on its way and holds
    room that it doesn't decode in. So throughput falls with B_E once encoding keeps up, from a crest at batches of one.
    """
    found = crowd(scenario, encode_batch, micro_batches, room)
    key = ("crest", scenario.encode, scenario.decode, micro_batches, room)
    crest = scenario.once(key, lambda: crowd(scenario, 1, micro_batches, room).rate)
    rate = min(found.rate, encode_batch / encoding(scenario, encode_batch).period)
    deviation = float(np.hypot(found.encoder.deviation, found.more * (found.batch - 1) ** 0.5))
    # it seldom has two batches at once
    encoder = replace(found.encoder, traversal=found.encoder.alone, deviation=deviation)
    one = float(found.seconds[0])
    steady = Cycle(found.batch / (rate * one), found.seconds, np.ones(1), found.work[0])
    busy = np.concatenate([encoder.busy * (rate / found.batch), found.work[0] / one])
    blocks_held = min(room, room_for(scenario, found.resident, micro_batches))
    decoder = Decoding(steady, steady, 0.0)
    return Flow(rate, encoder, decoder, found.resident, blocks_held, busy, True, max(crest, rate), rate == found.rate)


def outcome(scenario: Scenario, encode_batch: int, micro_batches: int) -> Outcome:
    """A query lives through its batch's encoding, the handover, the wait for an iteration's end, and D iterations."""
    found = flow(scenario, encode_batch, micro_batches)
    encoder, decoder, law = found.encoder, found.decoder, scenario.workload.input
    shift = 1.0 if scenario.first_by_encoding else 0.0
    one = float(decoder.fast.seconds.mean())
    runs = min(1.0, decoder.period / encoder.period)  # a side that has run empty begins at once
    merged = encoder.traversal + encoder.handover + runs * one / 2

    def lifetime(lengths: Array) -> Lifetime:
        need = np.maximum(lengths - shift, 0.0)
        seconds = np.where(need > 0, merged + decoder.lived(need), encoder.traversal)
        waiting = np.where(need > 0, one / 12**0.5, 0.0)
        return Lifetime(seconds, np.hypot(encoder.deviation, waiting), waiting)

    first = encoder.traversal if shift else merged + float(decoder.lived(np.ones(1))[0])
    return Outcome(
        throughput=found.throughput,
        lifetime=lifetime,
        first_token=(first, encoder.deviation),
        demand=Demand(found.blocks, found.resident / micro_batches),
        busy=found.busy,
        binding="decoding" if found.waits else "encoding",
        encode_demand=Demand(
            prompt_blocks(scenario, encode_batch, encoder.handover / encoder.period), encode_batch * law.mean
        ),
        crest=found.crest,
        falls=found.falls,
    )


def prompt_blocks(scenario: Scenario, encode_batch: int, leaving: float) -> int:
    """KV blocks that an encoding stage holds, its 99.9th percentile: the batch it works on and those that leave."""
    if scenario.encoder_decoder:
        return 0
    law, batches = scenario.workload.input, 1.0 + np.ceil(leaving)
    each = Reservation(
        (law.mean + (BLOCK_SIZE - 1) / 2) / BLOCK_SIZE,
        (law.std**2 + BLOCK_SIZE**2 / 12) / BLOCK_SIZE**2,
        0.0,
        -(-law.max // BLOCK_SIZE),
    )
    return each.quantile(encode_batch * batches, encode_batch * batches)


def decode_batch(scenario: Scenario, encode_batch: int, micro_batches: int) -> int:
    """B_D, rounded: sequences being decoded just after a handover."""
    return max(1, round(flow(scenario, encode_batch, micro_batches).resident))
