"""Pieces: how a step is cut for a pipeline, whose stages each work on another piece. The simulator and the runner cut
alike.
"""

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from exegpt.policies.ledger import Sequence, Step


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a step that goes through the stages as one."""

    micro_batch: int
    encode: Items[tuple[Sequence, int]]
    decode: Items[Sequence]

    @property
    def phase(self) -> Any:
        """What it does: `encode`, `decode` or `mixed`."""
        if self.encode and self.decode:
            return "mixed"
        return "encode" if self.encode else "decode"

    @property
    def sequences(self) -> int:
        """How many it is for."""
        return len(self.encode) + len(self.decode)

    @property
    def tokens(self) -> int:
        """Tokens computed in one iteration."""
        return sum([count for _, count in self.encode]) + len(self.decode)


@dataclass(frozen=True, slots=True)
class Cut:
    """A sequence is always in the same one of `count` (B_m) micro-batches.

    Encoding alone is cut into `encode_pieces`, in the order of the micro-batches; None: one for each of them.
    """

    count: int
    encode_pieces: int | None = None
    replicas: int = 1

    def micro_batch(self, sequence: Sequence) -> int:
        """The micro-batch that a sequence is always in: they take turns in a replica's requests (`deal`)."""
        return sequence.index // self.replicas % self.count

    def pieces(self, step: Step) -> list[Piece]:
        """The pieces of a step, in the order in which they go through the stages."""
        if self.encode_pieces is None or step.decode:
            return self._by_micro_batch(step)
        encode = sorted(step.encode, key=lambda pair: self.micro_batch(pair[0]))
        count = min(self.encode_pieces, len(encode))
        cuts = [len(encode) * i // count for i in range(count + 1)]
        return [Piece(i, encode[a:b], ()) for i, (a, b) in enumerate(itertools.pairwise(cuts))]

    def _by_micro_batch(self, step: Step) -> list[Piece]:
        if self.count == 1:
            return [Piece(0, step.encode, step.decode)]
        encode: list[list[tuple[Sequence, int]]] = [[] for _ in range(self.count)]
        decode: list[list[Sequence]] = [[] for _ in range(self.count)]
        for pair in step.encode:
            encode[self.micro_batch(pair[0])].append(pair)
        for sequence in step.decode:
            decode[self.micro_batch(sequence)].append(sequence)
        return [Piece(m, encode[m], decode[m]) for m in range(self.count) if encode[m] or decode[m]]
