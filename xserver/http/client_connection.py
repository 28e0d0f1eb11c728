"""Connections of clients: limits on headers and on connections, which hold before the application gets a request.

Offers of other protocols are declined: Java's HTTP client offers HTTP/2 with its first request.
"""

import secrets
import sys
from asyncio import BaseTransport, TimerHandle, Transport
from collections import Counter
from http import HTTPStatus
from typing import ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from xserver.http.api_error import RATE_LIMIT, ApiError, invalid
from xserver.telemetry.metrics import REFUSED_CONNECTIONS

MAX_HEADERS = 64 * 2**10
"""Maximum size of a request's URL and headers together, in bytes."""
HEADERS_S = 30.0
"""Seconds within which they must arrive."""
LINGER_S = 1.0
"""Seconds for which a refused client may still send: a connection closed at once is reset, and loses the answer."""


def limited_connections(most: int) -> type["ClientConnection"]:
    """Return the protocol of a server that accepts at most `most` connections from each client address."""

    class LimitedConnection(ClientConnection):
        most_per_address = most
        addresses: ClassVar[Counter[str]] = Counter()

    return LimitedConnection


class ClientConnection(HttpToolsProtocol):
    """A connection that ends if there are too many of its client, or if headers are too large or too slow."""

    most_per_address: ClassVar[int]
    addresses: ClassVar[Counter[str]]
    """The number of open connections of each client address."""
    _counted_for: str | None = None
    """The address for which this connection counts; None: it was refused."""
    _in_headers = False
    _parsed = 0
    """Bytes of the present request's URL and headers, as far as they are complete."""
    _unparsed = 0
    """Bytes in which the present request's headers have neither begun nor ended."""
    _timer: TimerHandle | None = None
    _refused = False
    _data = b""
    """The bytes that are being parsed."""

    def connection_made(self, transport: BaseTransport) -> None:
        """Count the connection, and refuse it if its client has too many."""
        super().connection_made(cast(Transport, transport))
        self._limit_time()
        address = self.client[0] if self.client else ""
        if self.addresses[address] < self.most_per_address:
            self._counted_for = address
            self.addresses[address] += 1
        else:
            message = f"Your address has {self.most_per_address:,} connections, the maximum: reuse or close some."
            self._refuse(ApiError(429, message, "concurrency_limit", None, RATE_LIMIT, {"Retry-After": "5"}))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        if self._counted_for is not None:
            self.addresses[self._counted_for] -= 1
            if not self.addresses[self._counted_for]:
                del self.addresses[self._counted_for]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, unless the client was refused; no part in which headers may begin is larger than their limit."""
        for begin in range(0, len(data), MAX_HEADERS):
            if not self._refused:
                self._parse(data[begin : begin + MAX_HEADERS])

    def _parse(self, data: bytes) -> None:
        request, self._data = self.scope, data
        super().data_received(data)
        if self._in_headers and self.scope is request:
            self._unparsed += len(data)
        if self._in_headers and self._too_large and not self._refused:
            self.send_400_response("")
        if (
            self._timer is None
            and not self._refused
            and (self._in_headers or self.cycle is None or self.cycle.response_complete)
        ):
            self._limit_time()

    def on_message_begin(self) -> None:
        """Begin to count the bytes of headers."""
        super().on_message_begin()
        self._in_headers, self._parsed, self._unparsed = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """Count the URL."""
        super().on_url(url)
        self._parsed += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, with its colon, space and line end."""
        super().on_header(name, value)
        self._parsed += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        """Pass the request on, unless its headers are too large: the parser then ends with `send_400_response`."""
        if self._too_large:
            raise ValueError("too large")
        self._in_headers = False
        self._stop_timer()
        if not self._offers_protocol:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Pass the end of the body on, unless the parser has stopped before the body."""
        if not self._offers_protocol:
            super().on_message_complete()

    @property
    def _offers_protocol(self) -> bool:
        """Whether the present request offers another protocol, which can be declined."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Decline another protocol: parse the request as one that doesn't offer it.

        The parser has stopped behind the headers, without the body, and can't go on.
        """
        if not self._offers_protocol:
            return
        stopped = sys.exc_info()[1]
        assert isinstance(stopped, httptools.HttpParserUpgrade), "called where it is handled"
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self._parse(b"\r\n".join([*lines, b"", self._data[stopped.args[0] :]]))

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser refuses, in the format of all errors."""
        if self._too_large:
            message = f"The URL and the headers are larger than {MAX_HEADERS:,} bytes: send fewer or shorter headers."
            self._refuse(ApiError(431, message, "headers_too_large"))
        else:
            self._refuse(invalid("The request is not valid HTTP."))

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error and end the connection; only end it if another answer is being sent."""
        self._refused = True
        REFUSED_CONNECTIONS.labels(error.code).inc()
        self._stop_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        response = error.response
        response.headers["X-Request-Id"] = secrets.token_hex(12)
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)]))
        self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    @property
    def _too_large(self) -> bool:
        return max(self._parsed, self._unparsed) > MAX_HEADERS

    def _limit_time(self) -> None:
        self._timer = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
