"""Sequence: one request's bookkeeping."""

from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum

from xcore.batching.hints import UNKNOWN, Hints


class Status(Enum):
    """Where a sequence stands.

        WAITING ──admit──► PREFILL ──prompt cached──► DECODE ──last token──► FINISHED
           ▲                  └──────── preempt ─────────┘
           └── PREEMPTED ◄───────────────┘

    A preempted sequence waits again, with what it has generated.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


WAITING, PREFILL, DECODE, PREEMPTED, FINISHED = Status
"""The same by name: looking one up in an Enum takes longer than comparing two."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from its arrival to its end.

    The prefill that completes a prompt gives the first output token. A decoding iteration caches the token made last
    and makes the next, so at most `input_tokens + max_output - 1` tokens are ever cached. In an encoder-decoder the
    first decoding iteration gives the first token, after a start token that is cached too.
    """

    index: int
    """The request's place in the run; unique."""
    input_tokens: int
    max_output: int
    arrival_s: float = 0.0
    ends: int = 0
    """Output tokens after which it ends unannounced, as by a stop token; 0: it makes `max_output`."""
    keys: Items[Hashable] = ()
    """Where prefixes are cached: a key for each full block of known tokens, which other sequences' blocks have too if
    all tokens up to their ends are the same. It may get longer as tokens come."""
    hints: Hints = UNKNOWN
    """For orders that ask for more than its lengths and its arrival."""
    # filled by the ledger
    to_prefill: int = 0
    """Tokens of its prompt that aren't in the cache; after a preemption those of its output count among them."""
    status: Status = WAITING
    cached: int = 0
    """Tokens whose keys and values are in the cache."""
    generated: int = 0
    """Output tokens made."""
    recomputed: int = 0
    """Output tokens that a preemption made part of the prompt: the prefill computes them again."""
    behind: int = 0
    """Output tokens that its next decoding iteration computes before one more: those of a preempted sequence whose
    prompt an encoder has read again."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks. A finished row of a static batch holds its own to the batch's end."""
    published: int = 0
    """How many of them, from the first on, can be found by their keys."""
    hit: int = 0
    """Tokens of its prompt that were in the cache when it was first admitted."""
    preemptions: int = 0
    """How often it was preempted."""
    ready_s: float = 0.0
    """When the decoding side has its keys and values, where prefill and decode are disaggregated; of a preempted one,
    when its last token has come. Endless while that isn't known."""

    def __post_init__(self) -> None:
        self.ends = self.ends or self.max_output
        self.to_prefill = self.input_tokens

    def recompute(self, encoder_decoder: bool) -> None:
        """Wait again without a cache: prompt and output are prefilled, the output by a decoder alone where there is an
        encoder.
        """
        self.status, self.cached, self.recomputed, self.published = PREEMPTED, 0, self.generated, 0
        self.preemptions += 1
        self.behind = self.recomputed if encoder_decoder else 0
        self.to_prefill = self.input_tokens + self.recomputed - self.behind

    @property
    def finished(self) -> bool:
        """Whether its last token is made, or booked."""
        return self.status is FINISHED
