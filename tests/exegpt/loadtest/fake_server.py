"""A scripted server and a client on one event loop, whose clock jumps to the next timer: latencies are exact, and
seconds take milliseconds.
"""

import asyncio
import json
import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from exegpt.loadtest.connection import Address
from exegpt.loadtest.endpoint import http_request
from exegpt.loadtest.open_loop import LoadRequest, SendLimits, Sent, send_all

pytest.importorskip("httptools")
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
_DELIVERY_S = 0.002
"""What loopback needs at most to deliver, in real time."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing is ready."""

    def __init__(self):
        loop, self.now = self, 0.0

        class Selector(selectors.DefaultSelector):
            def select(self, timeout=None):
                ready = super().select(0 if timeout == 0 else _DELIVERY_S)
                if not ready and timeout:
                    loop.now += timeout
                return ready

        super().__init__(Selector())

    def time(self):
        return self.now


def chunk(data: bytes) -> bytes:
    """A part of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(document: dict | str) -> bytes:
    """A chunk with one event."""
    return chunk(b"data: " + (document if isinstance(document, str) else json.dumps(document)).encode() + b"\n\n")


def token(text: str = "a", reason: str | None = None) -> bytes:
    """A completion's chunk."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})


Script = Sequence[tuple[float, bytes] | None]
"""What is written after how long; None: the connection is closed."""


def tokens(ttft_s: float, tpot_s: float, count: int) -> list:
    """A whole stream of a completion."""
    last = count - 1
    steps = [(tpot_s if i else ttft_s, token(reason="length" if i == last else None)) for i in range(count)]
    usage = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}})
    return [(0.0, STREAM), *steps, (0.0, usage + event("[DONE]") + END)]


@dataclass
class FakeServer:
    """Answers the requests, in order, by `script(number, body)`."""

    script: Callable[[int, dict], Script]
    connections: int = 0
    bodies: list = field(default_factory=list)
    times: list = field(default_factory=list)
    left: int = 0
    """Requests whose client went before the end."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths else {}
                number = len(self.bodies)
                self.bodies.append(body)
                self.times.append(asyncio.get_running_loop().time())
                for step in self.script(number, body):
                    if step is None:
                        return
                    await asyncio.sleep(step[0])
                    if reader.at_eof():
                        self.left += 1
                        return
                    writer.write(step[1])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def load(
    server: FakeServer | None, arrivals: Sequence[float], asked: int = 4, cut_at: int | None = None, **options
) -> Sent:
    """Send requests at these times; without a server, to a port where nothing listens."""

    async def run() -> Sent:
        listening = await asyncio.start_server(server.answer if server else print, "127.0.0.1", 0)
        address = Address.of(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        if server is None:
            listening.close()
        data = http_request(address, "/completions", {"prompt": [1, 2, 3], "max_tokens": asked})
        requests = [LoadRequest(i, data, 3, asked, at, cut_at) for i, at in enumerate(arrivals)]
        sending = {"timeout_s": 60.0, "retries": 0, "max_concurrency": None} | options
        sent = await send_all(address, requests, SendLimits(**sending))
        await asyncio.sleep(1.0)  # the server sees who has gone
        listening.close()
        return sent

    loop = JumpingLoop()
    try:
        return loop.run_until_complete(run())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
