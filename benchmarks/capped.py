"""A cap on the requests that a server has at a time: those beyond it are answered with 429.

What operators put before an engine that accepts whatever comes. For HTTP/1.1 bodies with a Content-Length; each request
has a connection of its own to the server.

    python -m benchmarks.capped --port 8900 --to 8810 --most 16
"""

import argparse
import asyncio

_CHUNK = 2**16
_REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Cap:
    """Lets at most `most` POST requests at a time through to a port of this machine."""

    def __init__(self, to: int, most: int):
        self._to, self._most, self._inside = to, most, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request and its answer."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"POST"):
                await self._forward(head, reader, writer)
            elif self._inside >= self._most:
                writer.write(_REFUSED)
                await writer.drain()
            else:
                self._inside += 1
                try:
                    await self._forward(head, reader, writer)
                finally:
                    self._inside -= 1
        except (OSError, EOFError):  # a client that has gone
            pass
        finally:
            writer.close()

    async def _forward(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
        lengths = [int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")]
        body = await reader.readexactly(lengths[0] if lengths else 0)
        answer, request = await asyncio.open_connection("127.0.0.1", self._to)
        try:
            request.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            while data := await answer.read(_CHUNK):
                writer.write(data)
                await writer.drain()
        finally:
            request.close()


async def _serve(port: int, cap: Cap) -> None:
    server = await asyncio.start_server(cap.serve, "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", type=int, required=True, help="the server's port")
    parser.add_argument("--most", type=int, required=True, help="requests at a time")
    asked = parser.parse_args()
    asyncio.run(_serve(asked.port, Cap(asked.to, asked.most)))


if __name__ == "__main__":
    main()
