"""Request and Result: what comes in and what goes out, one JSON line each (docs: the commands' files)."""

from dataclasses import dataclass
from typing import Literal

from exegpt.noun import Noun
from exegpt.workload import RequestLengths

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True)
class Request(Noun):
    """One prompt to continue, greedily."""

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False
    arrival_s: float = 0.0
    """Seconds since the run began."""

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
