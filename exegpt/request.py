"""Request and Result: what comes in and what goes out, one JSON line each (docs: the commands' files)."""

import zlib
from dataclasses import dataclass
from typing import Literal

from exegpt.noun import Noun
from exegpt.workload import RequestLengths

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True)
class Request(Noun):
    """One prompt to continue: greedily, unless a temperature is asked for."""

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False
    arrival_s: float = 0.0
    """Seconds since the run began."""
    temperature: float = 0.0
    """What logits are divided by before a token is drawn; 0 takes the likeliest one."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn from; 0: all."""
    top_p: float = 1.0
    """Of those, only the likeliest that together have this share of the probability."""
    repetition_penalty: float = 1.0
    """By how much tokens that the prompt or the output has already are less likely."""
    seed: int | None = None
    """Of what is drawn, which depends on nothing else; None: one made of the id."""

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest one."""
        return self.temperature == 0 and self.repetition_penalty == 1

    @property
    def own_seed(self) -> int:
        """The seed, given or made of the id."""
        return zlib.crc32(self.id.encode()) if self.seed is None else self.seed

    @property
    def lengths(self) -> RequestLengths:
        """What a simulator needs to know of it: an output as long as is allowed."""
        return RequestLengths(len(self.prompt_ids), self.max_tokens, self.arrival_s)


@dataclass(frozen=True)
class Result(Noun):
    """What became of a request. Times in seconds since the run began."""

    id: str
    prompt_tokens: int
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    arrival_s: float
    start_s: float | None
    """When the encoding batch that holds the request began."""
    first_token_s: float | None
    finish_s: float
    text: str | None = None
