"""The messages between the server's frontend and its engine over a stream, in the ranks' message format.

    frontend ──BEGIN, Request, Abort, Stop, Follow, DRAIN──► engine
    frontend ◄──Opened, Changed, Held, Stepped, Speed, LOADS, MOVES── engine

A message is its length (8 bytes, little-endian) and its bytes (`xcore.requests.message`). A generated token is a
`TokenEvent` from the rank that decides to the frontend; on the wire, the events of a step are `TokenColumns`.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xcore.arrays import Array, Integers
from xcore.requests.message import pack, unpack
from xcore.requests.request import FinishReason, Request, Result
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Span

DRAIN = "drain"
"""No more requests will come: the engine runs the present ones to completion and exits."""
BEGIN = "begin"
"""The frontend knows that this engine has opened: its earlier messages were for another engine."""
LOADS = "loads"
"""The engine gets other layers or another cache, and sends nothing until it opens with them."""
MOVES = "moves"
"""Another rank leads from now on. The frontend closes the connection; then that rank connects and opens."""
MAX_BYTES = 2**28
"""Largest message in bytes; a longer one is refused."""
PREFIX = 8
"""Bytes of a message's length."""


@dataclass(frozen=True)
class Abort:
    """Requests to abort; unknown ids are ignored."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """A request that a stop text ends; one that has ended is ignored."""

    id: str
    output_tokens: int
    """Output tokens up to the stop text: the engine may have generated more."""


@dataclass(frozen=True)
class Follow:
    """A schedule to follow from now on, without regard to the observed lengths."""

    schedule: Schedule


@dataclass(frozen=True)
class Changed:
    """The engine follows another schedule, with its present layers and caches.

    If the schedule needs other layers or caches, the engine opens again and receives its sequences again.
    """

    schedule: Schedule


@dataclass(frozen=True)
class Opened:
    """The engine is ready for requests."""

    schedule: Schedule
    profile: Profile
    """The ranks' measured profile."""
    goodput_seq_s: float | None
    """Rate that the schedule serves within its bound, as found by the search; None: given schedule, or no bound."""
    assumptions: tuple[str, ...]
    zero_s: float
    """Start of its clock, by the monotonic clock of rank 0's machine, as a rule the frontend's.

    For another machine's engine the link converts it (`EngineLink.zero_s`).
    """
    refused: Schedule | None = None
    """The schedule that it can't follow, with as many KV blocks as accepted requests would need."""


@dataclass(frozen=True)
class Held:
    """The cached blocks that a request holds until it starts.

    Under a bound, an engine of one replica with prefix caching answers every request with this message.
    """

    id: str
    tokens: int
    """Tokens of its prompt in these blocks."""


@dataclass(frozen=True)
class Ended:
    """The end of a request, after its last token."""

    id: str
    reason: FinishReason
    refused: str | None = None
    """Reason why the engine can't run it."""
    too_long: bool = False
    """Whether the reason is its length."""
    error: str | None = None
    """As `Result.error`."""


@dataclass(frozen=True)
class EngineLoad:
    """The present load of the engine, reported by its leader."""

    waiting: int
    encoding: int
    decoding: int
    used_blocks: int
    total_blocks: int
    preemptions: int
    """Number of preemptions so far."""
    drift: float = 0.0
    """Distance between the lengths' distributions and the schedule's, as last tested."""


TokenLogProb = tuple[float | None, tuple[tuple[int, float], ...]]
"""A token's log-probability (None: none), and the likeliest tokens in its place with their log-probabilities."""


@dataclass(frozen=True)
class LogProbColumns:
    """Log-probabilities of tokens, and of the likeliest tokens at the same positions."""

    own: Array
    """float64 [tokens]; NaN: none."""
    counts: Integers
    """int64 [tokens]: number of likeliest tokens of each."""
    likeliest: Integers
    """int64 [sum of counts]."""
    values: Array
    """float64 [sum of counts]."""

    @staticmethod
    def of(tokens: Iterable[TokenLogProb]) -> "LogProbColumns":
        """Pack the log-probabilities of each token."""
        rows = list(tokens)
        pairs = [pair for _, likeliest in rows for pair in likeliest]
        return LogProbColumns(
            np.array([np.nan if own is None else own for own, _ in rows], dtype=np.float64),
            np.array([len(likeliest) for _, likeliest in rows], dtype=np.int64),
            np.array([token for token, _ in pairs], dtype=np.int64),
            np.array([value for _, value in pairs], dtype=np.float64),
        )

    def rows(self) -> list[TokenLogProb]:
        """Unpack the log-probabilities of each token."""
        pairs = list(zip(self.likeliest.tolist(), self.values.tolist(), strict=True))
        ends = np.cumsum(self.counts).tolist()
        return [
            (None if own != own else own, tuple(pairs[end - count : end]))
            for own, count, end in zip(self.own.tolist(), self.counts.tolist(), ends, strict=True)
        ]


