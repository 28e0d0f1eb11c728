"""Disaggregated decoding (WAA) under periodic KV transfers: cycles of iterations, and the fixed point of B_D."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xsimulator.cost.recurrences import rounds
from xsimulator.steady.scenario import Scenario

MOST_JOINED = 4096
"""Most KV transfers that join one iteration."""


def iteration(
    scenario: Scenario, batch: Array, context: Array, micro_batches: int, joining: float
) -> tuple[Array, Array]:
    """Return the seconds of decode steps, and each stage's work for a micro-batch in them.

    A step has `batch` sequences with these mean contexts [iterations]. `joining` sequences are taken over in the first
    step. With equal micro-batches the pipeline's recurrence repeats itself. A step lasts as long as its slowest stage
    has micro-batches to do, or as a micro-batch takes around the pipeline.

    Returns:
        The seconds of the steps [iterations], and the stages' work [iterations, stages].
    """
    side = scenario.replica.decode
    share = batch / micro_batches
    cells = side.decode(share, context)
    if scenario.load.encoder_decoder:
        cells[0] += side.cross_projection(joining * scenario.load.prompts.mean) / micro_batches
    seconds = np.empty(len(batch))
    rounds(cells, seconds, micro_batches, side.hops_together(side.rows * float(share.max())))
    return seconds, cells


@dataclass(frozen=True)
class Cycle:
    """The decoding side from one KV transfer to the next: whole iterations, or one that several KV transfers join."""

    stride: float
    """k: iterations per KV transfer; 1/m if m KV transfers join one iteration."""
    batch: Array
    """[max(k, 1)]: sequences that each iteration decodes, on average."""
    seconds: Array
    """[max(k, 1)]: seconds of each iteration."""
    runs: Array
    """[max(k, 1)]: how often each iteration has any sequence, on average."""
    cells: Array
    """[max(k, 1), stages]: each stage's work for a micro-batch in each iteration."""
    micro_batches: int

    @functools.cached_property
    def period(self) -> float:
        """Return the seconds per KV transfer."""
        return float(self.seconds @ self.runs) * min(self.stride, 1.0)

    @property
    def residents(self) -> float:
        """Return the sequences times the seconds in which they are decoded, per KV transfer."""
        return float(self.batch @ self.seconds) * min(self.stride, 1.0)

    @property
    def busy(self) -> Array:
        """Return [stages]: seconds of work per KV transfer."""
        return min(self.stride, 1.0) * self.micro_batches * (self.runs @ self.cells)

    def lived(self, need: Array) -> Array:
        """Return the seconds of the first `need` iterations after a KV transfer, if a sequence decodes in each."""
        before = np.concatenate([[0.0], np.cumsum(self.seconds)])
        cycles, rest = np.divmod(need, len(self.seconds))
        seconds: Array = cycles * before[-1] + np.interp(rest, np.arange(len(before)), before)
        return seconds


def cycle(scenario: Scenario, encode_batch: int, micro_batches: int, stride: float) -> Cycle:
    """Return the decoding side at a given stride: a whole number, or any number below one."""
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
    """The decoding side at its fixed point: a mixture of two cycles, with the share `share` of the slower one."""

    fast: Cycle
    slow: Cycle
    share: float

    @property
    def stride(self) -> float:
        """Return k: iterations per KV transfer, on average."""
        return (1 - self.share) * self.fast.stride + self.share * self.slow.stride

    @property
    def period(self) -> float:
        """Return the seconds per KV transfer."""
        return (1 - self.share) * self.fast.period + self.share * self.slow.period

    @property
    def busy(self) -> Array:
        """Return [stages]: seconds of work per KV transfer."""
        return (1 - self.share) * self.fast.busy + self.share * self.slow.busy

    @property
    def residents(self) -> float:
        """Return the sequences times the seconds in which they are decoded, per KV transfer."""
        return (1 - self.share) * self.fast.residents + self.share * self.slow.residents

    def lived(self, need: Array) -> Array:
        """Return the seconds of the first `need` iterations after a KV transfer."""
        return (1 - self.share) * self.fast.lived(need) + self.share * self.slow.lived(need)


def fixed_point(scenario: Scenario, encode_batch: int, micro_batches: int, period: float) -> Decoding:
    """Return the decoding side under a KV transfer every `period` seconds; memory is not considered.

    If even the fastest cycle lasts longer than `period`, return that one.
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
    """Mix two cycles so that a KV transfer comes every `period` seconds on average."""
    return Decoding(fast, slow, (period - fast.period) / (slow.period - fast.period))


def bracket(
    at: Callable[[float], Cycle], period: float, fast: Cycle, slow: Cycle, ratio: float | None = None
) -> tuple[Cycle, Cycle]:
    """Return the slowest cycle that lasts at most `period`, and the next slower one.

    Strides are whole numbers or, with `ratio`, any two that are at most this ratio apart. `fast` must last at most
    `period`, and `slow` longer.

    Periods grow almost in proportion to the stride. The next stride tried is therefore the one at which the line
    through both reaches `period`, while this halves the interval; otherwise it is the middle.
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
