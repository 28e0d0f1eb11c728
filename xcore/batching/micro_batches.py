"""Micro-batches: how a step is split for a pipeline, whose stages work on different micro-batches at once.

The simulator and the runner split steps alike.
"""

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass

from xcore.batching.sequence import Sequence
from xcore.batching.step import Step, Work


@dataclass(frozen=True, slots=True)
class MicroBatch(Work):
    """A part of a step that passes through the stages as a unit."""

    index: int
    encode: Items[tuple[Sequence, int]]
    decode: Items[Sequence]

    @property
    def sequences(self) -> int:
        """Return the number of sequences."""
        return len(self.encode) + len(self.decode)


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """Splits steps into `count` (B_m) micro-batches; a sequence always stays in the same one.

    A step that only encodes is split into `encode_count`, in the order of the sequences' micro-batches; None: into
    `count` like any other.
    """

    count: int
    encode_count: int | None = None
    replicas: int = 1

    def index(self, sequence: Sequence) -> int:
        """Return the micro-batch of a sequence; a replica's requests are assigned in turn (`deal`)."""
        return sequence.index // self.replicas % self.count

    def split(self, step: Step) -> list[MicroBatch]:
        """Split a step into micro-batches, in the order in which they go through the stages."""
        if self.encode_count is None or step.decode:
            return self._by_index(step)
        encode = sorted(step.encode, key=lambda pair: self.index(pair[0]))
        count = min(self.encode_count, len(encode))
        ends = [len(encode) * i // count for i in range(count + 1)]
        return [MicroBatch(i, encode[a:b], ()) for i, (a, b) in enumerate(itertools.pairwise(ends))]

    def _by_index(self, step: Step) -> list[MicroBatch]:
        if self.count == 1:
            return [MicroBatch(0, step.encode, step.decode)]
        encode: list[list[tuple[Sequence, int]]] = [[] for _ in range(self.count)]
        decode: list[list[Sequence]] = [[] for _ in range(self.count)]
        for pair in step.encode:
            encode[self.index(pair[0])].append(pair)
        for sequence in step.decode:
            decode[self.index(sequence)].append(sequence)
        return [MicroBatch(m, encode[m], decode[m]) for m in range(self.count) if encode[m] or decode[m]]
