"""Load: a workload as steady states need it, with the figures that all schedules under it share."""

import functools
from dataclasses import dataclass, replace

import numpy as np

from xcore.arrays import Array
from xcore.batching.admission import Admission
from xcore.errors import InputError
from xcore.specs.prefix_hit import CachedPrefix
from xcore.specs.schedule import BLOCK_SIZE
from xcore.specs.speculation import Speculation
from xcore.specs.workload import LengthDistribution, Workload
from xsimulator.cost.memo import memoized
from xsimulator.steady.blocks import BlockDistribution, Reservation, grown_blocks
from xsimulator.steady.decode_steps import in_steps, outputs_given, points_of
from xsimulator.steady.prompts import Prompts, kinds_of, thinned
from xsimulator.steady.residents import (
    Z95,
    Z999,
    Form,
    SteadyState,
    decode_iterations_of,
    longest_of,
    resident_age,
    resident_input,
    steady_state,
)

MOST_LENGTHS = 256
"""Most output lengths to distinguish in a batch's latencies."""


@dataclass(frozen=True, eq=False)
class Load:
    """A workload on a decoder-only or encoder-decoder model, and the formulas that count it."""

    workload: Workload
    """The workload; where a prefix cache has a share of the prompts, without the cached tokens."""
    encoder_decoder: bool
    form: Form = "exact"
    cached: CachedPrefix | None = None
    """The cached part of the prompts; None: nothing is found."""
    asked: Workload | None = None
    """The workload with the cached tokens; None: `workload`."""
    speculation: Speculation | None = None

    @staticmethod
    def of(
        workload: Workload,
        encoder_decoder: bool,
        form: Form = "exact",
        caching: bool = True,
        speculation: Speculation | None = None,
    ) -> "Load":
        """Return the load of a workload whose `prefix_hit` counts if prefixes are cached.

        Raises:
            InputError: A part of the prompts is cached, and tokens are drafted.
        """
        if not workload.prefix_hit or not caching:
            return Load(workload, encoder_decoder, form, speculation=speculation)
        if speculation:
            raise InputError(
                f"A share of cached prompts (--prefix-hit {workload.prefix_hit:g}) can't be predicted together with "
                "draft tokens (--draft-acceptance): leave one of them out."
            )
        cached = CachedPrefix.of(workload.input, workload.prefix_hit)
        computed = replace(workload, input=cached.computed, requests=None, prefix_hit=0.0)
        return Load(computed, encoder_decoder, form, cached, workload)

    @property
    def question(self) -> Workload:
        """Return the workload with the cached tokens, as a schedule holds it."""
        return (self.asked or self.workload).without_requests

    @property
    def cached_tokens(self) -> float:
        """Return the cached tokens of a prompt on average."""
        return self.cached.mean if self.cached else 0.0

    @property
    def shared_blocks(self) -> int:
        """Return the blocks of the cached tokens, which all requests share."""
        return self.cached.blocks if self.cached else 0

    @property
    def first_by_encoding(self) -> bool:
        """Return whether the prefill gives a query's first token, which saves one decode iteration."""
        return not self.encoder_decoder and self.form == "exact"

    @functools.cached_property
    def counted(self) -> Workload:
        """Return the workload as iterations count it: an output's length is the number of iterations that give it."""
        if self.speculation is None:
            return self.workload
        return replace(self.workload, output=in_steps(self.workload.output, self.speculation))

    @property
    def steps(self) -> LengthDistribution:
        """Return the numbers of iterations that give an output: its tokens, unless an iteration may give several."""
        return self.counted.output

    @functools.cached_property
    def growth(self) -> float:
        """Return the mean tokens that a decode iteration gives a sequence."""
        if self.speculation is None:
            return 1.0
        return (self.workload.output.mean - 1.0) / self.mean_iterations if self.mean_iterations else 1.0

    @property
    def ahead(self) -> int:
        """Return the tokens that a sequence holds blocks for in addition to its own: its draft tokens."""
        return self.speculation.drafted if self.speculation else 0

    def steps_of(self, lengths: Array) -> Array:
        """Return the mean iterations that give outputs of these lengths in tokens."""
        return lengths if self.speculation is None else 1.0 + self.speculation.iterations(lengths - 1.0)[0]

    def step_points(self, lengths: Array, count: int) -> Array:
        """Return `count` equally likely numbers of iterations that give outputs of these lengths, [count, lengths]."""
        return lengths[None] if self.speculation is None else points_of(lengths, self.speculation, count)

    def tokens_of(self, steps: Array) -> Array:
        """Return the tokens of short outputs that take these numbers of iterations."""
        return steps if self.speculation is None else outputs_given(steps, self.workload.output, self.speculation)

    @functools.cached_property
    def prompts(self) -> Prompts:
        """Return the inputs."""
        return Prompts(self.workload.input, self.cached_tokens / self.workload.input.mean)

    @functools.cached_property
    def outputs(self) -> tuple[Array, Array]:
        """Return few output lengths and their probabilities, for latencies with many kinds of prompts."""
        return kinds_of(self.workload.output)

    @functools.cached_property
    def lengths(self) -> tuple[Array, Array]:
        """Return the output lengths and their probabilities, for latencies that depend mainly on the output length.

        With fewer lengths, split where a phase of RRA ends, a percentile would change by several percent from one N_D
        to the next.
        """
        return thinned(self.workload.output, MOST_LENGTHS)

    @functools.cached_property
    def iterations(self) -> tuple[Array, Array]:
        """Return D(S) of every output length, and their probabilities."""
        return decode_iterations_of(self.steps, self.encoder_decoder, self.form)

    @functools.cached_property
    def mean_iterations(self) -> float:
        """Return E[D], the mean number of decode iterations."""
        need, p = self.iterations
        return float(need @ p)

    @functools.cached_property
    def mean_residual(self) -> float:
        """Return the iterations until a resident query ends, averaged over iterations; at least 1."""
        return max(resident_age(self.counted, self.encoder_decoder), 1.0)

    @functools.cached_property
    def resident_context(self) -> float:
        """Return the mean context of a resident query, averaged over iterations."""
        generated = 1.0 + self.growth * (resident_age(self.counted, self.encoder_decoder) - 1.0)
        return self.cached_tokens + resident_input(self.counted, self.encoder_decoder) + generated

    @memoized
    def steady(self, decode_iterations: int) -> SteadyState:
        """Return RRA's steady state at N_D."""
        return steady_state(self.counted, decode_iterations, self.encoder_decoder, self.form, self.growth)

    @functools.cached_property
    def _blocks(self) -> BlockDistribution:
        return self._blocks_held(resident=False)

    def _blocks_held(self, resident: bool) -> BlockDistribution:
        how = self.growth, self.ahead, self._most_output
        return BlockDistribution.of(self.counted, self.encoder_decoder, resident, *how)

    @property
    def _most_output(self) -> int | None:
        """Return the most tokens of an output that a sequence has blocks for; None: as many as its iterations."""
        return self.workload.output.max - 1 + self.ahead if self.speculation else None

    @memoized
    def reservation(self, decode_iterations: float | None) -> Reservation:
        """Return the blocks held per query that enters RRA's phases, or (None) a static batch."""
        return self._blocks.reservation(decode_iterations)

    @memoized
    def resident_blocks(self, admission: Admission) -> Reservation:
        """Return the blocks held by one resident under iteration-level scheduling."""
        if admission == "grow":
            return grown_blocks(self.counted, self.encoder_decoder, self.growth, self.ahead, self._most_output)
        return self._blocks_held(resident=True).reservation(None)

    @memoized
    def pool_blocks(self, admission: Admission, residents: float) -> int:
        """Return the blocks of a pool for `residents` residents.

        This is the 99.9th percentile of the blocks that the residents hold; under *grow*, it is the 95th. Under *grow*
        a pool that is too small costs a few prefills, not a failure. Between the 90th and the 99th percentile,
        throughputs hardly differ, and requests are seldom preempted.
        """
        z = Z95 if admission == "grow" else Z999
        return self.resident_blocks(admission).quantile(residents, residents, z)

    @functools.cached_property
    def prompt_blocks(self) -> float:
        """Return the expected blocks of a prompt's tokens."""
        return (self.workload.input.mean + (BLOCK_SIZE - 1) / 2) / BLOCK_SIZE

    @functools.cached_property
    def unused_blocks(self) -> float:
        """Return the expected free blocks when memory is full.

        Their number is uniform up to the blocks that the next prompt needs. Long prompts wait longer, so lengths are
        weighted by the blocks that they need.
        """
        inputs = self.workload.input
        return (self.prompt_blocks + (inputs.std**2 / BLOCK_SIZE**2 + 1 / 12) / self.prompt_blocks) / 2

    @functools.cached_property
    def static_contexts(self) -> Array:
        """Return [iterations]: mean context of a static batch's rows; finished rows stay at their last position."""
        need, p = self.iterations
        iterations = max(1, int(need.max()))
        ages: Array = np.minimum(np.arange(1, iterations + 1)[:, None], need) @ p
        return self.workload.input.mean + 1.0 + self.growth * (ages - 1.0)

    @memoized
    def static_steps(self, most: int) -> tuple[Array, Array]:
        """Return the expected iterations of static batches of 1 to `most` queries, and the rows' mean context in them.

        Both are interpolated: [most].
        """
        few, ends = np.unique(np.rint(np.geomspace(1, most, 64))), self.iterations[0].astype(int)
        contexts = np.concatenate([[0.0], np.cumsum(self.static_contexts)])[ends]
        chances = [longest_of(self.steps, batch) for batch in few]
        sums = ([chance @ values for chance in chances] for values in (ends, contexts))
        steps, together = (np.interp(np.arange(1, most + 1), few, each) for each in sums)
        return steps, together / np.maximum(steps, 1e-9)

    @memoized
    def longest_of(self, batch: int) -> Array:
        """Return the probability of each length, in iterations, to be the greatest of `batch` queries."""
        return longest_of(self.steps, batch)
