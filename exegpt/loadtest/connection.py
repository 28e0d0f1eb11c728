"""A small HTTP/1.1 client for many parallel streams: each running request has a connection, which is reused.

httptools parses responses in C as their bytes arrive. A token takes about half the CPU time of aiohttp and an eighth of
httpx2's. A slower client would take this time from a server on the same machine.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from xcore.errors import InputError


class Reader(Protocol):
    """Receives a response as it arrives."""

    status: int | None

    def begin(self, status: int, headers: dict[str, str]) -> None:
        """Store the status and the headers, whose names are in lower case."""

    def feed(self, data: bytes, now: float) -> None:
        """Read a part of the body that came at `now`, on the event loop's clock."""

    def enough(self) -> bool:
        """Return whether the rest of the body isn't needed: the connection is then closed."""


class ExchangeError(Exception):
    """A request without a complete response; `kind` is connect, closed, timeout or not_http."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Address:
    """The address of an endpoint; resolved once, because resolving takes a thread."""

    host: str
    """The value of the Host header."""
    path: str
    """The path before `/models`, `/completions` and so on."""
    family: int
    where: tuple[str, int]
    """IP address and port."""
    tls: ssl.SSLContext | None
    server_name: str | None

    @staticmethod
    def of(url: str) -> "Address":
        """Return the address of a URL with or without the API's `/v1`.

        Raises InputError for an invalid URL or an unknown host.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            name, port = parts.hostname, parts.port
        except ValueError:
            parts, name, port = urlsplit(""), None, None
        if parts.scheme not in ("http", "https") or not name:
            raise InputError(f"'{url}' is not the URL of an endpoint: write one like http://localhost:8000.")
        secure = parts.scheme == "https"
        try:
            found = socket.getaddrinfo(name, port or (443 if secure else 80), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise InputError(f"The host '{name}' of '{url}' isn't known ({error}): correct the URL.") from None
        path = parts.path.rstrip("/")
        family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return Address(
            parts.netloc.rpartition("@")[2],
            path if path.endswith("/v1") else f"{path}/v1",
            family,
            (str(where[0]), int(where[1])),
            ssl.create_default_context() if secure else None,
            name if secure else None,
        )


_BUFFER = 16 * 2**10
"""Maximum bytes of one read."""


class Connection(asyncio.BufferedProtocol):
    """One connection, for one request at a time.

    It reads into its own buffer: asyncio would allocate 256 KiB for every read, which takes longer than all other work
    on a token.
    """

    def __init__(self) -> None:
        import httptools

        self._buffer = memoryview(bytearray(_BUFFER))
        self.used = False
        self.open = False
        self._parser = httptools.HttpResponseParser(self)
        self._wrong = httptools.HttpParserError
        self._loop = asyncio.get_running_loop()
        self._reader: Reader | None = None
        self._done: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, reader: Reader, timeout_s: float | None) -> None:
        """Send a request's bytes and pass the response to `reader`; return at its end.

        Raises ExchangeError if there is no response. Afterwards `open` says whether the connection can be reused.
        """
        loop = self._loop
        self._reader, self._done = reader, loop.create_future()
        self._headers: dict[str, str] = {}
        self._began = False
        limit = None
        if timeout_s is not None:
            why = f"no complete answer within {timeout_s:g} s"
            limit = loop.call_later(timeout_s, self._fail, ExchangeError("timeout", why))
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._reader, self._done, self.used = None, None, True
            if limit:
                limit.cancel()

    def close(self) -> None:
        """Close the connection."""
        self.open = False
        self._transport.close()

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: ExchangeError) -> None:
        self.close()
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def connection_made(self, transport: Any) -> None:
        """Store the transport; called by asyncio."""
        self.open, self._transport = True, transport
        if raw := transport.get_extra_info("socket"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer; called by asyncio before it reads."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the bytes read; called by asyncio after it has read."""
        self._now = self._loop.time()
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except self._wrong as error:
            self._fail(ExchangeError("not_http", f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """End the response; called by asyncio.

        A body without a length ends here; any other body is cut off.
        """
        self.open = False
        if self._began and error is None and not {"content-length", "transfer-encoding"} & self._headers.keys():
            return self._end()
        self._fail(ExchangeError("closed", f"the server closed the connection{f': {error}' if error else ''}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; called by the parser."""
        if self._reader is not None:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Begin the response; called by the parser."""
        status = self._parser.get_status_code()
        if self._reader is not None and status >= 200:
            self._began = True
            self._reader.begin(status, self._headers)

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body to the reader; called by the parser."""
        if self._reader is None:
            return
        self._reader.feed(body, self._now)
        if self._reader.enough():
            self._reader = None
            self.close()
            self._end()

    def on_message_complete(self) -> None:
        """End the response; called by the parser."""
        if self._reader is not None and self._began:
            self.open = self.open and self._parser.should_keep_alive()
            self._end()


class ConnectionPool:
    """Connections to an address; the one used last is reused first."""

    def __init__(self, address: Address, opened: Callable[[], Connection] = Connection):
        self.address, self.connections = address, 0
        self._opened, self._idle = opened, list[Connection]()

    async def exchange(self, request: bytes, reader: Reader, timeout_s: float | None) -> None:
        """Send a request on a free connection or a new one.

        Servers close idle connections. A reused connection that the server closed before any answer is replaced once.
        """
        connection = await self._take(timeout_s)
        was_kept = connection.used
        try:
            await connection.exchange(request, reader, timeout_s)
        except ExchangeError as error:
            if not (was_kept and error.kind == "closed" and reader.status is None):
                raise
            connection = await self._connect(timeout_s)
            await connection.exchange(request, reader, timeout_s)
        if connection.open:
            self._idle.append(connection)
        else:
            connection.close()

    async def _take(self, timeout_s: float | None) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return await self._connect(timeout_s)

    async def _connect(self, timeout_s: float | None) -> Connection:
        address = self.address
        connecting = asyncio.get_running_loop().create_connection(
            self._opened,
            *address.where,
            family=address.family,
            ssl=address.tls,
            server_hostname=address.server_name,
        )
        try:
            _, connection = await asyncio.wait_for(connecting, timeout_s)
        except (OSError, asyncio.TimeoutError) as error:
            raise ExchangeError("connect", f"no connection: {error or 'it took too long'}") from None
        self.connections += 1
        return connection

    def close(self) -> None:
        """Close the free connections."""
        while self._idle:
            self._idle.pop().close()
