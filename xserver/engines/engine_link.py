"""The frontend's end of the engine's socket: it sends sequences to the engine and receives their tokens."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from xcore.requests.engine_protocol import (
    BEGIN,
    DRAIN,
    FROM_ENGINE,
    LOADS,
    MOVES,
    Abort,
    Changed,
    Ended,
    Follow,
    Frames,
    Held,
    Opened,
    Speed,
    Stepped,
    Stop,
    TokenEvent,
    TokenLogProb,
    framed,
)
from xcore.requests.request import Request
from xcore.requests.starting import starting_text
from xcore.specs.schedule import Schedule

_CHUNK = 2**18


@dataclass(eq=False)
class Output:
    """The results of one sequence so far: the engine link appends, a handler reads."""

    request: Request
    """The request; its id is the engine's number for it."""
    listeners: list[Callable[[], object]] = field(default_factory=list)
    """Called when there is a new result."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogProb] = field(default_factory=list)
    """The log-probability of each token, if the request wants them."""
    prompt_logprobs: list[TokenLogProb] = field(default_factory=list)
    """The log-probability of each prompt token, if the request wants them; they come with the first token."""
    cached_tokens: int = 0
    """Tokens of its prompt that were in the cache of prefixes; known from its first token on."""
    is_recorded: bool = False
    """Whether admission has recorded that its prefill has ended."""
    keys: Sequence[int] = ()
    """A short key for each full block of its prompt, if prefixes are cached."""
    held: int | None = None
    """Cached tokens of its prompt that the engine keeps for it until it starts; None: not known yet."""
    start_s: float | None = None
    """When its prefill began, by this process's monotonic clock; known from its first token on."""
    first_s: float | None = None
    """When its first token came, by this process's monotonic clock."""
    last_s: float = 0.0
    """When its latest token came, by this process's monotonic clock."""
    ended: Ended | None = None
    added_s: float = 0.0
    """When it was given to the engine, by this process's monotonic clock."""
    due_s: float = math.inf
    """When it should have ended, by this process's monotonic clock; infinite: no limit."""
    lost_engines: int = 0
    """Engines in a row that ended while it waited for its next token."""
    link: "EngineLink | None" = None
    """The link to the engine that has it."""

    def take(self, event: TokenEvent, now_s: float, zero_s: float) -> None:
        """Append a token that came at `now_s`, from an engine whose run began at `zero_s`."""
        self.tokens.append(event.token)
        self.lost_engines = 0
        if event.logprob and self.request.logprobs is not None:
            self.logprobs.append(event.logprob)
        if event.prompt:
            self.prompt_logprobs = list(event.prompt)
        self.cached_tokens = self.cached_tokens or event.cached_tokens
        if event.start_s is not None:
            self.start_s = zero_s + event.start_s
        self.first_s, self.last_s = self.first_s or now_s, now_s

    def announce(self) -> None:
        """Call the listeners: there is a new result."""
        for listener in self.listeners:
            listener()


def _same_clock() -> float:
    """Return by how many seconds the clock of an engine on this machine is ahead: none."""
    return 0.0


