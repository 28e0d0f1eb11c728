"""The gate: check every HTTP request before it reaches a route.

It is plain ASGI, so there is no layer between a handler and its client's connection.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Iterable
from inspect import signature
from typing import TypedDict
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xcore.errors import InputError
from xserver.http.api_error import ApiError

OPEN_PATHS = {"/health", "/ready", "/ping", "/"}
"""Paths without a key; the last one is a page without data, which asks for a key."""
_VISIBLE = re.compile(r"[\x21-\x7e]{1,128}\Z")
_HOST = re.compile(r"([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]+)?\Z")
"""A host with or without a port, as browsers write it: ASCII names in lower case."""
_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
ANY_ORIGIN = "*"
_METHODS = ("GET", "HEAD", "POST")
_OPENAI_CLIENT = "lang package-version os arch runtime runtime-version retry-count timeout helper-method".split()
"""Endings of the `X-Stainless` headers that OpenAI's JavaScript client sends."""
_SENT = ("Authorization", "Content-Type", "Idempotency-Key", *(f"X-Stainless-{name}" for name in _OPENAI_CLIENT))
"""Headers that pages of other origins may send."""
_READ = ("Retry-After", "X-Request-Id")
"""Headers of answers that such pages may read."""


class ApiKeys:
    """The keys of the API, as hashes; they may be replaced while the server runs."""

    def __init__(self, keys: Iterable[str] = ()):
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """Accept only these keys from now on."""
        self.hashes = tuple(hashed(key) for key in keys)


class _PrivateNetwork(TypedDict, total=False):
    """Arguments of new versions of CORSMiddleware."""

    allow_private_network: bool


def guarded(app: ASGIApp, keys: ApiKeys, hosts: Collection[str], origins: Collection[str]) -> ASGIApp:
    """Return the application behind a gate; browsers let pages of `origins` use it and read its errors."""
    gate = Gate(app, keys, hosts, origins)
    if not origins:
        return gate
    more: _PrivateNetwork = {"allow_private_network": True}  # a public page may use this private address
    if not more.keys() <= signature(CORSMiddleware).parameters.keys():
        more = {}  # an older Starlette, which ignores this request of browsers
    return CORSMiddleware(gate, origins, _METHODS, _SENT, expose_headers=_READ, **more)


def check_origins(origins: Iterable[str], has_keys: bool) -> None:
    """Raise InputError for an origin that no browser sends, and for all origins (`*`) if no key is needed."""
    for origin in origins:
        if origin == ANY_ORIGIN and not has_keys:
            raise InputError("--cors * lets every page use this server: pass --api-key-file, or name the origins.")
        try:
            parts = urlsplit(origin)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        name = f"{parts.scheme}://{parts.netloc}"
        left_out = port is not None and port == {"http": 80, "https": 443}.get(parts.scheme)
        if origin != ANY_ORIGIN and (not _HOST.match(parts.netloc) or origin != name.lower() or left_out):
            raise InputError(f"--cors {origin} is not an origin: write one like https://example.com, without a path.")


class Gate:
    """Gives every request an id and checks its key.

    Without keys it checks `Host`, because a page of another site in a browser must not reach a server on loopback.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, hosts: Iterable[str] = (), origins: Iterable[str] = ()):
        self._app = app
        self._keys = keys
        self._hosts = _LOOPBACK | set(hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # handled as GET; the HTTP server sends no body, since its own scope says HEAD
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        given, own = headers.get("x-request-id", ""), secrets.token_hex(12)
        request_id = given if _VISIBLE.match(given) else own
        state = scope.setdefault("state", {})
        state["request_id"] = own
        if request_id != own:
            state["client_id"] = given

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            self._check(scope, headers)
        except ApiError as error:
            await error.response(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if self._keys.hashes:
            if scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS" and not self._has_key(headers):
                raise ApiError(
                    401,
                    "The API key is missing or wrong: send Authorization: Bearer KEY.",
                    "invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            return
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if host.rsplit(":", 1)[0] not in self._hosts and host not in self._hosts:
            raise ApiError(
                403,
                "The Host header does not name this server: pass the name to `exegpt serve` as --allowed-host.",
                "invalid_host",
            )
        if origin and origin not in self._origins and _name(origin) not in self._hosts:
            raise ApiError(403, "Pages of this origin may not use this server: see --cors.", "invalid_origin")

    def _has_key(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(hashed(key), own) for own in self._keys.hashes]  # all: constant time
        return kind.lower() == "bearer" and any(known)


def hashed(key: str) -> bytes:
    """Return the hash that is stored for a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _name(origin: str) -> str:
    """Return the host of an origin, without its port."""
    host = origin.partition("://")[2]
    return host if host in _LOOPBACK else host.rsplit(":", 1)[0]
