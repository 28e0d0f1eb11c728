"""The overload benchmark's client and what it makes of its measurements."""

import asyncio
import json

import pytest

from benchmarks.overload import ANSWERED, REFUSED, Client, Exchange, Measured, burst_load, open_load, print_burst, row


class Server:
    """A server that answers the first `answered` requests of each second, and tells others to come after `wait_s`."""

    def __init__(self, answered: int, wait_s: float):
        self.left, self.wait_s = answered, wait_s

    async def connected(self, reader, writer):
        while not reader.at_eof():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            json.loads(await reader.readexactly(length))
            self.left -= 1
            status = b"200 OK" if self.left >= 0 else b"429 Too Many Requests"
            wait = b"retry-after-ms: %d\r\n" % (1000 * self.wait_s) if self.left < 0 else b""
            writer.write(b"HTTP/1.1 %b\r\n%bContent-Length: 2\r\n\r\n{}" % (status, wait))
        writer.close()


async def loaded(server, load, rate, seconds, freed_s=60.0):
    listening = await asyncio.start_server(server.connected, "127.0.0.1", 0)
    body = b'{"prompt": "x"}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    client = Client("127.0.0.1", listening.sockets[0].getsockname()[1], [request])
    freed = asyncio.get_running_loop().call_later(freed_s, lambda: setattr(server, "left", 1000))
    await load(client, rate, seconds, 1)
    freed.cancel()
    listening.close()
    await asyncio.sleep(0.05)  # the server's side of the closed connections
    return Measured(tuple(client.exchanges), client.now(), 0.1, 0.1, 0.0)


def test_every_request_of_an_open_load_is_counted():
    load = asyncio.run(loaded(Server(5, 0.1), open_load, 100.0, 0.2))
    assert len(load.exchanges) == 20
    assert (len(load.with_status(ANSWERED)), len(load.with_status(REFUSED))) == (5, 15)
    line, goodput, fine = row("2x", load, 1.0, 0.2)
    assert goodput == pytest.approx(25.0) and fine and line.split()[0] == "2x"


def test_the_refused_of_a_burst_come_again_when_they_are_told():
    load = asyncio.run(loaded(Server(2, 0.35), burst_load, 20.0, 0.5, 0.3))
    ended = [e.ended_s for e in load.exchanges if e.kind == "first" and e.status == REFUSED]
    retries = [e.due_s for e in load.exchanges if e.kind == "retry"]
    assert len(retries) == len(ended) == 8
    assert all(due_s >= ended_s + 0.35 for due_s, ended_s in zip(sorted(retries), sorted(ended), strict=True))


def test_what_a_burst_is_told_is_compared_with_when_a_probe_is_accepted(capsys):
    def burst(told_s, retried):
        refused = [Exchange(0.0, 0.01, REFUSED, told_s, "first")] * 8
        probes = [Exchange(0.3, 0.31, REFUSED, told_s, "probe"), Exchange(0.4, 0.41, ANSWERED, 0.0, "probe")]
        return Measured((*refused, *probes, *[Exchange(told_s, 0.5, retried, 0.0, "retry")] * 8), 1.0, 0.1, 0.1, 0.0)

    assert print_burst(burst(0.4, ANSWERED)) and "100% of 8 first retries accepted" in capsys.readouterr().out
    assert not print_burst(burst(0.1, ANSWERED))
    assert not print_burst(burst(0.4, REFUSED)) and "0% of 8" in capsys.readouterr().out


def test_a_late_answer_and_a_lost_request_are_no_success():
    def measured(*exchanges):
        return Measured(exchanges, 1.0, 0.0, 0.0, 0.0)

    answered = Exchange(0.0, 0.5, ANSWERED, 0.0)
    assert row("1x", measured(answered), 1.0, 1.0)[2]
    assert not row("1x", measured(answered, Exchange(0.0, 2.0, ANSWERED, 0.0)), 1.0, 1.0)[2]
    assert not row("1x", measured(answered, Exchange(0.0, 0.1, 0, 0.0)), 1.0, 1.0)[2]
    slow = Exchange(0.0, 0.2, REFUSED, 1.0)
    assert not row("1x", measured(answered, slow), 1.0, 1.0)[2]
    assert row("closed", measured(answered, slow), 1.0, 1.0)[2]
