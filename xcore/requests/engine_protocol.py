"""What the server's frontend and its engine send each other over a stream, in the ranks' message format.

    frontend ──BEGIN, Request, Abort, Stop, Follow, DRAIN──► engine
    frontend ◄──Opened, Changed, Stepped, Speed, LOADS, MOVES── engine

A message is its length (8 bytes, little-endian) and its bytes (`xcore.requests.message`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from xcore.requests.message import pack, unpack
from xcore.requests.request import FinishReason, Request
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Span

DRAIN = "drain"
"""No more requests will come: the engine runs the others to their ends and exits."""
BEGIN = "begin"
"""The frontend knows that this engine has opened: what it has sent before was for another."""
LOADS = "loads"
"""The engine gets other layers or another cache, and says nothing until it opens with them."""
MOVES = "moves"
"""Another rank leads from now on. The frontend closes the connection; then that rank connects and opens."""
MAX_BYTES = 2**28
"""A longer message is refused."""
PREFIX = 8
"""Bytes of a message's length."""

Array = np.ndarray


@dataclass(frozen=True)
class Abort:
    """Requests to end; other ids are ignored."""

    ids: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """A request whose output a stop text ends; one that has ended is ignored."""

    id: str
    output_tokens: int
    """Up to the stop text: the engine may have made more."""


@dataclass(frozen=True)
class Follow:
    """A schedule to follow from now on, whatever the lengths are."""

    schedule: Schedule


@dataclass(frozen=True)
class Changed:
    """The engine follows another schedule, with the layers and caches that it has. Where it needs others, it opens
    anew, and gets its sequences again.
    """

    schedule: Schedule


@dataclass(frozen=True)
class Opened:
    """The engine is ready for requests."""

    schedule: Schedule
    profile: Profile
    """What the ranks were measured to be."""
    goodput_seq_s: float | None
    """What the schedule was found to serve within its bound; None where it was given, or has no bound."""
    assumptions: tuple[str, ...]
    zero_s: float
    """When its clock began, by the frontend's monotonic clock, which is that of rank 0's machine."""
    refused: Schedule | None = None
    """The schedule that it was to follow, and can't: with as many KV blocks as accepted requests would need."""


@dataclass(frozen=True)
class Ended:
    """A request's end, after its last token."""

    id: str
    reason: FinishReason
    refused: str | None = None
    """Why the engine can't run it."""
    too_long: bool = False
    """Whether that is its length."""
    error: str | None = None
    """As `Result.error`."""


@dataclass(frozen=True)
class Occupancy:
    """What the engine's leader holds."""

    waiting: int
    encoding: int
    decoding: int
    used_blocks: int
    total_blocks: int
    preemptions: int
    """So far."""
    drift: float = 0.0
    """How far lengths have moved from the schedule's, as last tested: the distance of their distributions."""


TokenLogProb = tuple[float | None, tuple[tuple[int, float], ...]]
"""A token's log-probability, None where there is none, and the likeliest tokens in its place with theirs."""


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of tokens and of the likeliest ones in their places."""

    own: Array
    """float64 [tokens]; NaN: none"""
    counts: Array
    """int64 [tokens]: how many likeliest each has"""
    likeliest: Array
    """int64 [sum of counts]"""
    values: Array
    """float64 [sum of counts]"""

    @staticmethod
    def of(tokens: Iterable[TokenLogProb]) -> "LogProbs":
        """Packed from each token's."""
        rows = list(tokens)
        pairs = [pair for _, likeliest in rows for pair in likeliest]
        return LogProbs(
            np.array([np.nan if own is None else own for own, _ in rows], dtype=np.float64),
            np.array([len(likeliest) for _, likeliest in rows], dtype=np.int64),
            np.array([token for token, _ in pairs], dtype=np.int64),
            np.array([value for _, value in pairs], dtype=np.float64),
        )

    def rows(self) -> list[TokenLogProb]:
        """Each token's."""
        pairs = list(zip(self.likeliest.tolist(), self.values.tolist(), strict=True))
        ends = np.cumsum(self.counts).tolist()
        return [
            (None if own != own else own, tuple(pairs[end - count : end]))
            for own, count, end in zip(self.own.tolist(), self.counts.tolist(), ends, strict=True)
        ]


@dataclass(frozen=True)
class Prompt:
    """The log-probabilities of a request's prompt, which asked for them; they come with its first token."""

    id: str
    logprobs: LogProbs


@dataclass(frozen=True)
class Stepped:
    """What has come of steps of the engine: tokens, in order, then ends. Seconds of its clock."""

    now_s: float
    ids: Array
    """int64 [tokens]: whose each one is; the engine's ids are whole numbers."""
    tokens: Array
    """int64 [tokens]"""
    made_s: Array
    """float64 [tokens]"""
    starts_s: Array
    """float64 [tokens]: when the request started whose first token it is; NaN for further ones"""
    ended: tuple[Ended, ...]
    occupancy: Occupancy
    spans: tuple[Span, ...] = ()
    """What the leader's device has computed."""
    logprobs: LogProbs | None = None
    """Of the tokens; None where no request asked for any."""
    prompts: tuple[Prompt, ...] = ()


@dataclass(frozen=True)
class Speed:
    """The last message of an engine that was asked for it and has drained: its profile at the machine's speed then,
    while others' engines that ended at once did the same.
    """

    profile: Profile


FROM_FRONTEND = (Request, Abort, Stop, Follow)
FROM_ENGINE = (Opened, Changed, Stepped, Speed)


def framed(message: object) -> bytes:
    """A message with its length before it."""
    data = pack(message)
    return len(data).to_bytes(PREFIX, "little") + data


class Frames:
    """Messages of `kinds` out of a stream of bytes."""

    def __init__(self, kinds: tuple[type, ...]):
        self._kinds = kinds
        self._data = bytearray()

    def feed(self, data: bytes) -> list[object]:
        """The messages that these bytes complete. ValueError for one beyond `MAX_BYTES`."""
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
