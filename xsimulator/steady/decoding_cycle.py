"""Decoding on devices of its own (WAA) under periodic KV transfers: cycles of iterations, the fixed point of B_D."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xsimulator.cost.recurrences import rounds
from xsimulator.steady.scenario import Scenario

Array = NDArray[np.float64]

MOST_JOINED = 4096
"""KV transfers that join one iteration at most."""


def iteration(
    scenario: Scenario, batch: Array, context: Array, micro_batches: int, joining: float
) -> tuple[Array, Array]:
    """Seconds of decoding iterations of `batch` sequences with these mean contexts [iterations], and of each stage's
    work for a micro-batch in them [iterations, stages]; `joining` sequences are taken over in the first.

    With equal micro-batches the pipeline's recurrence repeats itself: an iteration lasts as long as its slowest stage
    has micro-batches to do, or as a micro-batch needs to come around.
    """
    side = scenario.replica.decode
    share = batch / micro_batches
    cells = side.decode(share, context)
    if scenario.load.encoder_decoder:
        cells[0] += side.cross_projection(joining * scenario.load.prompts.mean) / micro_batches
    seconds = np.empty(len(batch))
    rounds(cells, seconds, micro_batches, side.hops_together(float(share.max())))
    return seconds, cells


@dataclass(frozen=True)
class Cycle:
    """The decoding side from one KV transfer to the next; whole iterations, or one that several KV transfers join."""

    stride: float
    """k: iterations per KV transfer; 1/m where m KV transfers join one."""
    batch: Array
    """[max(k, 1)]: sequences that each iteration decodes, on average."""
    seconds: Array
    """[max(k, 1)]: each iteration."""
    runs: Array
    """[max(k, 1)]: how often it has any sequence, on average."""
    cells: Array
    """[max(k, 1), stages]: each stage's work for a micro-batch in it."""
    micro_batches: int

    @functools.cached_property
    def period(self) -> float:
        """Seconds per KV transfer."""
        return float(self.seconds @ self.runs) * min(self.stride, 1.0)

    @property
    def residents(self) -> float:
        """Sequences times the seconds that they are decoded in, per KV transfer."""
        return float(self.batch @ self.seconds) * min(self.stride, 1.0)

    @property
    def busy(self) -> Array:
        """[stages]: seconds of work per KV transfer."""
        return min(self.stride, 1.0) * self.micro_batches * (self.runs @ self.cells)

    def lived(self, need: Array) -> Array:
        """Seconds of the first `need` iterations after a KV transfer, for a sequence that takes part in all of them."""
        before = np.concatenate([[0.0], np.cumsum(self.seconds)])
        cycles, rest = np.divmod(need.astype(np.intp), len(self.seconds))
        seconds: Array = cycles * before[-1] + before[rest]
        return seconds


def cycle(scenario: Scenario, encode_batch: int, micro_batches: int, stride: float) -> Cycle:
    """The decoding side at a given stride: whole numbers, or any number below one."""
    load = scenario.load
    if stride >= 1:
        steady = load.steady(int(stride))
        batch, context = encode_batch * steady.active, steady.context
    else:
        batch = np.array([encode_batch / stride * load.mean_iterations])
        context = np.array([load.resident_context])
    seconds, cells = iteration(scenario, batch, context, micro_batches, encode_batch / min(stride, 1.0))
    return Cycle(stride, batch, seconds, np.minimum(1.0, batch), cells, micro_batches)


@dataclass(frozen=True)
class Decoding:
    """The decoding side at its fixed point: between two cycles, `share` of the slower one."""

    fast: Cycle
    slow: Cycle
    share: float

    @property
    def stride(self) -> float:
        """k: iterations per KV transfer, on average."""
        return (1 - self.share) * self.fast.stride + self.share * self.slow.stride

    @property
    def period(self) -> float:
        """Seconds per KV transfer."""
        return (1 - self.share) * self.fast.period + self.share * self.slow.period

    @property
    def busy(self) -> Array:
        """[stages]: seconds of work per KV transfer."""
        return (1 - self.share) * self.fast.busy + self.share * self.slow.busy

    @property
    def residents(self) -> float:
        """Sequences times the seconds that they are decoded in, per KV transfer."""
        return (1 - self.share) * self.fast.residents + self.share * self.slow.residents

    def lived(self, need: Array) -> Array:
        """Seconds of the first `need` iterations after a KV transfer."""
        return (1 - self.share) * self.fast.lived(need) + self.share * self.slow.lived(need)


def fixed_point(scenario: Scenario, encode_batch: int, micro_batches: int, period: float) -> Decoding:
    """The decoding side under a KV transfer every `period` seconds, memory aside; its quickest cycle where even that
    one lasts longer.
    """

    def at(stride: float) -> Cycle:
        return cycle(scenario, encode_batch, micro_batches, stride)

    fast = at(1.0)
    if fast.period > period:
        slow, fast = fast, at(1.0 / MOST_JOINED)
        if fast.period >= period:
            return Decoding(fast, fast, 0.0)
        return in_turn(*bracket(at, period, fast, slow, ratio=1.001), period)
    slow = at(max(1, int(scenario.load.iterations[0].max())))
    if slow.period <= period:  # all sequences have finished before the next KV transfer
        return Decoding(slow, slow, 0.0)
    return in_turn(*bracket(at, period, fast, slow), period)


def in_turn(fast: Cycle, slow: Cycle, period: float) -> Decoding:
    """The two in turn, so that a KV transfer comes every `period` seconds."""
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
