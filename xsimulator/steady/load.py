"""Load: a workload as steady states need it, with what is computed once for all schedules under it."""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xcore.batching.admission import Admission
from xcore.specs.schedule import BLOCK_SIZE
from xcore.specs.workload import Workload
from xsimulator.cost.memo import memoized
from xsimulator.steady.blocks import BlockDistribution, Reservation, grown_blocks
from xsimulator.steady.prompts import Prompts, kinds_of, thinned
from xsimulator.steady.residents import (
    Z95,
    Z999,
    Form,
    SteadyState,
    decode_iterations_of,
    length_biased_context,
    longest_of,
    steady_state,
)

Array = NDArray[np.float64]

MOST_LENGTHS = 256
"""The most output lengths that a batch's latencies are told apart by."""


@dataclass(frozen=True, eq=False)
class Load:
    """What a workload asks of a kind of model, and how to count it."""

    workload: Workload
    encoder_decoder: bool
    form: Form = "exact"

    @property
    def first_by_encoding(self) -> bool:
        """Whether a query's first token comes from its encoding pass, which then is one iteration less."""
        return not self.encoder_decoder and self.form == "exact"

    @functools.cached_property
    def prompts(self) -> Prompts:
        """The inputs."""
        return Prompts(self.workload.input)

    @functools.cached_property
    def outputs(self) -> tuple[Array, Array]:
        """Few output lengths, and their probabilities, for latencies of many kinds of prompts."""
        return kinds_of(self.workload.output)

    @functools.cached_property
    def lengths(self) -> tuple[Array, Array]:
        """The output lengths, and their probabilities, for latencies that depend on little else.

        Fewer kinds, cut where a phase of RRA ends, move a percentile by several percent from one N_D to the next.
        """
        return thinned(self.workload.output, MOST_LENGTHS)

    @functools.cached_property
    def iterations(self) -> tuple[Array, Array]:
        """D(S) of every output length, and their probabilities."""
        return decode_iterations_of(self.workload.output, self.encoder_decoder, self.form)

    @functools.cached_property
    def mean_iterations(self) -> float:
        """E[D]"""
        need, p = self.iterations
        return float(need @ p)

    @functools.cached_property
    def mean_residual(self) -> float:
        """Iterations until a resident query ends, averaged over iterations; at least 1."""
        return max(self.resident_context - self.workload.input.mean, 1.0)

    @functools.cached_property
    def resident_context(self) -> float:
        """Mean context of a resident query, averaged over iterations."""
        return length_biased_context(self.workload, self.encoder_decoder)

    @memoized
    def steady(self, decode_iterations: int) -> SteadyState:
        """RRA's steady state at N_D."""
        return steady_state(self.workload, decode_iterations, self.encoder_decoder, self.form)

    @functools.cached_property
    def _blocks(self) -> BlockDistribution:
        return BlockDistribution.of(self.workload, self.encoder_decoder)

    @memoized
    def reservation(self, decode_iterations: float | None) -> Reservation:
        """Blocks held per query entering RRA's phases, or (None) a static batch."""
        return self._blocks.reservation(decode_iterations)

    @memoized
    def resident_blocks(self, admission: Admission) -> Reservation:
        """Blocks held by one resident of iteration-level scheduling."""
        if admission == "grow":
            return grown_blocks(self.workload, self.encoder_decoder)
        return BlockDistribution.of(self.workload, self.encoder_decoder, resident=True).reservation(None)

    @memoized
    def pool_blocks(self, admission: Admission, residents: float) -> int:
        """Blocks of a pool for so many of them: the 99.9th percentile of what they hold, under *grow* the 95th.

        Under *grow* a pool that is too small costs a few prefills, not a failure: between the 90th and the 99th
        percentile throughputs are hardly apart, and requests are seldom preempted.
        """
        z = Z95 if admission == "grow" else Z999
        return self.resident_blocks(admission).quantile(residents, residents, z)

    @functools.cached_property
    def prompt_blocks(self) -> float:
        """Expected blocks of a prompt's tokens."""
        return (self.workload.input.mean + (BLOCK_SIZE - 1) / 2) / BLOCK_SIZE

    @functools.cached_property
    def unused_blocks(self) -> float:
        """Expected free blocks where memory is full: any number alike of those that the next prompt, as often a long
        one as it waits for them, needs.
        """
        inputs = self.workload.input
        return (self.prompt_blocks + (inputs.std**2 / BLOCK_SIZE**2 + 1 / 12) / self.prompt_blocks) / 2

    @functools.cached_property
    def static_contexts(self) -> Array:
        """[iterations]: mean context of a static batch's rows, finished ones at their last position."""
        need, p = self.iterations
        iterations = max(1, int(need.max()))
        contexts: Array = self.workload.input.mean + np.minimum(np.arange(1, iterations + 1)[:, None], need) @ p
        return contexts

    @memoized
    def longest_of(self, batch: int) -> Array:
        """Return the probability of each output length to be the greatest of `batch` queries."""
        return longest_of(self.workload.output, batch)