@dataclass(slots=True)  # not frozen: there is one for each token, and a frozen one takes three times as long to make
class TokenEvent:
    """One generated token of a request. Times are in seconds since the run began."""

    request_id: str
    index: int
    """Its index in the output, from 0."""
    token: int
    made_s: float
    """When it was made."""
    logprob: TokenLogProb | None = None
    """Its log-probability and the likeliest tokens, as many as the request asks for; None if it asks for none.

    -9999.0 stands for minus infinity.
    """
    start_s: float | None = None
    """When its request's prefill began; only with its first token."""
    prompt: tuple[TokenLogProb, ...] = ()
    """As `logprob`, for each token of the prompt; only with its request's first token."""
    cached_tokens: int = 0
    """Tokens of the prompt that were in the cache of prefixes; only with its request's first token."""


Event = TokenEvent | Result
"""A token, or the end of a request: the output of an engine's step."""


@dataclass(frozen=True)
class TokenColumns:
    """The `TokenEvent`s of an engine's steps, in order, as arrays [tokens]."""

    ids: Integers
    """int64; the engine's request ids are whole numbers."""
    indices: Integers
    """int64."""
    tokens: Integers
    """int64."""
    made_s: Array
    """float64."""
    starts_s: Array
    """float64; NaN for tokens after the first."""
    logprobs: LogProbColumns | None
    """None if no request asked for any."""
    prompts: dict[int, LogProbColumns]
    """The log-probabilities of prompts, by the place of the first token here."""
    cached_tokens: dict[int, int]
    """Tokens of prompts that were in the cache, by the place of the first token here; none for 0."""

    @staticmethod
    def of(events: Sequence[TokenEvent]) -> "TokenColumns":
        """Pack events."""
        asked = any(event.logprob for event in events)
        return TokenColumns(
            np.array([int(event.request_id) for event in events], dtype=np.int64),
            np.array([event.index for event in events], dtype=np.int64),
            np.array([event.token for event in events], dtype=np.int64),
            np.array([event.made_s for event in events], dtype=np.float64),
            np.array([np.nan if event.start_s is None else event.start_s for event in events], dtype=np.float64),
            LogProbColumns.of(event.logprob or (None, ()) for event in events) if asked else None,
            {place: LogProbColumns.of(event.prompt) for place, event in enumerate(events) if event.prompt},
            {place: event.cached_tokens for place, event in enumerate(events) if event.cached_tokens},
        )

    def events(self) -> Iterator[TokenEvent]:
        """Unpack the events."""
        columns = (self.ids, self.indices, self.tokens, self.made_s, self.starts_s)
        logprobs = self.logprobs.rows() if self.logprobs else [(None, ())] * len(self)
        rows = zip(*(column.tolist() for column in columns), logprobs, strict=True)
        for place, (number, index, token, made_s, start_s, logprob) in enumerate(rows):
            prompt = tuple(self.prompts[place].rows()) if place in self.prompts else ()
            begun_s = start_s if start_s == start_s else None
            asked = logprob if logprob[0] is not None else None
            cached = self.cached_tokens.get(place, 0)
            yield TokenEvent(str(number), index, token, made_s, asked, begun_s, prompt, cached)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class CachedKeys:
    """The blocks that entered and left the prefix cache, by `short_keys`: uint64 arrays."""

    found: NDArray[np.uint64]
    lost: NDArray[np.uint64]


def short_keys(keys: Iterable[Hashable]) -> NDArray[np.uint64]:
    """Return the first eight bytes of each key: enough to tell the blocks of one cache apart."""
    return np.frombuffer(b"".join(key[:8] for key in keys if isinstance(key, bytes)), dtype="<u8")


@dataclass(frozen=True)
class Stepped:
    """The results of the engine's steps: tokens in order, then ends. Times are seconds on the engine's clock."""

    now_s: float
    tokens: TokenColumns
    ended: tuple[Ended, ...]
    occupancy: EngineLoad
    spans: tuple[Span, ...] = ()
    """Spans of the leader's device."""
    cached: CachedKeys | None = None
    """The changes of the cache of prefixes; None: no changes, or several replicas."""


@dataclass(frozen=True)
class Speed:
    """The profile of a drained engine at the machine's present speed: its last message, if requested.

    Engines that end together measure their speeds at the same time.
    """

    profile: Profile


FROM_FRONTEND = (Request, Abort, Stop, Follow)
FROM_ENGINE = (Opened, Changed, Held, Stepped, Speed)


def framed(message: object) -> bytes:
    """Return a message with its length before it."""
    data = pack(message)
    return len(data).to_bytes(PREFIX, "little") + data


class Frames:
    """Splits a stream of bytes into messages of `kinds`."""

    def __init__(self, kinds: tuple[type, ...]):
        self._kinds = kinds
        self._data = bytearray()

    def feed(self, data: bytes) -> list[object]:
        """Return the messages that these bytes complete; ValueError for one beyond `MAX_BYTES`."""
        self._data += data
        messages = []
        while len(self._data) >= PREFIX:
            size = int.from_bytes(self._data[:PREFIX], "little")
            if size > MAX_BYTES:
                raise ValueError(f"a message of {size} bytes")
            if len(self._data) < PREFIX + size:
                break
            messages.append(unpack(self._data[PREFIX : PREFIX + size], self._kinds))
            del self._data[: PREFIX + size]
        return messages
