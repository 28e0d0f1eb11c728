"""Answering: the way from a body to a response, shared by completions and chat completions."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from xserver.admission.admission_control import Promise
from xserver.admission.token_bounds import TokenBounds
from xserver.http.api_error import RATE_LIMIT, ApiError, invalid
from xserver.http.event_stream import EventStream, disconnected, event
from xserver.http.frontend import Frontend
from xserver.http.generation import Choice, Generation, Piece, added
from xserver.http.journal import Entry
from xserver.http.output_format import FORMAT_KEYS
from xserver.http.sampling_params import Wanted, requests_of, stop_texts
from xserver.http.schemas import Sampled
from xserver.http.served_model import ServedModel
from xserver.telemetry.monitor import Answering, Arrival
from xserver.telemetry.reporting import reporting
from xserver.text.output_text import OutputText
from xserver.text.stop_texts import StopTexts


class ApiAnswer(ABC):
    """One API request: `prepare` creates its choices; `deltas` and `choice` are their parts of the documents."""

    prefix: ClassVar[str]
    """The prefix of its id."""
    kind: ClassVar[str]
    """The value of `object` in its document."""

    def __init__(self, body: Sampled, frontend: Frontend, answer_id: str, created: int | None = None):
        self.body = body
        self.id = self.prefix + answer_id
        self.created = int(time.time()) if created is None else created
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        self.client: str | None = None
        """Hash of the API key that the request came with."""
        self.generation: Generation
        self.promise: Promise | None = None
        self._model, self._fingerprint = frontend.model.name, frontend.fingerprint

    @abstractmethod
    def bounds(self, frontend: Frontend) -> TokenBounds:
        """Return the bounds on the request's tokens that follow from the body."""

    @abstractmethod
    def prepare(self, frontend: Frontend) -> None:
        """Tokenize and check the body: the slow work that needs no engine."""

    @abstractmethod
    def choice(self, choice: Choice, text: str) -> dict[str, object]:
        """Return the document of a complete choice."""

    @abstractmethod
    def deltas(self, piece: Piece, first: bool) -> Iterable[dict[str, object]]:
        """Return a stream's choices for a new piece of a choice; `first`: the first piece."""

    async def chunks(self) -> AsyncIterator[dict[str, object]]:
        """Yield the stream's documents."""
        begun: set[int] = set()
        async for piece in self.generation.pieces():
            for delta in self.deltas(piece, piece.choice.index not in begun):
                yield self.document([delta], stream=True)
            begun.add(piece.choice.index)
        if self.wants_usage:
            yield self.document([], stream=True, usage=self.usage)

    def whole(self, texts: dict[int, str]) -> dict[str, object]:
        """Return the document of the complete answer, given the texts by the choices' indices."""
        choices = [self.choice(choice, texts[choice.index]) for choice in self.choices]
        return self.document(choices, usage=self.usage)

    def event(self, document: dict[str, object]) -> bytes:
        """Return an event of the stream."""
        return event(document)

    def failure(self, error: ApiError) -> bytes:
        """Return the stream's event of an error."""
        return event(error.body)

    last_event: ClassVar[bytes] = b"data: [DONE]\n\n"
    """The bytes that end a stream."""

    def check_stream(self) -> None:
        """Raise ApiError for stream options without a stream."""
        if self.body.stream_options is not None and not self.body.stream:
            raise invalid(
                "'stream_options' needs 'stream': set 'stream' to true, or remove 'stream_options'.", "stream_options"
            )

    def add_choices(
        self,
        frontend: Frontend,
        ids: Sequence[int],
        max_tokens: int,
        wanted: Wanted,
        place: int = 0,
    ) -> None:
        """Add the `n` choices of the prompt with index `place`. With `max_tokens` 0 their outputs are omitted."""
        body, model = self.body, frontend.model
        self.prompt_tokens += len(ids)
        keys = frontend.block_keys(ids, body.cache_salt)
        for request in requests_of(body, ids, max(1, max_tokens), model.spec.vocab, wanted, place, self.client):
            model.check_grammar(request, wanted.grammar_param)
            text = OutputText(model.token_bytes, ids, named=wanted.named)
            stops = StopTexts(stop_texts(body), bool(body.include_stop_str_in_output))
            choice = Choice(len(self.choices), request, text, stops, _silent(body, model), max_tokens == 0, keys)
            self.choices.append(choice)

    @property
    def due_s(self) -> float:
        """The promised time of the answer, by the monotonic clock; infinite without a promise, as after a restart."""
        return self.promise.due_s if self.promise else math.inf

    @property
    def usage(self) -> dict[str, object]:
        """The numbers of tokens so far."""
        made = sum(choice.taken for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were in the cache; a prompt with several choices counts once."""
        first: dict[int, Choice] = {}
        for choice in self.choices:
            first.setdefault(id(choice.request.prompt_ids), choice)
        return sum(choice.output.cached_tokens for choice in first.values())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.body.stream_options
        return bool(options and options.include_usage)

    def document(
        self, choices: list[dict[str, object]], stream: bool = False, usage: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Return a response, or a chunk of a stream."""
        document = {
            "id": self.id,
            "object": self.kind + (".chunk" if stream and self.kind.startswith("chat") else ""),
            "created": self.created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }
        if stream and usage is None and self.body.stream_options and self.body.stream_options.continuous_usage_stats:
            usage = self.usage
        if usage is not None or (stream and self.wants_usage):
            document["usage"] = usage
        return document


Make = Callable[[], ApiAnswer]
"""Makes a new answer to one request: a journalled one may be read several times."""


async def answer(http: HttpRequest, make: Make, frontend: Frontend, entry: Entry | None = None) -> Response:
    """Return the response to one API request: a stream, or a document when it is complete.

    A request whose journal `entry` already runs joins it.
    """
    frontend.preparing += 1
    try:
        work = await _submitted(make, frontend, entry, http.state.arrival)
    finally:
        frontend.preparing -= 1
    await _confirm(work, frontend)
    frontend.active += 1
    choices, preemptions = tuple(work.choices), frontend.monitor.preemptions
    http.state.answering = Answering(choices, work.prompt_tokens, work.promise, preemptions)
    if work.body.stream:
        return EventStream(work, lambda: _close(work, frontend, entry), frontend.stall_s)
    try:
        texts = await _unless_gone(http, work.generation)
    except ApiError:
        if entry is not None and entry.reading is not None:
            await asyncio.wait({entry.reading})  # the journal forgets it before its client can ask again
        raise
    finally:
        _close(work, frontend, entry)
    if texts is None:
        return Response(status_code=499)  # the client has disconnected
    return JSONResponse(work.whole(texts))


async def _submitted(make: Make, frontend: Frontend, entry: Entry | None, arrival: Arrival) -> ApiAnswer:
    """Return the answer to a request that the engine has got, or that its journal `entry` already runs."""
    if entry is not None:
        work = await _join(entry, make, frontend, arrival)
        work.generation = Generation(frontend.link, work.choices, entry.outputs)
        return work
    work = make()
    bounds = _bounds(work, frontend)
    if frontend.admission:
        _count(bounds.sequences, frontend, arrival)
        queue = frontend.tokenizing if _is_slow(work, bounds) else None
        frontend.admission.refuse_early(bounds, arrival.at_s, queue)
    await _prepare(work, bounds, frontend)
    _admit(work, frontend, arrival, [frontend.cached_tokens(choice) for choice in work.choices])
    work.generation = Generation(frontend.link, work.choices, due_s=work.due_s)
    return work


_SHORT, _FEW = 4096, 8
"""Maximum characters and sequences of a request that is prepared at once: a thread would take longer to begin."""
_SLOW = (*FORMAT_KEYS, "tools", "chat_template_kwargs")
"""Keys of bodies whose preparation may take long however short the texts are."""


def _bounds(work: ApiAnswer, frontend: Frontend) -> TokenBounds:
    """Return a request's token bounds, known from its body; ApiError for more sequences than may ever wait."""
    bounds, most = work.bounds(frontend), frontend.max_waiting
    if bounds.sequences > most:
        why = f"The request has {bounds.sequences:,} sequences, prompts times 'n', and at most {most:,} may wait."
        raise ApiError(429, why, "concurrency_limit", None, RATE_LIMIT, {"x-should-retry": "false"})
    return bounds


def _is_slow(work: ApiAnswer, bounds: TokenBounds) -> bool:
    """Return whether preparing a request may take long, so that it waits for its turn in a thread."""
    short = bounds.characters <= _SHORT and bounds.sequences <= _FEW
    return not short or any(getattr(work.body, key, None) is not None for key in _SLOW)


async def _prepare(work: ApiAnswer, bounds: TokenBounds, frontend: Frontend) -> None:
    """Tokenize and check a request, at once or in its turn."""
    if _is_slow(work, bounds):
        await frontend.tokenizing.run(bounds.characters, lambda: work.prepare(frontend))
    else:
        work.prepare(frontend)


def _count(sequences: int, frontend: Frontend, arrival: Arrival) -> None:
    """Count the sequences of a request, unless it is a retry.

    A retry was counted before, unless there was no engine: then popularity isn't watched.
    """
    if not arrival.again:
        frontend.arrived += sequences


def _admit(work: ApiAnswer, frontend: Frontend, arrival: Arrival, cached: Sequence[int] = ()) -> None:
    """Accept a request, or raise ApiError; `cached` are the tokens of each sequence's prompt that are in the cache."""
    frontend.check_ready()
    assert frontend.admission, "an engine that has opened"
    lengths = [(len(choice.request.prompt_ids), choice.request.max_tokens) for choice in work.choices]
    work.promise = frontend.admission.admit(lengths, arrival.at_s, cached)
    if work.promise:
        for choice in work.choices:
            choice.request = replace(choice.request, slack_s=work.promise.slack_s)


async def _confirm(work: ApiAnswer, frontend: Frontend) -> None:
    """Wait until the engine holds the cached tokens that a promise counts on; ApiError if some are lost.

    Only then is the request accepted. The engine answers between two steps.
    """
    if work.promise is None or not work.promise.cached:
        return
    kept = False
    frontend.active += 1  # a drain waits for it
    try:
        held = await work.generation.held()
        kept = all(have >= counted for have, counted in zip(held, work.promise.cached, strict=True))
    finally:
        frontend.active -= 1
        if not kept:
            work.generation.close()
    if not kept:
        frontend.check_ready()
        assert frontend.admission, "an engine that is ready"
        raise frontend.admission.lost_prefix()


async def _join(entry: Entry, make: Make, frontend: Frontend, arrival: Arrival) -> ApiAnswer:
    """Make the answer to a journalled request, and accept and run it if it isn't running yet. May raise ApiError."""
    assert frontend.journal
    with frontend.journal.asking(entry):  # an entry that can't be answered must not keep its key
        work = make()
        await _prepare(work, _bounds(work, frontend), frontend)
        async with entry.admitting:
            if entry.outputs is None:
                frontend.check_ready()
                await frontend.journal.keep(entry)
                _count(len(work.choices), frontend, arrival)
                _admit(work, frontend, arrival)  # after the write, so that no other request is admitted in between
                entry.accepted = True
                run_entry(entry, make, work, frontend)
    return work


def run_entry(entry: Entry, make: Make, work: ApiAnswer, frontend: Frontend) -> None:
    """Submit a journalled request to the engine, and read it to its end, whether or not a client does."""
    entry.outputs = added(frontend.link, work.choices, work.due_s)
    entry.reading = asyncio.ensure_future(_read_entry(entry, make, frontend))


async def _read_entry(entry: Entry, make: Make, frontend: Frontend) -> None:
    assert frontend.journal
    work = make()
    frontend.active += 1
    try:
        await _prepare(work, work.bounds(frontend), frontend)
        generation = Generation(frontend.link, work.choices, entry.outputs)
        await generation.finished()
        generation.abort()  # sequences ended by a stop text
        generation.close()
        _learn(work, frontend)
        await frontend.journal.finish(entry)
    except ApiError:
        if not frontend.link.failed:  # otherwise the server ends, and the next server runs it
            frontend.journal.forget(entry)
            frontend.link.abort(entry.outputs or [])  # the other sequences of the request
    finally:
        frontend.active -= 1


def _close(work: ApiAnswer, frontend: Frontend, entry: Entry | None) -> None:
    """Count a request that has been answered, or whose client has disconnected.

    A journal `entry` counts only once for all requests that join it.
    """
    work.generation.close()
    frontend.active -= 1
    if entry is None:
        _learn(work, frontend)


@reporting("lengths")
def _learn(work: ApiAnswer, frontend: Frontend) -> None:
    """Report the lengths of the answers to admission, including answers that a stop text has ended."""
    for choice in work.choices:
        ended = choice.output.ended
        whole = choice.finish_reason or (ended and ended.reason in ("stop", "length"))  # also without its client
        if frontend.admission and whole:
            frontend.admission.ended(choice.output)


async def _unless_gone(http: HttpRequest, generation: Generation) -> dict[int, str] | None:
    """Return the texts; None if the client disconnects before they are complete."""
    working = asyncio.ensure_future(generation.finished())
    leaving = asyncio.ensure_future(disconnected(http.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


def _silent(body: Sampled, model: ServedModel) -> frozenset[int]:
    """Return the tokens that end an output without text: EOS and stop tokens."""
    eos = () if body.ignore_eos else model.eos
    return frozenset() if body.include_stop_str_in_output else frozenset((*eos, *(body.stop_token_ids or ())))
