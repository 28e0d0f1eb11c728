"""Streamed answers: server-sent events, written at the speed of their reader."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import ClassVar, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from xserver.http.api_error import SERVER, ApiError

_SILENCE_S = 15.0
"""After this silence in seconds a comment is sent, so that proxies don't close the connection."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Streamed(Protocol):
    """An answer as a stream of events."""

    last_event: ClassVar[bytes]

    def chunks(self) -> AsyncIterator[dict[str, object]]:
        """Yield the documents of the events."""

    def event(self, document: dict[str, object]) -> bytes:
        """Return a document's event."""

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error."""


class EventStream(Response):
    """An ASGI response of JSON documents; `close` is called once, at the end or after a disconnection.

    A client that reads nothing for `stall_s` counts as disconnected.
    """

    def __init__(self, streamed: Streamed, close: Callable[[], object], stall_s: float):
        super().__init__()
        self._streamed, self._close, self._stall_s = streamed, close, stall_s
        self._one_by_one = asyncio.Lock()
        self._began_s: float | None = None
        """When the present send began, by the monotonic clock; None while nothing is sent."""
        self._sent_s = time.monotonic()
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the last one, or until the client disconnects."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        comments = []
        try:
            while not writing.done() and not leaving.done() and not self._stalls:
                if self._began_s is None and time.monotonic() - self._sent_s >= _SILENCE_S:
                    comments = [asyncio.ensure_future(self._put(send, b": keep-alive\n\n"))]
                await asyncio.wait({writing, leaving}, timeout=self._looks_s, return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and not writing.cancelled():
                writing.result()
        except OSError:
            pass  # the client has disconnected
        finally:
            for task in (writing, leaving, *comments):
                task.cancel()
            self._close()

    @property
    def _looks_s(self) -> float:
        """Seconds until the present silence, or the present send, is too long; less than a stall lasts."""
        began_s = self._began_s
        due_s = self._sent_s + _SILENCE_S if began_s is None else began_s + self._stall_s
        return max(0.001, min(due_s - time.monotonic(), self._stall_s))

    @property
    def _stalls(self) -> bool:
        """Whether the client has read nothing for too long."""
        return self._began_s is not None and time.monotonic() - self._began_s >= self._stall_s

    async def _put(self, send: Send, data: bytes, more: bool = True) -> None:
        """Send data, which takes until the client has read enough of what was sent before."""
        async with self._one_by_one:
            if self._ended:
                return
            self._ended, self._began_s = not more, time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._began_s, self._sent_s = None, time.monotonic()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        streamed = self._streamed
        try:
            async for document in streamed.chunks():
                await self._put(send, streamed.event(document))
        except ApiError as error:
            await self._put(send, streamed.failure(error))
        except Exception:
            failed = ApiError(500, "An internal error ended the answer.", "internal_error", None, SERVER)
            await self._put(send, streamed.failure(failed))
            raise
        await self._put(send, streamed.last_event, more=False)


def event(document: dict[str, object]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
