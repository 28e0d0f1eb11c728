"""Generation: the sequences of one API request, from admission to the end of their texts."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from xcore.requests.request import NO_GRAMMAR, Request
from xserver.engines.engine_link import EngineLink, Output
from xserver.http.api_error import SERVER, ApiError, invalid
from xserver.text.output_text import OutputText
from xserver.text.stop_texts import StopTexts
from xserver.text.text_log_probs import TextLogProb

_SHOWN = 300
"""Maximum characters of an engine's refusal in an answer to a client."""


@dataclass(eq=False)
class Choice:
    """One sequence as its client sees it."""

    index: int
    request: Request
    text: OutputText
    stops: StopTexts
    silent: frozenset[int] = frozenset()
    """Tokens whose text is omitted if they end the output."""
    dropped: bool = False
    """Whether the whole output is omitted: the engine generates a token even if none is wanted."""
    keys: Sequence[int] = ()
    """A short key for each full block of its prompt, if prefixes are cached."""
    output: Output = field(init=False)
    finish_reason: str | None = None
    taken: int = 0
    """Number of tokens whose text has been returned or is held back; only these count as sampled."""
    logprobs: list[TextLogProb] = field(default_factory=list)
    """The log-probabilities of the taken tokens, if requested."""
    _length: int = 0
    """Code points of the taken tokens so far."""
    _passed: int = 0
    """Code points that were returned: a stop text may hold others back, or cut them off."""
    _given: int = 0
    """Number of tokens that were returned with their text."""

    def take(self, tokens: Sequence[int], ended: bool) -> tuple[str, bool]:
        """Return the text that more tokens complete, and whether a stop text ended it; tokens after it aren't taken."""
        text, stopped = self._take(tokens, ended)
        self._passed += len(text)
        return text, stopped

    def give(self, ended: bool) -> "slice[int, int, None]":
        """Return the slice of tokens whose text was returned; at the end, all remaining tokens.

        With log-probabilities, tokens whose text is held back are held back too, because a stop text may cut that text
        off. Tokens without returned text are then placed at the end of the text.
        """
        begun, self._given = self._given, self.taken
        if ended:
            cut = (replace(entry, offset=min(entry.offset, self._passed)) for entry in self.logprobs[begun:])
            self.logprobs[begun:] = cut
        elif self.logprobs and self.stops.holds:
            later = (i for i in range(begun, self.taken) if self.logprobs[i].offset >= self._passed)
            self._given = next(later, self.taken)
        return slice(begun, self._given)

    def _take(self, tokens: Sequence[int], ended: bool) -> tuple[str, bool]:
        if not self.stops and self.request.logprobs is None and not self.dropped:
            return self._take_at_once(tokens, ended), False
        text, stopped = "", False
        for token in () if self.dropped else tokens:
            asked = self.request.logprobs is not None
            entry = TextLogProb.of(self.text, token, self.output.logprobs[self.taken]) if asked else None
            self.taken += 1
            last = ended and self.taken == len(self.output.tokens)
            made = "" if last and token in self.silent else self.text.push([token])
            if entry:
                self.logprobs.append(entry.placed(self._length, made))
            self._length += len(made)
            more, stopped = self.stops.push(made)
            text += more
            if stopped:
                return text, True
        if ended:
            more, stopped = self.stops.push(self.text.finish())
            text += more if stopped else more + self.stops.finish()
        return text, stopped

    def _take_at_once(self, tokens: Sequence[int], ended: bool) -> str:
        """Return the text of tokens, none of which can be the last one unless the output has ended."""
        self.taken += len(tokens)
        silent = ended and tokens and tokens[-1] in self.silent
        text = self.text.push(tokens[:-1] if silent else tokens)
        return text + self.text.finish() if ended else text


@dataclass(frozen=True)
class Piece:
    """New text and tokens of a choice since its last piece."""

    choice: Choice
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TextLogProb]
    finish_reason: str | None


