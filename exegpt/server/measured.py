"""Measured: times every API request from its body's last byte to its answer's. Plain ASGI."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exegpt.server.monitor import Monitor
from exegpt.server.tracing import PARENT


class Measured:
    """Reports requests to `paths` to the monitor. Handlers read `arrival` of a request's state, and leave `answering`
    there, and the code of an error as `code`.
    """

    def __init__(self, app: ASGIApp, monitor: Monitor, paths: Collection[str]):
        self._app, self._monitor, self._paths = app, monitor, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, and report it."""
        if scope["type"] != "http" or scope["path"] not in self._paths or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        monitor, state, headers = self._monitor, scope["state"], Headers(scope=scope)
        parent = {name: headers[name] for name in PARENT if name in headers}
        state["arrival"] = monitor.arrived(parent)
        status: int | None = None
        sent = False

        async def receive_timed() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                state["arrival"] = monitor.arrived(parent)
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
            monitor.answered(
                state["request_id"],
                scope["path"],
                state["arrival"],
                status if sent else None,
                state.get("code"),
                state.get("answering"),
            )
