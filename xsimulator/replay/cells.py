"""Cells: the micro-batches of iterations on the stages of a pipeline, each at its start time (docs/theory.md).

A cell starts when its stage is free and its input has arrived from the previous stage. A decoding cell also needs its
micro-batch's previous token. Decode steps that repeat are simulated many at a time.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xcore.batching import MicroBatch, MicroBatching, Sequence, Step
from xcore.batching.sequence import FINISHED
from xcore.specs.timeline import Span
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.cost.decode_cache import DecodeStepCache
from xsimulator.cost.recurrences import follow
from xsimulator.cost.side import Side
from xsimulator.cost.stage import Chunks

_MOST = 4096
"""Most iterations to simulate at once, which bounds the memory."""
_COUNT = np.arange(float(_MOST))


@dataclass(frozen=True, slots=True)
class Ran:
    """The times of a step, or of several equal steps, in seconds."""

    iterations: int
    next_s: float
    """When the next step is decided: the first stage is free or, with iterations in flight, starts the last one."""
    encoded: dict[int, float]
    """When each sequence's prompt, or its chunk, left the last stage, by the sequence's index."""
    first: Array
    """[micro-batches]: when the tokens of the first iteration came out."""
    last: Array
    """[micro-batches]: when the tokens of the last iteration came out."""


class Pipeline:
    """The stages of one side of a replica; each step is split into micro-batches."""

    def __init__(
        self,
        replica_cost: ReplicaCost,
        side: Side,
        micro_batching: MicroBatching,
        keep_spans: bool,
        replica: int,
        ahead: bool = False,
    ):
        """Create an empty pipeline; with `ahead`, a step is decided when the previous one starts on the first stage.

        Without `ahead`, a step is decided when the first stage is free.
        """
        stages = len(side.stages)
        self._ahead = ahead
        self.stages = side.stages
        self._first_device = replica * (1 + max(rank for stage in replica_cost.stages for rank in stage.devices))
        self.micro_batching = micro_batching
        self.spans: list[Span] | None = [] if keep_spans else None
        self.busy = np.zeros(stages)
        """[stages]: seconds of work so far."""
        self._free = np.zeros(stages)
        """[stages]: when each stage is free."""
        self._token = np.zeros(micro_batching.count)
        """[micro-batches]: when each one's last token came out."""
        self._side = side
        self._costs = list(dict.fromkeys(side.costs))
        """The different costs: equal stages share one."""
        self._decode_seconds = [DecodeStepCache.of(cost) for cost in self._costs]
        self._kind = np.array([self._costs.index(cost) for cost in side.costs])
        """[stages]: the index of each stage's cost in `_costs`."""
        self._encoder_decoder = replica_cost.encoder_decoder
        self._takes_over = replica_cost.encoder_decoder and all(stage.phase == "decode" for stage in side.stages)
        """Whether another side's encoders prefill the prompts, and this side computes their keys and values."""
        self._hops: dict[int, Array] = {}
        self._pace = 0.0
        """Seconds per decode step in the last run."""

    @property
    def seconds(self) -> float:
        """Return when all work so far is done."""
        return float(self._free.max())

    def last_token_s(self, sequence: Sequence) -> float:
        """Return when the last token of a sequence's micro-batch came out."""
        return float(self._token[self.micro_batching.index(sequence)])

    def start_s(self, now: float) -> float:
        """Return when a step that is decided at `now` may start."""
        return max(now, float(self._free[0]))

    def hold(self, now: float, seconds: float) -> None:
        """Keep every stage busy for `seconds` after its work so far, and not before `now`."""
        self._free = np.maximum(self._free, now) + seconds
        self.busy += seconds

    def run(self, step: Step, now: float, most: int, until: float) -> Ran:
        """Run a step decided at `now` (seconds).

        A decode-only step runs up to `most` times, while no sequence finishes and the next step is decided before
        `until`.
        """
        if step.encode:
            return self._run_encoding(self.micro_batching.split(step), now)
        return self._run_decoding(self.micro_batching.split(step), now, most, until)

    def _run_encoding(self, micro_batches: list[MicroBatch], now: float) -> Ran:
        seconds = self._by_stage(np.array([[self._seconds(micro_batch) for micro_batch in micro_batches]]))
        ready = np.array([self._ready(micro_batch) for micro_batch in micro_batches])
        _, next_s, _ = self._book(micro_batches, seconds, ready, now, np.inf)
        encoded = {}
        for micro_batch, out in zip(micro_batches, ready.tolist(), strict=True):
            if micro_batch.decode:
                self._token[micro_batch.index] = out
            for sequence, count in micro_batch.encode:
                encoded[sequence.index] = out
                if count >= sequence.to_prefill and sequence.ends > sequence.recomputed + 1:
                    self._token[self.micro_batching.index(sequence)] = out
        last = self._token.copy()
        return Ran(1, next_s, encoded, last, last)

    def _ready(self, micro_batch: MicroBatch) -> float:
        """Return when the tokens that a micro-batch with prompts needs are out."""
        decoding = float(self._token[micro_batch.index]) if micro_batch.decode else 0.0
        return max([decoding, *[s.last_token_s for s, _ in micro_batch.encode]])

    def _seconds(self, micro_batch: MicroBatch) -> list[float]:
        """Return the seconds of one iteration of a micro-batch for each of the different costs."""
        chunks, decoding, context = _shape(micro_batch)
        if chunks is None:
            return [float(decode_seconds(decoding, context)) for decode_seconds in self._decode_seconds]
        return [cost.step(chunks, decoding, context) for cost in self._costs]

    def _run_decoding(self, micro_batches: list[MicroBatch], now: float, most: int, until: float) -> Ran:
        shapes = []
        for micro_batch in micro_batches:
            decode = micro_batch.decode
            live = [s for s in decode if s.status is not FINISHED]
            most = min([most, *[s.ends - s.generated for s in live]])
            shape = _decoding(micro_batch) if self._encoder_decoder else (len(decode), _seen(decode) + len(live))
            shapes.append((*shape, sum([s.growth for s in live])))
        if self._pace and until < np.inf:
            most = min(most, int((until - now) / self._pace) + 3)
        count = _COUNT[: min(most, _MOST)]
        seconds = np.empty((len(count), len(micro_batches), len(self._costs)))
        for p, (sequences, tokens, growth) in enumerate(shapes):
            contexts = (tokens + growth * count) / sequences
            for kind, decode_seconds in enumerate(self._decode_seconds):
                seconds[:, p, kind] = decode_seconds(sequences, contexts)
        if self._takes_over:
            for p, micro_batch in enumerate(micro_batches):
                tokens = sum([s.input_tokens for s in micro_batch.decode if s.generated == s.recomputed])
                if tokens:
                    seconds[0, p] += [float(cost.cross_projection(tokens)) for cost in self._costs]
        seconds = self._by_stage(seconds)
        indices = [micro_batch.index for micro_batch in micro_batches]
        ready = self._token[indices]
        iterations, next_s, ends = self._book(micro_batches, seconds, ready, now, until)
        self._pace = (next_s - now) / iterations
        first = self._token.copy()
        first[indices] = ends[0, :, -1]
        self._token[indices] = ready
        return Ran(iterations, next_s, {}, first, self._token.copy())

    def _book(
        self, micro_batches: list[MicroBatch], seconds: Array, ready: Array, now: float, until: float
    ) -> tuple[int, float, Array]:
        """Simulate the iterations; return how many ran, when the next is decided, and the cells' ends."""
        if len(self.stages) == 1:
            hops = np.zeros((len(micro_batches), 1))  # a single stage sends nothing
        else:
            drafted = self._side.rows - 1
            hops = np.array([self._hop(m.tokens + drafted * len(m.decode)) for m in micro_batches])
        starts, ends = np.empty(seconds.shape), np.empty(seconds.shape)
        iterations, next_s = follow(seconds, hops, ready, self._free, self.busy, starts, ends, now, until, self._ahead)
        starts, ends = starts[:iterations], ends[:iterations]
        if self.spans is not None:
            for i, p, s in np.ndindex(*ends.shape):
                m, device = micro_batches[p], self._first_device + self.stages[s].devices[0]
                begin, end = float(starts[i, p, s]), float(ends[i, p, s])
                self.spans.append(Span(device, s, m.phase, m.index, begin, end, m.sequences, m.tokens))
        return iterations, next_s, ends

    def _by_stage(self, seconds: Array) -> Array:
        """Expand the seconds of the different costs to all stages: [iterations, micro-batches, stages].

        The result is contiguous, for the compiled loop.
        """
        return seconds if len(self._costs) == len(self.stages) else seconds.take(self._kind, axis=2)

    def _hop(self, tokens: int) -> Array:
        """Return [stages]: seconds from the previous stage to each stage."""
        if tokens not in self._hops:
            self._hops[tokens] = self._side.hops(tokens)
        return self._hops[tokens]


def _shape(micro_batch: MicroBatch) -> tuple[Chunks | None, int, float]:
    """Return what a stage's cost depends on: the prompts, the number of decoding sequences, and their mean context."""
    chunks = None
    if micro_batch.encode:
        completed = sum([count >= s.to_prefill for s, count in micro_batch.encode])
        counts, cached = [count for _, count in micro_batch.encode], [s.cached for s, _ in micro_batch.encode]
        chunks = Chunks(counts, cached, completed)
    decoding, seen = _decoding(micro_batch)
    return chunks, decoding, seen / decoding if decoding else 0.0


def _decoding(micro_batch: MicroBatch) -> tuple[int, float]:
    """Count the tokens that an iteration decodes, and the sum of their contexts.

    A finished row of a static batch is computed again at its last position.
    """
    decode = micro_batch.decode
    tokens, seen = len(decode), _seen(decode) + sum([s.status is not FINISHED for s in decode])
    for s in [s for s in decode if s.behind]:
        tokens += s.behind
        seen += s.behind * s.cached + s.behind * (s.behind + 3) // 2
    return tokens, seen


def _seen(decode: Items[Sequence]) -> float:
    """Sum the cached tokens of sequences."""
    return sum([s.seen for s in decode])