class Generation:
    """Submits all sequences to the engine at once, or joins existing `outputs`; `pieces` yields their results."""

    def __init__(
        self,
        link: EngineLink,
        choices: Sequence[Choice],
        outputs: Sequence[Output] | None = None,
        due_s: float = math.inf,
    ):
        self.choices = choices
        self._link, self._joined = link, outputs is not None
        self._news = asyncio.Event()
        self._only_ends = False
        """Whether only ends are news: a whole answer without stop texts needs no turn for each token."""
        self._listeners: list[Callable[[], None]] = []
        for choice, output in zip(choices, outputs or added(link, choices, due_s), strict=True):
            choice.output = output
            self._listeners.append(partial(self._hear, output))
            output.listeners.append(self._listeners[-1])
        self._news.set()

    def _hear(self, output: Output) -> None:
        if output.ended or not self._only_ends:
            self._news.set()

    async def held(self) -> list[int]:
        """Wait for the engine's answer, and return the cached tokens that it keeps for each sequence.

        An engine that has started meanwhile may hold none: then the tokens cached at the sequence's start count. For a
        sequence that has ended before, the number is 0.
        """
        outputs = [choice.output for choice in self.choices]
        while any(output.held is None and not output.tokens and output.ended is None for output in outputs):
            await self._news.wait()
            self._news.clear()
        self._news.set()
        return [output.cached_tokens if output.held is None else output.held for output in outputs]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield every choice's pieces until all have ended; ApiError if the engine refuses or fails."""
        live = list(self.choices)
        while live:
            await self._news.wait()
            self._news.clear()
            for choice in list(live):
                piece = self._take(choice)
                if piece:
                    yield piece
                if choice.finish_reason:
                    live.remove(choice)

    async def finished(self) -> dict[int, str]:
        """Return the complete texts by the choices' indices."""
        self._only_ends = not any(choice.stops for choice in self.choices)
        texts = dict.fromkeys((choice.index for choice in self.choices), "")
        async for piece in self.pieces():
            texts[piece.choice.index] += piece.text
        return texts

    def close(self) -> None:
        """Stop reading, and end unfinished sequences unless others read them too."""
        for choice, listener in zip(self.choices, self._listeners, strict=True):
            with contextlib.suppress(ValueError):
                choice.output.listeners.remove(listener)
        if not self._joined:
            self.abort()

    def abort(self) -> None:
        """End unfinished sequences."""
        self._link.abort([choice.output for choice in self.choices if choice.output.ended is None])

    def _take(self, choice: Choice) -> Piece | None:
        """Return the new piece of a choice; None if there is nothing new."""
        output = choice.output
        tokens, ended = output.tokens[choice.taken :], output.ended
        if ended and ended.refused:
            raise _refusal(ended.refused, ended.too_long)
        if ended and ended.error == NO_GRAMMAR:
            raise invalid(
                "The output's format can't be followed any further: nothing matches it, or it is too complex."
            )
        if ended and ended.reason in ("error", "cancelled"):
            cause = f": {ended.error}" if ended.error else ""
            raise ApiError(500, f"An internal error ended the request{cause}.", "internal_error", None, SERVER)
        if not tokens and not ended:
            return None
        text, stopped = choice.take(tokens, ended is not None)
        if stopped:
            choice.finish_reason = "stop"
            self._link.stop(output, choice.taken)
        elif ended:
            choice.finish_reason = "length" if choice.dropped else ended.reason
        new = choice.give(choice.finish_reason is not None)
        return Piece(choice, text, output.tokens[new], choice.logprobs[new], choice.finish_reason)


def added(link: EngineLink, choices: Sequence[Choice], due_s: float) -> list[Output]:
    """Give all sequences to the engine; they should have ended at `due_s`."""
    return [link.add(choice.request, due_s, choice.keys) for choice in choices]


def _refusal(why: str, too_long: bool) -> ApiError:
    """Return the error 400 for a request that the engine refuses.

    `why` is a sentence about Request 'NUMBER', which clients don't know.
    """
    if too_long:
        return invalid("The engine can't run this request: it is too long.", code="context_length_exceeded")
    fault = why.partition("' ")[2]
    return invalid(f"The engine can't run this request: it {fault}"[:_SHOWN])
