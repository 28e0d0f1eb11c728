"""Connections of clients: limits on headers, on their time, and on the number of connections."""

import asyncio
import contextlib
import json
import re

import pytest

pytest.importorskip("httptools")

import uvicorn

from xserver.engines.supervisor import Server
from xserver.http import client_connection
from xserver.http.client_connection import MAX_HEADERS, limited_connections
from xserver.telemetry.metrics import REFUSED_CONNECTIONS

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


async def application(scope, receive, send):
    """Answer with the body, or without one with the size of the headers."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    body = body or str(sum(len(name) + len(value) for name, value in scope["headers"])).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def with_server(use, most=1000, keep_alive=60):
    """What `use` returns, called with a function that connects to a server."""

    async def run():
        protocol = limited_connections(most)
        config = uvicorn.Config(
            application, port=0, http=protocol, lifespan="off", log_config=None, timeout_keep_alive=keep_alive
        )
        server = Server(config)
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            return await asyncio.wait_for(use(lambda: asyncio.open_connection("127.0.0.1", port)), 60)
        finally:
            server.should_exit = True
            await serving
            assert not protocol.addresses  # every connection was forgotten

    return asyncio.run(run())


async def all_of(reader):
    """What arrives until the connection ends."""
    with contextlib.suppress(ConnectionResetError):
        return await reader.read()
    return b""


async def answer(reader):
    """The status and the body of one answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].split()[0])
    return int(head.split()[1]), await reader.readexactly(size)


def test_slow_headers_are_closed_and_others_are_answered_meanwhile(monkeypatch):
    monkeypatch.setattr(client_connection, "HEADERS_S", 1.0)

    async def use(connect):
        slow = [await connect() for _ in range(200)]
        for _, writer in slow[:100]:  # the others send nothing at all
            writer.write(b"G")
        reader, writer = await connect()
        writer.write(REQUEST + b"\r\n")
        status, _ = await answer(reader)
        ended = [await all_of(reader) for reader, _ in slow]
        for _, writer in slow:
            writer.close()
        return status, set(ended)

    assert with_server(use) == (200, {b""})


def test_a_connection_that_goes_on_with_slow_headers_is_closed(monkeypatch):
    """The time for an idle connection ends with its first byte: the time for headers begins with it."""
    monkeypatch.setattr(client_connection, "HEADERS_S", 0.3)

    async def use(connect):
        ended = []
        for begun in (b"GET /", b"\r\n"):
            reader, writer = await connect()
            writer.write(REQUEST + b"\r\n")
            assert (await answer(reader))[0] == 200
            writer.write(begun)
            ended.append(await all_of(reader))
            writer.close()
        return ended

    assert with_server(use) == [b"", b""]


@pytest.mark.parametrize(
    "endless",
    [b"a" * 1000, b"X-Header: " + b"a" * 1000 + b"\r\n"],
    ids=["one header", "many headers"],
)
def test_endless_headers_are_refused(endless):
    async def use(connect):
        reader, writer = await connect()
        writer.write(REQUEST + b"X: ")
        sent = 0
        answered = asyncio.ensure_future(reader.read())
        while not answered.done() and sent < 100 * MAX_HEADERS:
            writer.write(endless)
            sent += len(endless)
            await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        writer.close()
        return await answered

    head, _, body = with_server(use).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize("over", [False, True])
def test_headers_that_arrive_at_once_have_the_same_limit(over):
    filled = b"X: " + b"a" * (MAX_HEADERS - len("/Hostlocalhost") - 4 - len("X") - 4 + over)

    async def use(connect):
        reader, writer = await connect()
        for _ in range(1 if over else 2):  # the second request has the whole limit again
            writer.write(REQUEST + filled + b"\r\n\r\n")
            status, _ = await answer(reader)
        writer.close()
        return status

    assert with_server(use) == (431 if over else 200)


