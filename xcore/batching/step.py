"""Step: one iteration, as a policy decides it."""

import sys
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

from xcore.batching.sequence import Sequence

StagePhase = Literal["both", "encode", "decode"]
"""The phases that a line of stages computes."""

ENDLESS = sys.maxsize
"""No limit of iterations."""


class Work:
    """The work of one pass through the stages."""

    __slots__ = ()
    encode: Items[tuple[Sequence, int]]
    decode: Items[Sequence]

    @property
    def phase(self) -> Literal["encode", "decode", "mixed"]:
        """Return `encode`, `decode` or `mixed`."""
        if self.encode and self.decode:
            return "mixed"
        return "encode" if self.encode else "decode"

    @property
    def tokens(self) -> int:
        """Return the number of tokens computed."""
        return sum([count for _, count in self.encode]) + sum([1 + sequence.behind for sequence in self.decode])


@dataclass(frozen=True, slots=True)
class Step(Work):
    """One iteration: prompts (or chunks of them) to prefill, and sequences that get one more token."""

    encode: tuple[tuple[Sequence, int], ...] = ()
    """(sequence, tokens of its prompt to compute now)."""
    decode: tuple[Sequence, ...] = ()
    repeats: int = 1
    """Iterations in a row that the policy decides at once; they end early if a sequence finishes, aborts or arrives."""
    arrivals: bool = False
    """Whether an arrival may end the row of iterations."""

    def gives_tokens(self, encoder_decoder: bool) -> bool:
        """Return whether any token is sampled; an encoder-decoder's prompts give none."""
        return bool(self.decode) or (
            not encoder_decoder and any(count >= sequence.to_prefill for sequence, count in self.encode)
        )
