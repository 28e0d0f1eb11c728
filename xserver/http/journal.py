"""Journal: requests with an `Idempotency-Key`, which are answered even if their client or this process ends.

Each request is a file in a private directory. Before admission, the file holds the body with its sampling seed. After
its end, the file also holds the tokens, until the retention time is over.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xcore.console import output
from xcore.requests.engine_protocol import Ended, TokenLogProb
from xcore.requests.request import FinishReason, Request
from xserver.engines.engine_link import Output
from xserver.http.api_error import SERVER, ApiError

MAX_KEY = 256
"""Maximum characters of a key."""
MAX_ENTRIES = 10_000
_RETRY_S = 10


@dataclass(eq=False)
class Entry:
    """One journalled request, whose sequences continue whether or not a client reads them."""

    name: str
    """Hash of caller and key: the file's name."""
    path: str
    """The API path of the request."""
    asked: str
    """A hash of the original body."""
    body: dict[str, object]
    answer_id: str
    """The id of its answer, without the prefix of its path."""
    created: int
    """The creation time of the answer, in seconds of the wall clock."""
    accepted: bool = False
    """Whether it runs to completion: it was admitted, by this process or another, and its file exists."""
    outputs: list[Output] | None = None
    """Set when the request is submitted to the engine."""
    ended_s: float | None = None
    """The end, by the wall clock."""
    asking: int = 0
    """Number of requests that wait for its acceptance."""
    admitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    reading: "asyncio.Future[None] | None" = None
    """The task that reads it to its end."""

    @property
    def document(self) -> dict[str, object]:
        """The contents of its file."""
        tokens = None if self.ended_s is None else [o.tokens for o in self.outputs or ()]
        return {
            "path": self.path,
            "asked": self.asked,
            "body": self.body,
            "answer_id": self.answer_id,
            "created": self.created,
            "ended_s": self.ended_s,
            "tokens": tokens,
            "logprobs": None if tokens is None else [[o.logprobs, o.prompt_logprobs] for o in self.outputs or ()],
            "reasons": None if tokens is None else [o.ended.reason if o.ended else "stop" for o in self.outputs or ()],
        }