def test_an_endless_url_is_refused():
    async def use(connect):
        reader, writer = await connect()
        writer.write(b"GET /" + b"a" * (2 * MAX_HEADERS))
        return await answer(reader)

    assert with_server(use)[0] == 431


def test_bodies_do_not_count_as_headers():
    async def use(connect):
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (4 * MAX_HEADERS))
        writer.write(b"a" * 4 * MAX_HEADERS)
        first = await answer(reader)
        writer.write(REQUEST + b"\r\n")
        second = await answer(reader)
        writer.close()
        return first[0], second[0]

    assert with_server(use) == (200, 200)


def test_invalid_http_is_refused_in_the_format_of_all_errors():
    async def use(connect):
        reader, writer = await connect()
        writer.write(b"no request\r\n\r\n")
        return await answer(reader)

    status, body = with_server(use)
    assert status == 400 and json.loads(body)["error"]["code"] == "invalid_value"


def test_connections_beyond_the_maximum_of_an_address_are_refused():
    async def use(connect):
        first, second = await connect(), await connect()
        for reader, writer in (first, second):
            writer.write(REQUEST + b"\r\n")
            assert (await answer(reader))[0] == 200
        third, writer = await connect()
        writer.write(REQUEST + b"\r\n")
        refused = await answer(third)
        writer.close()
        assert await all_of(third) == b""
        first[1].write(REQUEST + b"\r\n")
        assert (await answer(first[0]))[0] == 200
        first[1].close()
        while True:  # the server sees the end of a connection a little later
            reader, writer = await connect()
            writer.write(REQUEST + b"\r\n")
            status, _ = await answer(reader)
            writer.close()
            if status == 200:
                second[1].close()
                return refused

    status, body = with_server(use, most=2)
    assert status == 429 and json.loads(body)["error"]["code"] == "concurrency_limit"


def test_idle_connections_end_after_the_keep_alive_time():
    async def use(connect):
        reader, writer = await connect()
        writer.write(REQUEST + b"\r\n")
        await answer(reader)
        rest = await all_of(reader)
        writer.close()
        return rest

    assert with_server(use, keep_alive=0) == b""


@pytest.mark.parametrize(
    ("most", "sent", "code"),
    [
        (0, REQUEST + b"\r\n", "concurrency_limit"),
        (1, REQUEST + b"X: " + b"a" * 2 * MAX_HEADERS, "headers_too_large"),
        (1, b"no request\r\n\r\n", "invalid_value"),
    ],
)
def test_refused_connections_have_an_id_and_are_counted(most, sent, code):
    async def use(connect):
        reader, writer = await connect()
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return head

    before = REFUSED_CONNECTIONS.labels(code)._value.get()
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{24}\r\n", with_server(use, most=most))
    assert REFUSED_CONNECTIONS.labels(code)._value.get() == before + 1


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
"""What Java's HTTP client sends with its first request."""


@pytest.mark.parametrize(
    "body",
    [b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"],
)
def test_an_offer_of_another_protocol_loses_no_body(body):
    """Wherever the request is cut in two; the connection goes on with other requests."""
    first, second = b"POST / HTTP/1.1\r\nHost: localhost\r\n" + OFFER + body, REQUEST + OFFER + b"\r\n"

    async def use(connect):
        answers = []
        for cut in range(1, len(first), 7):
            reader, writer = await connect()
            writer.write(first[:cut])
            await writer.drain()
            await asyncio.sleep(0.002)
            writer.write(first[cut:])
            answers.append(await answer(reader))
            writer.write(second)
            answers.append((await answer(reader))[0])
            writer.close()
        return answers

    assert set(with_server(use)) == {(200, b"hello"), 200}


def test_a_tunnel_is_refused():
    async def use(connect):
        reader, writer = await connect()
        writer.write(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n" + OFFER + b"\r\n")
        status, _ = await answer(reader)
        writer.close()
        return status

    assert with_server(use) == 400
