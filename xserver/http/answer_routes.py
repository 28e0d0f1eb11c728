"""AnswerRoutes: answers requests to some paths without FastAPI's routing, which takes longer than a refusal."""

import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from xserver.http.api_error import ApiError
from xserver.http.turnstile import Turnstile

Endpoint = Callable[[Request], Awaitable[Response]]


class AnswerRoutes:
    """A middleware with an endpoint for POST to each of its paths; FastAPI's routes of these paths document them."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]):
        self._app, self._endpoints, self._turnstile = app, endpoints, Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        posted = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if posted else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        await self._turnstile.take()
        scope["state"]["held_s"] = time.monotonic() - began_s
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except ApiError as error:
            request.state.code = error.code
            response = error.response
        except BaseException:
            _leave(request)
            raise
        try:
            await response(scope, receive, send)
        finally:
            _leave(request)


def _leave(request: Request) -> None:
    """Report the end of a request for whose model others were unloaded, if there is such a report."""
    if leave := getattr(request.state, "leave", None):
        leave()
