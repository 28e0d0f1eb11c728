"""Running: a request in the runner."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from xcore.batching import Sequence as LedgerSequence
from xcore.batching.prefix_pool import extend_keys
from xcore.requests.request import Request
from xrunner.rank.token_mask import Constraint

Array = np.ndarray


@dataclass(eq=False)
class Running:
    """A request in the runner: what is not in the ledger's `Sequence`."""

    request: Request
    sequence: LedgerSequence
    prompt: Array
    """int64 [input tokens]"""
    output: list[int] = field(default_factory=list)
    table: Array | None = None
    """Block table, int32 [blocks]; None before its admission."""
    start_s: float | None = None
    first_token_s: float | None = None
    ended: bool = False
    """Whether its last token is there, or it was cancelled; later tokens for it are ignored."""
    start: tuple[int, ...] = ()
    """Tokens that an encoder-decoder caches before its output; see `Model.start`."""
    slot: int | None = None
    """Its row of the sampling state, while it runs with a penalty."""
    without_stops: Array | None = None
    """The mask of all tokens but its stop tokens, int32 [ceil(vocab / 32)]; None without `min_tokens`."""
    tabled: list[int] | None = None
    """The blocks of which the table was made; None where a transfer has set it."""
    entered: int = 0
    """Tokens of its prompt and output entered in that row so far."""
    constraint: Constraint | None = None
    """Its grammar, which has got all tokens of the output so far."""
    logprobs: list[float] = field(default_factory=list)
    """Of its output's tokens, where it asks for them."""
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    """As `Result.likeliest`."""
    prompt_logprobs: list[float | None] = field(default_factory=lambda: [None])
    """Of the prompt's tokens, where it asks for them."""
    prompt_likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=lambda: [()])
    """As `Result.prompt_likeliest`."""
    prompt_ordered: int = 1
    """Tokens of the prompt whose log-probabilities have been ordered: the first has none."""
    keys: list[bytes] = field(default_factory=list)
    """Its sequence's: see `extend_keys`."""

    @cached_property
    def greedy(self) -> bool:
        """`Request.greedy`, asked for in every iteration."""
        return self.request.greedy

    @cached_property
    def counted(self) -> bool:
        """`Request.counted`, asked for in every iteration."""
        return self.request.counted

    @cached_property
    def penalised(self) -> bool:
        """Whether it needs a slot of the sampling state."""
        return self.counted or self.request.repetition_penalty != 1

    @cached_property
    def logprobs_asked(self) -> int | None:
        """`Request.logprobs`, asked for in every iteration."""
        return self.request.logprobs

    @cached_property
    def sampling(self) -> tuple[float, int, float, float, int, float, bool]:
        """Temperature, top-k, top-p, repetition penalty, seed, min-p, and whether its logits may be edited."""
        r = self.request
        return r.temperature, r.top_k, r.top_p, r.repetition_penalty, r.own_seed, r.min_p, r.edited

    @property
    def needs_output(self) -> bool:
        """Whether a token is chosen by those before it in another way than by the model."""
        return self.slot is not None or self.constraint is not None

    @property
    def known(self) -> int:
        """How many tokens of prompt, start and output there are so far."""
        return len(self.prompt) + len(self.start) + len(self.output)

    @property
    def lacks_output(self) -> bool:
        """Whether tokens of the output that a preemption made part of the prompt haven't come yet."""
        return len(self.output) < self.sequence.recomputed

    def extend_keys(self, block_size: int) -> None:
        """Let the blocks be found that its known tokens fill: its prompt, and the output that has come."""
        if self.known >= (len(self.keys) + 1) * block_size:
            extend_keys(self.keys, [*self.request.prompt_ids, *self.output], block_size)

    def update_table(self) -> None:
        """Make the block table, if there is none or the sequence has other blocks than it was made of."""
        blocks = self.sequence.blocks
        if self.table is None or (self.tabled is not None and self.tabled is not blocks):
            self.table, self.tabled = np.asarray(blocks, dtype=np.int32), blocks

    def enter(self) -> tuple[Sequence[int], list[int]]:
        """The tokens of the prompt and of the output that the sampling state lacks; marks them as entered."""
        begin, prompt = self.entered, len(self.prompt)
        self.entered = prompt + len(self.output)
        if begin >= prompt:
            return (), self.output[begin - prompt :]
        return self.request.prompt_ids[begin:], self.output[:]

    def mask(self, made: int) -> Array | None:
        """Which tokens may be its output's at place `made`, as `LogitEdits.allowed`; None: all."""
        without_stops = self.without_stops if made < self.request.min_tokens else None
        if self.constraint is None:
            return without_stops
        assert made == len(self.output), "a grammar's mask needs the token before"
        allowed = self.constraint.mask()
        both = allowed if without_stops is None else allowed & without_stops
        return both if both.any() else allowed  # a grammar that must end goes before the shortest length

    def tokens(self, begin: int, end: int) -> Array:
        """The tokens at these positions: int64 [end - begin]"""
        if end <= len(self.prompt):
            return self.prompt[begin:end]
        beyond = [self.token(position) for position in range(max(begin, len(self.prompt)), end)]
        return np.concatenate([self.prompt[begin:], np.array(beyond, dtype=np.int64)])

    def token(self, position: int) -> int:
        """The token at a position of prompt, start and output; 0 for one that isn't known yet."""
        beyond = position - len(self.prompt)
        if beyond < 0:
            return int(self.prompt[position])
        if beyond < len(self.start):
            return self.start[beyond]
        made = beyond - len(self.start)
        return self.output[made] if made < len(self.output) else 0
