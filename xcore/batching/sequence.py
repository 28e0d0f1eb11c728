"""Sequence: one request's bookkeeping."""

from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from math import ceil

from xcore.batching.hints import UNKNOWN, Hints


class Status(Enum):
    """The state of a sequence.

        WAITING ──admit──► PREFILL ──prompt cached──► DECODE ──last token──► FINISHED
           ▲                  └──────── preempt ─────────┘
           └── PREEMPTED ◄───────────────┘

    A preempted sequence waits again, and keeps the tokens that it has generated.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


WAITING, PREFILL, DECODE, PREEMPTED, FINISHED = Status
"""The members by name: looking one up in an Enum takes longer than comparing two."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from its arrival to its end.

    The prefill that completes a prompt gives the first output token. A decode iteration caches the last token and
    generates the next, so at most `input_tokens + max_output - 1` tokens are ever cached. In an encoder-decoder the
    first decode iteration gives the first token, after a start token that is cached too.
    """

    index: int
    """The request's place in the run; unique."""
    input_tokens: int
    max_output: int
    arrival_s: float = 0.0
    ends: int = 0
    """True output length, after which it ends without notice, as by a stop token; 0 means `max_output`."""
    keys: Items[Hashable] = ()
    """With prefix caching: a key for each full block of known tokens.

    Two blocks have the same key if all tokens up to their ends are equal. The list may grow with the tokens.
    """
    hints: Hints = UNKNOWN
    """For orders that need more than its lengths and its arrival."""
    received: int = 0
    """Tokens of its prompt whose keys and values come with it: they are not prefilled, except after a preemption."""
    growth: float = 1.0
    """Tokens that each decode iteration gives it; with speculation, `ends` and `generated` count iterations."""
    # filled by the ledger
    to_prefill: int = 0
    """Tokens of its prompt that aren't in the cache; after a preemption, tokens of its output are included."""
    status: Status = WAITING
    cached: int = 0
    """Tokens whose keys and values are in the cache."""
    generated: int = 0
    """Number of generated output tokens."""
    recomputed: int = 0
    """Output tokens that became part of the prompt at a preemption: the prefill computes them again."""
    behind: int = 0
    """Output tokens that its next decode iteration computes in addition to the next one.

    They are those of a preempted sequence whose prompt an encoder has read again.
    """
    blocks: list[int] = field(default_factory=list)
    """KV blocks. A finished row of a static batch holds its blocks to the batch's end."""
    published: int = 0
    """How many of its blocks, from the first on, are published."""
    hit: int = 0
    """Tokens of its prompt that were in the cache at its first admission."""
    reused: int = 0
    """Tokens that it found in the cache, including those found after preemptions."""
    preemptions: int = 0
    """Number of its preemptions."""
    passed_over: int = 0
    """How often a sequence behind it in the queue was admitted before it, for batches of even work."""
    kv_arrived_s: float = 0.0
    """When the decoding side has its keys and values, if disaggregated; infinite while their transfer runs."""
    swapped: int = 0
    """Blocks with its keys and values on the host: it waits, and goes on where it was preempted."""
    last_token_s: float = 0.0
    """When the last token before its latest preemption is out; infinite while that isn't known."""

    def __post_init__(self) -> None:
        self.ends = self.ends or self.max_output
        self.to_prefill = self.input_tokens

    def recompute(self, encoder_decoder: bool) -> None:
        """Return to the queue without a cache: prompt and output are prefilled again.

        If there is an encoder, the decoder alone computes the output again.
        """
        self.status, self.cached, self.recomputed, self.published = PREEMPTED, 0, self.generated, 0
        self.preemptions += 1
        self.behind = self.recomputed if encoder_decoder else 0
        self.to_prefill = self.known - self.behind

    def swap_out(self, blocks: int) -> None:
        """Return to the queue with keys and values in `blocks` blocks on the host."""
        self.status, self.swapped, self.published = PREEMPTED, blocks, 0
        self.preemptions += 1

    def receive(self) -> None:
        """Take the keys and values that come with it, if it is admitted for the first time."""
        if self.received and self.status is not PREEMPTED:
            self.cached, self.to_prefill = self.received, self.to_prefill - self.received

    def speculate(self, steps: int) -> None:
        """Spread its output evenly over `steps` iterations, of which the prefill is one."""
        self.growth = (self.ends - 1) / (steps - 1) if steps > 1 else 1.0
        self.ends = steps

    def decode(self, iterations: int) -> None:
        """Book decode iterations."""
        self.cached += iterations
        self.generated += iterations
        if self.growth != 1.0:
            self.cached = int(self.seen + 1e-6)

    @property
    def known(self) -> int:
        """Return the tokens that are prefilled before it decodes: the prompt, and the output before a preemption."""
        return self.input_tokens + int(self.growth * self.recomputed + 1e-6)

    def needed(self, iterations: int) -> int:
        """Return the tokens that it caches in decode iterations in a row, up to the first one of the last iteration."""
        return 1 + ceil(self.growth * (iterations - 1))

    @property
    def output_tokens(self) -> int:
        """Return the number of generated output tokens, whatever iterations give them."""
        return self.generated if self.growth == 1.0 else round(1 + self.growth * (self.generated - 1))

    @property
    def seen(self) -> float:
        """Return the tokens that its next decode iteration reads from the cache, with parts of tokens."""
        return self.cached if self.growth == 1.0 else self.input_tokens + self.growth * (self.generated - 1)

    @property
    def finished(self) -> bool:
        """Return whether the sequence's last token is generated, or booked."""
        return self.status is FINISHED
