"""Read an endpoint's response, a document or the stream of a completion, as its bytes arrive.

Servers differ in what they send. These are no errors: a missing usage, comments that keep the connection alive, a first
chunk that only names the role, and keys that OpenAI doesn't have. A missing or unknown finish reason is an error.
"""

import email.utils
import json
import re
import time
from typing import Any

from xcore.specs.workload import MAX_TOKENS

_MOST = 2**20
"""Maximum bytes kept of a body that isn't streamed."""
_KIND = 20
"""Maximum characters of an unknown finish reason in an error's kind."""
_MESSAGE = 200
"""Maximum characters kept of an error's message."""
_OVERLOADED = (429, 503)
_WHOLE = ("stop", "length", "tool_calls", "function_call", "eos", "eos_token", "stop_sequence")
"""Finish reasons of complete answers: OpenAI's, Together's, and those of Hugging Face's text-generation-inference."""
_ENDS = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""Ends of lines in a stream; after a last \\r, the next read may begin with its \\n."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DONE = b"[DONE]"
_PARTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")
"""Keys of a chat's delta that hold output."""


class Response:
    """A response: status, headers and body."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.body = b""

    def begin(self, status: int, headers: dict[str, str]) -> None:
        """Store the status and the headers."""
        self.status, self.headers = status, headers

    def feed(self, data: bytes, now: float) -> None:
        """Store a part of the body."""
        if len(self.body) < _MOST:
            self.body += data

    def enough(self) -> bool:
        """Return whether the rest of the body isn't needed."""
        return False

    @property
    def document(self) -> object:
        """The body as JSON; None if it isn't JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def message(self) -> str:
        """The error message of the body, in the format of OpenAI or FastAPI, or as any text."""
        return error_message(self.document) or self.body.decode("utf-8", "replace").strip()[:_MESSAGE]

    @property
    def retry_after_s(self) -> float | None:
        """Seconds that an overloaded server asks to wait (1 without a Retry-After); None if it isn't overloaded."""
        if self.status not in _OVERLOADED:
            return None
        try:
            if "retry-after-ms" in self.headers:
                return max(0.0, float(self.headers["retry-after-ms"]) / 1e3)
            return max(0.0, float(self.headers.get("retry-after", "1")))
        except ValueError:
            pass
        try:
            until_s = email.utils.parsedate_to_datetime(self.headers["retry-after"]).timestamp()
        except (ValueError, OverflowError, KeyError):
            return 1.0
        return max(0.0, until_s - time.time())


def error_message(document: object) -> str:
    """Return the message of an error's document; empty if there is none."""
    if not isinstance(document, dict):
        return ""
    error = document.get("error", document.get("detail", document))
    text = error.get("message", "") if isinstance(error, dict) else error
    return str(text)[:_MESSAGE] if isinstance(text, str) else ""