class Journal:
    """The entries of one server; `ttl_s` is the retention time of an answer after its end, in seconds."""

    def __init__(self, directory: Path, ttl_s: float):
        self._directory, self._ttl_s = directory, ttl_s
        self.entries: dict[str, Entry] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in directory.glob("*.partial"):  # left by a process that was killed while writing
            path.unlink(missing_ok=True)
        for path in directory.glob("*.json"):
            self._read(path)

    @property
    def unfinished(self) -> list[Entry]:
        """Accepted entries that haven't ended; other requests may still be refused."""
        return [entry for entry in self.entries.values() if entry.accepted and entry.ended_s is None]

    def entry(
        self, caller: str, key: str, path: str, body: dict[str, object], seed: Callable[[], int], answer_id: str
    ) -> Entry:
        """Return the entry of a request: an existing one to join, or a new one, whose answer gets `answer_id`.

        Raises ApiError for a key that had another body.
        """
        if not 1 <= len(key) <= MAX_KEY:
            raise ApiError(400, f"The Idempotency-Key must have 1 to {MAX_KEY} characters.", "invalid_value")
        name = hashlib.sha256(f"{caller}\n{key}".encode()).hexdigest()
        asked = hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()
        known = self.entries.get(name)
        if known:
            if known.asked != asked:
                raise ApiError(422, "This Idempotency-Key has been used with another body.", "idempotency_key_reused")
            return known
        if len(self.entries) >= MAX_ENTRIES:
            raise self._unavailable("it is full")
        seeded = body if body.get("seed") is not None else {**body, "seed": seed()}
        entry = self.entries[name] = Entry(name, path, asked, seeded, answer_id, int(time.time()))
        return entry

    async def keep(self, entry: Entry) -> None:
        """Write an entry before it is accepted; ApiError if it can't be written."""
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, entry))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})  # otherwise its thread could write the file after `forget`
            raise
        except OSError as error:
            raise self._unavailable((error.strerror or str(error)).lower()) from None

    @contextlib.contextmanager
    def asking(self, entry: Entry) -> Iterator[None]:
        """Return a context in which a request waits for an entry's acceptance.

        If none of the waiting requests is accepted, the entry is deleted after the last one. The key may then come with
        another body.
        """
        entry.asking += 1
        try:
            yield
        finally:
            entry.asking -= 1
            if not entry.asking and not entry.accepted:
                self.forget(entry)

    def forget(self, entry: Entry) -> None:
        """Delete an entry: its retention time is over, or it has no answer."""
        self.entries.pop(entry.name, None)
        with contextlib.suppress(OSError):
            self._path(entry).unlink(missing_ok=True)

    async def finish(self, entry: Entry) -> None:
        """Keep the tokens of an entry whose sequences have ended, for the retention time."""
        entry.ended_s = time.time()
        try:
            await asyncio.to_thread(self._write, entry)
        except OSError as error:  # this process still answers it
            output.note(f"an answer can't be written to the journal ({(error.strerror or str(error)).lower()})")
        self._delete_later(entry, entry.ended_s)

    def begin(self, unserved: Sequence[Entry] = ()) -> None:
        """Schedule the deletion of answers from another process, and of its requests that are `unserved`.

        Until then, a server with their models may be started instead of this one. Call it in the event loop.
        """
        if unserved:
            output.note(f"{len(unserved)} journalled requests need models that this server lacks: they will be deleted")
        for entry in unserved:
            self._delete_later(entry, time.time())
        for entry in self.entries.values():
            if entry.ended_s is not None:
                self._delete_later(entry, entry.ended_s)

    def _delete_later(self, entry: Entry, since_s: float) -> None:
        """Delete an entry when its retention time since `since_s` is over, by the wall clock."""
        left_s = max(0.0, since_s + self._ttl_s - time.time())
        asyncio.get_running_loop().call_later(left_s, self.forget, entry)

    def _unavailable(self, why: str) -> ApiError:
        what = f"The journal can't be written ({why}): send the request without an Idempotency-Key, or retry later."
        return ApiError(503, what, "journal_unavailable", None, SERVER, {"Retry-After": str(_RETRY_S)})

    def _path(self, entry: Entry) -> Path:
        return self._directory / f"{entry.name}.json"

    def _write(self, entry: Entry) -> None:
        """Write an entry's file atomically, and wait until it is on disk."""
        path = self._path(entry)
        temporary = path.with_suffix(".partial")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(entry.document, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    def _read(self, path: Path) -> None:
        """Read an entry that another process has left; delete a torn or expired one."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            answer_id = document.get("answer_id", path.stem[:24])  # earlier versions wrote neither of them
            created = document.get("created", int(path.stat().st_mtime))
            asked = document["path"], document["asked"], document["body"]
            entry = Entry(path.stem, *asked, answer_id, created, accepted=True)
            entry.ended_s = document["ended_s"]
            if entry.ended_s is not None:
                of_outputs = zip(document["tokens"], document["reasons"], document["logprobs"], strict=True)
                entry.outputs = [_ended(*of_output) for of_output in of_outputs]
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            path.unlink(missing_ok=True)
            return
        if entry.ended_s is not None and time.time() - entry.ended_s > self._ttl_s:
            path.unlink(missing_ok=True)
            return
        self.entries[entry.name] = entry


def _ended(
    tokens: list[int],
    reason: FinishReason,
    logprobs: tuple[list[TokenLogProb], list[TokenLogProb]],
) -> Output:
    """Return an output that ended before this process began."""
    own, prompts = logprobs
    request = Request("", (0,), max(1, len(tokens)))
    return Output(request, tokens=tokens, logprobs=own, prompt_logprobs=prompts, ended=Ended("", reason))
