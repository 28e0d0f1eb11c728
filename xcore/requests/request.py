"""Request and Result: the runner's input and output, one JSON line each."""

import zlib
from dataclasses import dataclass
from typing import Literal

from xcore.spec import Spec
from xcore.specs.workload import RequestLengths
from xcore.traces.labels import Labels

FinishReason = Literal["stop", "length", "error", "cancelled"]
NO_GRAMMAR = "the grammar can't be followed any further"
"""The error of a request whose grammar becomes too complex, or allows no further token."""


@dataclass(frozen=True)
class Request(Spec):
    """One prompt to continue; greedy by default."""

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False
    arrival_s: float = 0.0
    """Seconds since the run began."""
    temperature: float = 0.0
    """Divisor of the logits; 0: greedy."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Keep only the likeliest tokens that together have this share of the probability of the top-k tokens."""
    repetition_penalty: float = 1.0
    """Penalty of tokens that are already in the prompt or the output; 1: none."""
    seed: int | None = None
    """Seed of the sampling, which depends on nothing else; None: a hash of the id."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each of its occurrences in the output: -2 to 2."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens that are in the output: -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each once, and what is added to their logits: -100 to 100."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the likeliest one's probability, before top-k and top-p; 0: all."""
    min_tokens: int = 0
    """EOS and stop tokens are not sampled before the output has this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output as EOS does, also with `ignore_eos`."""
    logprobs: int | None = None
    """Report each output token's log-probability, and this many of the likeliest tokens, 0 to 20; None: no.

    They are the model's own: of its logits before any edit, and without the temperature.
    """
    grammar: str | None = None
    """Grammar of the output, in a form of llguidance: a JSON schema, a Lark grammar, or its own {"grammars": [...]}.

    EOS comes only where the grammar may end, and the output ends where nothing can follow; None: any output.
    """

    prompt_logprobs: bool = False
    """Report the prompt's log-probabilities too, with as many likeliest tokens as `logprobs` asks for.

    An encoder-decoder has none. The prompt's prefix isn't taken from the cache.
    """

    client: str | None = None
    """Client that pays for it, for orders that are fair to clients."""
    application: str | None = None
    """The application that made it, for orders of applications."""
    run: str | None = None
    """The application's run that it belongs to; None: it is a run by itself."""
    unit: str | None = None
    """The unit of the application's demand graph that it is a call of."""
    deadline_s: float | None = None
    """When its last token is due, in seconds after its arrival; None: no deadline.

    Orders of applications read it of a run's first request, as the deadline of the whole run.
    """
    slack_s: float | None = None
    """Seconds in a server's queue during which others may pass it; None: none may, if the server has a bound."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    output_ids: tuple[int, ...] = ()
    """Its output by another engine: computed again with the prompt, and not reported again."""

    @property
    def least_tokens(self) -> int:
        """Number of output tokens before which the model can't end the output."""
        return self.max_tokens if self.ignore_eos and not self.stop_token_ids else self.min_tokens

    @property
    def greedy(self) -> bool:
        """Return whether every token is the likeliest one by the model's own logits."""
        return self.temperature == 0 and self.repetition_penalty == 1 and not self.edited

    @property
    def counted(self) -> bool:
        """Return whether tokens are penalised by their counts in the output."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def edited(self) -> bool:
        """Return whether logits are edited, apart from the repetition penalty: see `exegpt.kernels.logit_edits`."""
        return self.counted or bool(self.logit_bias) or self.min_tokens > 0 or self.grammar is not None

    @property
    def own_seed(self) -> int:
        """Return the seed, or a hash of the id."""
        return zlib.crc32(self.id.encode()) if self.seed is None else self.seed

    @property
    def labels(self) -> Labels:
        """Return where it comes from and when it is due."""
        return Labels(self.client, self.application, self.run, self.unit, self.deadline_s)

    @property
    def lengths(self) -> RequestLengths:
        """Return the request's lengths for the simulator, with the longest output that it allows."""
        return RequestLengths(len(self.prompt_ids), self.max_tokens, self.arrival_s)


@dataclass(frozen=True)
class Result(Spec):
    """The outcome of a request. Times are in seconds since the run began."""

    id: str
    prompt_tokens: int
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    arrival_s: float
    start_s: float | None
    """Start of the encoding batch that holds the request."""
    first_token_s: float | None
    finish_s: float
    error: str | None = None
    """Reason of the failure, if the finish reason is `error` and the engine had begun the request."""
    text: str | None = None
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each output token, if the request asks for them; -9999.0 for minus infinity."""
    likeliest: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """For each output token the likeliest tokens in its place with their log-probabilities."""
    prompt_logprobs: tuple[float | None, ...] | None = None
    """Log-probability of each token of the prompt, if the request asks for them; None for the first."""
    prompt_likeliest: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """For each token of the prompt, as `likeliest`; none for the first."""