class Stream(Response):
    """The streamed answer to a request for one completion; times are on the event loop's clock.

    With `cut_at`, the answer is complete once it has this many tokens.
    """

    def __init__(self, cut_at: int | None = None) -> None:
        super().__init__()
        self.first_token: float | None = None
        self.last_token: float | None = None
        """When the last token or finish reason came; a usage may come later."""
        self.last: float | None = None
        """When the last event came: a token, a finish reason, the usage or [DONE]."""
        self.reasons: dict[int, str | None] = {}
        """Finish reasons by choice; None before its end."""
        self.chunks = 0
        """Number of chunks with a token."""
        self.usage: dict[str, Any] = {}
        self.done = False
        """Whether [DONE] came."""
        self.error: tuple[str, str] | None = None
        """Kind and message of an error in the stream."""
        self._cut_at, self._streaming, self._rest = cut_at, False, b""
        self._event_type = self._partial = b""

    def begin(self, status: int, headers: dict[str, str]) -> None:
        """Store the status and the headers."""
        super().begin(status, headers)
        self._streaming = status == 200 and headers.get("content-type", "").lower().startswith("text/event-stream")

    def feed(self, data: bytes, now: float) -> None:
        """Read a part of the body."""
        if not self._streaming:
            return super().feed(data, now)
        text = self._rest + data
        *lines, self._rest = _ENDS.split(text) if b"\r" in text else text.split(b"\n")
        if self._rest.startswith(b"data:") and self._rest[5:].strip() == _DONE:  # some servers send no newline after it
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.startswith(b"data:"):
                self._data(line[5:].strip(), now)
            elif line.startswith(b"event:"):
                self._event_type = line[6:].strip()
            elif line.startswith(b"error:"):  # llama.cpp's server
                self.error = self.error or ("in_stream", line[6:].decode(errors="replace").strip()[:_MESSAGE])
            elif not line.strip():
                self._end_event()

    def enough(self) -> bool:
        """Return whether the stream has the requested number of tokens."""
        return self._cut_at is not None and self.tokens >= self._cut_at

    @property
    def tokens(self) -> int:
        """The output tokens: the number in the usage if it is valid, otherwise the number of chunks."""
        return self._counted("completion_tokens") or self.chunks

    @property
    def prompt_tokens(self) -> int | None:
        """The prompt's tokens in the usage; None without a valid number."""
        return self._counted("prompt_tokens")

    def _counted(self, key: str) -> int | None:
        count = self.usage.get(key)
        return count if type(count) is int and 0 < count <= MAX_TOKENS else None

    @property
    def finish_reason(self) -> str | None:
        """The first finish reason that marks an incomplete answer, otherwise the reason of the first choice."""
        reasons = list(self.reasons.values())
        return next((reason for reason in reasons if reason not in _WHOLE), reasons[0] if reasons else None)

    @property
    def failure(self) -> tuple[str, str] | None:
        """Error kind and message of an incomplete answer; None if the answer is complete.

        A missing [DONE] is not checked here.
        """
        if self.status != 200:
            return f"http_{self.status}", self.message
        if not self._streaming:
            kind = self.headers.get("content-type", "no type")
            return "not_streamed", f"the answer is {kind}, not a stream: {self.message}"[:_MESSAGE]
        if self.error:
            return self.error
        if self.first_token is None:
            return "empty", "the stream has no token"
        if (reason := self.finish_reason) in _WHOLE or (reason is None and self.enough()):
            return None
        if reason is None:
            return "unfinished", f"the stream ended after {self.tokens:,} tokens without a finish reason"
        return f"finish_{reason[:_KIND]}", f"the answer ended with the finish reason '{reason}'"[:_MESSAGE]

    def _data(self, line: bytes, now: float) -> None:
        """Read a line of an event's data, which may have several; an event without data is none."""
        if self.done or not line:
            return  # events after the end don't belong to the answer
        if line == _DONE:
            self._end_event()
            self.done, self.last = True, now
            return
        data = self._partial + line
        try:
            document = json.loads(data.decode())  # for bytes, json would first detect the encoding
        except (ValueError, RecursionError):
            self._partial = data + b"\n"  # until the event's next line, or its end
            if len(data) > _MOST:
                self._end_event()
            return
        self._partial = b""
        if isinstance(document, dict):
            self._event(document, now)
        elif document is not None:  # null says nothing
            self._break(data)

    def _end_event(self) -> None:
        if self._partial:
            self._break(self._partial)
        self._event_type = self._partial = b""

    def _break(self, data: bytes) -> None:
        text = data[:80].decode(errors="replace").strip()
        self.error = self.error or ("broken_json", f"an event is not a JSON object: {text}")

    def _event(self, document: dict[str, Any], now: float) -> None:
        if document.get("error") or document.get("object") == "error" or self._event_type == b"error":
            self.error = self.error or ("in_stream", error_message(document) or str(document)[:_MESSAGE])
            return
        usage, choices = document.get("usage"), document.get("choices")
        if isinstance(usage, dict):
            self.usage, self.last = usage, now
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._choice(choice, now)

    def _choice(self, choice: dict[str, object], now: float) -> None:
        """Read a chunk.

        A chunk without text is a token whose text is held back or skipped, unless it names the role or the finish
        reason.
        """
        delta, reason = choice.get("delta"), choice.get("finish_reason")
        if isinstance(delta, dict):
            text = any(map(delta.get, _PARTS))
            bare = "role" in delta or "content" not in delta
        else:
            text, bare = bool(choice.get("text")), False
        self.last = self.last_token = now
        if text or not (bare or reason):
            self.chunks += 1
            self.first_token = now if self.first_token is None else self.first_token
        index = choice.get("index")
        index = index if isinstance(index, int) else 0
        self.reasons[index] = str(reason) if reason else self.reasons.get(index)
        if reason:
            self.first_token = now if self.first_token is None else self.first_token
