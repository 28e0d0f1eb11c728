"""Streamed answers: server-sent events, written at the speed of their reader."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, Protocol

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

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the documents of the events."""

    def event(self, document: dict[str, Any]) -> bytes:
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the last one, or until the client disconnects."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done() and not writing.cancelled():
                writing.result()
        except (OSError, asyncio.TimeoutError, TimeoutError):
            pass  # the client has disconnected, or reads nothing
        finally:
            writing.cancel()
            leaving.cancel()
            self._close()

    async def _write(self, send: Send) -> None:
        async def put(data: bytes, more: bool = True) -> None:
            sending = asyncio.ensure_future(send({"type": "http.response.body", "body": data, "more_body": more}))
            try:  # wait_for, until Python 3.12, loses a cancellation that comes with the end of the send (bpo-37658)
                done, _ = await asyncio.wait({sending}, timeout=self._stall_s)
            finally:
                sending.cancel()
            if not done:
                raise TimeoutError
            sending.result()

        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        streamed = self._streamed
        events = aiter(streamed.chunks())
        following = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                done, _ = await asyncio.wait({following}, timeout=_SILENCE_S)
                if not done:
                    await put(b": keep-alive\n\n")
                    continue
                document = following.result()
                if document is None:
                    break
                await put(streamed.event(document))
                following = asyncio.ensure_future(anext(events, None))
        except ApiError as error:
            await put(streamed.failure(error))
        except Exception:
            failed = ApiError(500, "An internal error ended the answer.", "internal_error", None, SERVER)
            await put(streamed.failure(failed))
            raise
        finally:
            following.cancel()
        await put(streamed.last_event, more=False)


def event(document: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
