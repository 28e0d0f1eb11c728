"""Time every API request from the last byte of its body to the last byte of its answer (plain ASGI)."""

import time
from collections.abc import Collection
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xserver.telemetry.monitor import Arrival, Exchange
from xserver.telemetry.reporting import reporting
from xserver.telemetry.tracing import PARENT

RETRIES = "x-stainless-retry-count"
"""Header of OpenAI's client: how often it has already sent this request."""


class Counts(Protocol):
    """Receives requests that have ended."""

    def ended(self, exchange: Exchange) -> None:
        """Count a request that has ended with its answer."""


class RequestTiming:
    """Reports requests to `paths` to the monitor in a request's state, or to `unrouted` if a handler has set none.

    Handlers read `arrival` from the state. They set `monitor`, `answering`, for an error its code as `code`, and as
    `held_s` how long a request had waited before its body was read: it counts as waiting time.
    """

    def __init__(self, app: ASGIApp, unrouted: Counts, paths: Collection[str]):
        self._app, self._unrouted, self._paths = app, unrouted, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and report it."""
        if scope["type"] != "http" or scope["path"] not in self._paths or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        state, headers = scope["state"], Headers(scope=scope)
        parent = {name: headers[name] for name in PARENT if name in headers}
        again = headers.get(RETRIES, "0") != "0"
        state["arrival"] = Arrival(time.monotonic(), parent, again)
        status: int | None = None
        sent = False

        async def receive_timed() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                state["arrival"] = Arrival(time.monotonic() - state.get("held_s", 0.0), parent, again)
            return message

        async def send_timed(message: Message) -> None:
            nonlocal status, sent
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                sent = True

        try:
            await self._app(scope, receive_timed, send_timed)
        finally:
            with reporting("monitor"):
                counts: Counts = state.get("monitor", self._unrouted)
                counts.ended(
                    Exchange(
                        state["request_id"],
                        scope["path"],
                        state["arrival"],
                        status if sent else None,
                        state.get("code"),
                        state.get("answering"),
                        state.get("client_id"),
                    )
                )