class EngineLink:
    """The link to one engine at a time, and the sequences that the engine runs; used from one event loop only.

    `on_stepped` is called with every message of the engine, `on_lost` when its connection ends.
    """

    def __init__(self) -> None:
        self.opened: Opened | None = None
        """The connected engine's description; None without an engine."""
        self.speed: Speed | None = None
        """The speed that an engine has reported at its end, if it was to report one."""
        self.outputs: dict[str, Output] = {}
        """Sequences that haven't ended, in order of arrival."""
        self.last: Stepped | None = None
        """The latest message."""
        self._cached: set[int] = set()
        """Short keys of the blocks in the engine's cache of prefixes, as of the latest message."""
        self.heard_s = 0.0
        """When the latest message came, by the monotonic clock."""
        self.on_opened: Callable[[Opened], object] = lambda opened: None
        self.on_changed: Callable[[Opened], object] = lambda opened: None
        self.on_stepped: Callable[[Stepped], object] = lambda stepped: None
        self.on_lost: Callable[[], object] = lambda: None
        self._writer: asyncio.StreamWriter | None = None
        self._ahead_s: Callable[[], float] = _same_clock
        self._moving = False
        """Whether the engine is about to connect from another rank: it is still `opened`."""
        self._loading = False
        """Whether the engine is about to open again: it is still `opened`."""
        self._asked: list[Schedule] = []
        """Requested schedules that the engine doesn't follow yet."""
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self._next = 0
        self._failed = False
        self._draining = False
        self._touched: dict[str, Output] = {}
        """Sequences whose new results aren't announced yet."""
        self._busy_s = 0.0
        """The time since which there are sequences, by the monotonic clock."""

    async def listen(self, path: Path) -> None:
        """Let engines connect to this socket, which is in a directory that only this user can access."""
        self._path = path
        self._server = await asyncio.start_unix_server(self.serve, path)

    @property
    def starting(self) -> str:
        """The engine's present work before it opens; empty if it is unknown."""
        return starting_text(self._path)

    @property
    def zero_s(self) -> float:
        """The start of the engine's clock, by this process's monotonic clock; 0 without an engine."""
        return self.opened.zero_s - self._ahead_s() if self.opened else 0.0

    @property
    def connected(self) -> bool:
        """Whether an engine's connection is open."""
        return self._writer is not None

    @property
    def failed(self) -> bool:
        """Whether there will be no further engine."""
        return self._failed

    @property
    def silent_s(self) -> float:
        """Seconds for which the engine has sent nothing although it has sequences; 0 without any, or while it loads."""
        if not self.outputs or self.opened is None or self._loading:
            return 0.0
        return time.monotonic() - max(self.heard_s, self._busy_s)

    def hit(self, keys: Sequence[int]) -> int:
        """Return how many of these blocks, from the first on, are in the engine's cache of prefixes."""
        return next((place for place, key in enumerate(keys) if key not in self._cached), len(keys))

    def add(self, request: Request, due_s: float = math.inf, keys: Sequence[int] = ()) -> Output:
        """Give a sequence to the engine, under a new number; it should have ended at `due_s`.

        `keys` are the keys of its prompt's blocks. With prefix caching, the engine answers with the blocks that it
        keeps for the sequence.

        If there will be no further engine, the sequence ends at once with an error.
        """
        number, self._next = str(self._next), self._next + 1
        self._busy_s = self._busy_s if self.outputs else time.monotonic()
        output = Output(replace(request, id=number), added_s=time.monotonic(), due_s=due_s, keys=keys, link=self)
        if self._failed:
            output.ended = Ended(number, "error")
            return output
        self.outputs[number] = output
        self._send(output.request)
        return output

    def abort(self, outputs: list[Output]) -> None:
        """End sequences without any further results, also those that another link has taken over."""
        for link in {output.link or self for output in outputs}:
            link._abort([output for output in outputs if (output.link or self) is link])

    def _abort(self, outputs: list[Output]) -> None:
        running = [output.request.id for output in outputs if self.outputs.pop(output.request.id, None)]
        if running:
            self._send(Abort(tuple(running)))

    def stop(self, output: Output, output_tokens: int) -> None:
        """End a sequence at a stop text, after `output_tokens` of its tokens, without any further results."""
        link = output.link or self
        if link.outputs.pop(output.request.id, None):
            link._send(Stop(output.request.id, output_tokens))

    def take_over(self, output: Output) -> None:
        """Let this link's engine continue a sequence of another link, under a new number."""
        if output.link:
            output.link.outputs.pop(output.request.id, None)
        number, self._next = str(self._next), self._next + 1
        self._busy_s = self._busy_s if self.outputs else time.monotonic()
        output.request, output.link, output.held = replace(output.request, id=number), self, None
        self.outputs[number] = output
        self._continue(output)

    def follow(self, schedule: Schedule) -> None:
        """Let the engine follow another schedule; during a change, after that change."""
        self._asked.append(schedule)
        self._send(Follow(schedule))

    def drain(self) -> bool:
        """Tell the engine that no more sequences come; return whether there is an engine."""
        self._draining = True
        self._send(DRAIN)
        return self._writer is not None or self._moving

    def disconnect(self) -> None:
        """Drop the connected engine, or the one that is about to connect."""
        if self._writer:
            self._writer.close()
        self.ended()

    def ended(self) -> None:
        """Record that the engine has ended: it will not connect from another rank."""
        if self._moving:
            self._moving = self._loading = False
            self.opened = None

    def lost_engine(self, most: int) -> int:
        """Count an engine that has ended unexpectedly.

        Sequences that waited for their next token at the ends of `most` engines in a row end with an error: one of them
        may be the cause. Returns their number.
        """
        for output in self.outputs.values():
            output.lost_engines += 1
        return self._end([output for output in self.outputs.values() if output.lost_engines >= most])

    def fail(self) -> None:
        """End all present and future sequences with an error: there will be no further engine."""
        self._failed = True
        self.end_all()

    def end_all(self, why: str | None = None) -> int:
        """End all present sequences with an error; return their number."""
        return self._end(list(self.outputs.values()), why)

    def _end(self, outputs: list[Output], why: str | None = None) -> int:
        """End sequences with an error; return their number."""
        for output in outputs:
            del self.outputs[output.request.id]
            output.ended = Ended(output.request.id, "error", error=why)
        for output in outputs:
            output.announce()
        return len(outputs)

    async def close(self) -> None:
        """Close the socket."""
        if self._server:
            self._server.close()
        if self._writer:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def _send(self, message: object) -> None:
        if self._writer:
            self._writer.write(framed(message))

    def _continue(self, output: Output) -> None:
        """Send a sequence that another engine has begun; no other may pass it any more."""
        self._send(replace(output.request, output_ids=tuple(output.tokens), slack_s=None))

    async def serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ahead_s: Callable[[], float] = _same_clock,
    ) -> None:
        """Serve an engine's connection until it ends; `ahead_s`: how far its machine's clock is ahead of this one's."""
        if self._writer:  # a dropped engine
            writer.close()
            return
        self._writer, self._ahead_s, frames = writer, ahead_s, Frames(FROM_ENGINE)
        try:
            while data := await reader.read(_CHUNK):
                for message in frames.feed(data):
                    self._take(message)
                self._announce()
        except ConnectionError:
            pass
        finally:
            self._announce()  # also after a message that can't be read
            self._writer = None
            writer.close()
            if not self._moving:
                self.opened, self._loading = None, False
                self._asked.clear()  # one of them may have ended the engine
                self.on_lost()

    def _take(self, message: object) -> None:
        self.heard_s = time.monotonic()
        if message == LOADS:
            self._loading = True
            return
        if message == MOVES:
            assert self._writer, "the connection that it came by"
            self._moving = True
            self._writer.close()
            return
        if isinstance(message, Opened):
            self._begin(message)
            return
        if isinstance(message, Changed):
            assert self.opened, "an engine that has opened"
            self.opened = replace(self.opened, schedule=message.schedule, goodput_seq_s=None)
            self._taken_up(message.schedule)
            self.on_changed(self.opened)
            return
        if isinstance(message, Speed):
            self.speed = message
            return
        if isinstance(message, Held):
            if receiver := self.outputs.get(message.id):
                receiver.held = message.tokens
                receiver.announce()
            return
        assert isinstance(message, Stepped)
        self.last = message
        zero_s = self.zero_s
        if message.cached:
            self._cached.update(message.cached.found.tolist())
            self._cached.difference_update(message.cached.lost.tolist())
        for event in message.tokens.events():
            if receiver := self.outputs.get(event.request_id):  # else it was aborted
                receiver.take(event, self.heard_s, zero_s)
                self._touched[event.request_id] = receiver
        for ended in message.ended:
            receiver = self.outputs.pop(ended.id, None)
            if receiver:
                receiver.ended = ended
                self._touched[ended.id] = receiver
        self.on_stepped(message)

    def _announce(self) -> None:
        """Announce the new results, once for all messages that have come together."""
        touched, self._touched = self._touched, {}
        for output in touched.values():
            output.announce()

    def _begin(self, opened: Opened) -> None:
        """Let a newly opened engine continue all sequences that haven't ended."""
        before, self.opened, self._moving, self._loading = self.opened, opened, False, False
        self._cached.clear()
        self._taken_up(opened.schedule)
        if opened.refused:
            self._drop(opened.refused)
            if before and before.schedule != opened.schedule:  # the earlier schedule had taken over in place
                self._asked.insert(0, before.schedule)
        self.on_opened(opened)
        self._send(BEGIN)
        for output in self.outputs.values():  # sequences that another engine has begun
            output.held = None
            self._continue(output)
        for schedule in self._asked[-1:]:  # the request came while there was no engine
            self._send(Follow(schedule))
        if self._draining:
            self._send(DRAIN)

    def _taken_up(self, schedule: Schedule) -> None:
        """Remove a schedule that the engine now follows, and all earlier ones, from the requested schedules."""
        if schedule in self._asked:
            del self._asked[: self._asked.index(schedule) + 1]

    def _drop(self, refused: Schedule) -> None:
        """Remove a schedule that the engine can't follow and all earlier ones from the requested schedules.

        The KV blocks may differ: the refused schedule had enough for the accepted sequences.
        """
        alike = (asked for asked in self._asked if replace(asked, kv_blocks=refused.kv_blocks) == refused)
        if asked := next(alike, None):
            self._taken_up(asked)
