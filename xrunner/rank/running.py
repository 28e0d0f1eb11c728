"""RunningRequest: a request in the runner."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from xcore.arrays import Integers, Integers32
from xcore.batching import Sequence as LedgerSequence
from xcore.batching.prefix_pool import extend_keys
from xcore.requests.engine_protocol import TokenLogProb
from xcore.requests.request import Request
from xrunner.rank.token_mask import TokenConstraint


@dataclass(eq=False)
class RunningRequest:
    """A request in the runner: the state that is not in the ledger's `Sequence`."""

    request: Request
    sequence: LedgerSequence
    prompt: Integers
    """[input tokens]"""
    output: list[int] = field(default_factory=list)
    table: Integers32 | None = None
    """Block table, [blocks]; None before its admission."""
    start_s: float | None = None
    first_token_s: float | None = None
    ended: bool = False
    """Whether its last token has come, or it was cancelled; later tokens for it are ignored."""
    start: tuple[int, ...] = ()
    """Tokens that an encoder-decoder caches before its output; see `Model.start`."""
    slot: int | None = None
    """Its row of the sampling state, while it runs with a penalty."""
    without_stops: Integers32 | None = None
    """The mask of all tokens except its stop tokens, [ceil(vocab / 32)]; None without `min_tokens`."""
    tabled: list[int] | None = None
    """The blocks from which the table was made; None where a transfer has set it."""
    entered: int = 0
    """Number of its prompt's and output's tokens that have been entered in the sampling state's row."""
    constraint: TokenConstraint | None = None
    """Its grammar, which has consumed all tokens of the output so far."""
    logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)
    """Log-probabilities and likeliest tokens of its output's tokens, if it asks for them."""
    prompt_logprobs: list[TokenLogProb] = field(default_factory=lambda: [(None, ())])
    """The same of its prompt's tokens."""
    prompt_ordered: int = 1
    """Number of the prompt's tokens whose log-probabilities have been ordered: the first has none."""
    keys: list[bytes] = field(default_factory=list)
    """Its sequence's keys; see `extend_keys`."""

    @cached_property
    def greedy(self) -> bool:
        """`Request.greedy`, cached since every iteration reads it."""
        return self.request.greedy

    @cached_property
    def counted(self) -> bool:
        """`Request.counted`, cached since every iteration reads it."""
        return self.request.counted

    @cached_property
    def penalised(self) -> bool:
        """Whether the request needs a slot of the sampling state."""
        return self.counted or self.request.repetition_penalty != 1

    @cached_property
    def logprobs_asked(self) -> int | None:
        """`Request.logprobs`, cached since every iteration reads it."""
        return self.request.logprobs

    @cached_property
    def sampling(self) -> tuple[float, int, float, float, int, float, bool]:
        """Temperature, top-k, top-p, repetition penalty, seed, min-p, and whether its logits may be edited."""
        r = self.request
        return r.temperature, r.top_k, r.top_p, r.repetition_penalty, r.own_seed, r.min_p, r.edited

    @property
    def needs_output(self) -> bool:
        """Whether sampling a token needs the earlier tokens, other than as the model's input."""
        return self.slot is not None or self.constraint is not None

    @property
    def known(self) -> int:
        """Number of the known tokens of prompt, start and output."""
        return len(self.prompt) + len(self.start) + len(self.output)

    @property
    def lacks_output(self) -> bool:
        """Whether output tokens that were generated before a preemption are still missing."""
        return len(self.output) < self.sequence.generated

    def extend_keys(self, block_size: int) -> None:
        """Add keys for the blocks that the request's known tokens fill, so that the blocks can be found.

        The known tokens are the prompt and the output so far.
        """
        if self.known >= (len(self.keys) + 1) * block_size:
            extend_keys(self.keys, [*self.request.prompt_ids, *self.output], block_size, self.request.cache_salt)

    def update_table(self) -> None:
        """Make the block table, if there is none or the sequence's blocks have changed."""
        blocks = self.sequence.blocks
        if self.table is None or (self.tabled is not None and self.tabled is not blocks):
            self.table, self.tabled = np.asarray(blocks, dtype=np.int32), blocks

    def enter(self) -> tuple[Sequence[int], list[int]]:
        """Return the tokens of the prompt and of the output that the sampling state lacks; mark them as entered."""
        begin, prompt = self.entered, len(self.prompt)
        self.entered = prompt + len(self.output)
        if begin >= prompt:
            return (), self.output[begin - prompt :]
        return self.request.prompt_ids[begin:], self.output[:]

    def mask(self, made: int) -> Integers32 | None:
        """Return the tokens that are allowed at place `made` of the output, as `LogitEdits.allowed`; None: all."""
        without_stops = self.without_stops if made < self.request.min_tokens else None
        if self.constraint is None:
            return without_stops
        assert made == len(self.output), "a grammar's mask needs the token before"
        allowed = self.constraint.mask()
        both = allowed if without_stops is None else allowed & without_stops
        return both if both.any() else allowed  # a grammar that must end has priority over the shortest length

    def tokens(self, begin: int, end: int) -> Integers:
        """Return the tokens at these positions: [end - begin]."""
        if end <= len(self.prompt):
            return self.prompt[begin:end]
        beyond = [self.token(position) for position in range(max(begin, len(self.prompt)), end)]
        return np.concatenate([self.prompt[begin:], np.array(beyond, dtype=np.int64)])

    def token(self, position: int) -> int:
        """Return the token at a position of prompt, start and output; 0 if it isn't known yet."""
        beyond = position - len(self.prompt)
        if beyond < 0:
            return int(self.prompt[position])
        if beyond < len(self.start):
            return self.start[beyond]
        made = beyond - len(self.start)
        return self.output[made] if made < len(self.output) else 0
