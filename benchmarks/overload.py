"""Overload: the answers and the refusals of `exegpt serve` at up to 16 times what it can answer.

The server has the demo's model, and a schedule for prompts of 40 tokens and outputs of 16. Its capacity is the goodput
that it predicts. Three kinds of load, each from one process that only writes prepared requests and reads status lines:

* open: requests at random times, at 1 to 16 times the capacity;
* closed: 512 connections that send the next request as soon as the last one is answered or refused;
* a burst: many requests at once, whose clients then wait as long as they are told and try once more, while others ask
  now and then, to see when such a request is accepted again.

Exit code 1 unless 99 % of the accepted answers are in time under each load, the goodput at 16 times the capacity is 0.9
of that at twice, 99 % of the refusals under open loads take at most 50 ms, the earliest Retry-After of the burst is
within 30 % of the time at which a request is accepted again, and 90 % of the first retries are accepted.

    python -m benchmarks.overload
    python -m benchmarks.overload --seconds 10 --shares 2,16
"""

import argparse
import asyncio
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.servers import schedule_of, started
from exegpt.api.demo import create_demo_model
from xcore.tokenizer import load_tokenizer
from xcore.traces.arrivals import random_arrivals
from xprofiler.machine import cpu_name

INPUT, OUTPUT = 40, 16
CONNECTIONS = 512
MET, FLAT, REFUSED_S, EARLIEST, RETRIED = 0.99, 0.9, 0.05, 0.3, 0.9
"""Goals: the share in time, the goodput over that at twice the capacity, the p99 of refusals, the
relative error of the earliest Retry-After, and the share of accepted retries.
"""
BURST = 4.0
"""A burst brings at once what the capacity is in so many bounds."""
ANSWERED, REFUSED = 200, 429


@dataclass(frozen=True)
class Exchange:
    """A request that was answered or refused; times are seconds since the load's start."""

    due_s: float
    ended_s: float
    status: int
    retry_s: float
    """The time that a refusal asks to wait."""
    kind: str = "first"
    """`retry` after a refusal in the burst, or `probe` beside it."""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.due_s


@dataclass(frozen=True)
class Measured:
    """The measurements of one load."""

    exchanges: tuple[Exchange, ...]
    seconds: float
    client_cpu: float
    """Share of one CPU that the client took."""
    server_cpu: float
    """Share of one CPU that the server's frontend took."""
    lag_s: float
    """99th percentile of the time by which requests left late."""

    def with_status(self, status: int) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.status == status]


class Connection(asyncio.Protocol):
    """A connection with one request at a time; `done` gets status, Retry-After and the connection."""

    def __init__(self) -> None:
        self.done: Callable[[int, float, Connection], None] | None = None
        self.closed = False
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def ask(self, request: bytes, done: Callable[[int, float, "Connection"], None]) -> None:
        self.done, self._read = done, b""
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        if not found:
            return
        lowered = head.lower()
        length = int(lowered.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(body) >= length:
            wait_ms = lowered.partition(b"retry-after-ms:")[2].partition(b"\r\n")[0]
            self._end(int(head[9:12]), float(wait_ms or 0) / 1e3)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end(0, 0.0)

    def _end(self, status: int, retry_s: float) -> None:
        done, self.done = self.done, None
        if done:
            done(status, retry_s, self)


class Client:
    """Sends requests over as many connections as are needed at once."""

    def __init__(self, host: str, port: int, requests: Sequence[bytes]):
        self._where, self._requests, self._idle = (host, port), requests, list[Connection]()
        self.exchanges: list[Exchange] = []
        self.lags: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._begin_s, self.sent, self.pending = time.perf_counter(), 0, 0

    def now(self) -> float:
        return time.perf_counter() - self._begin_s

    async def connect(self, most: int) -> None:
        loop = asyncio.get_running_loop()
        made = await asyncio.gather(*(loop.create_connection(Connection, *self._where) for _ in range(most)))
        self._idle += [connection for _, connection in made]

    async def begin(self, most: int) -> None:
        """Open the connections; the clock starts then."""
        await self.connect(most)
        self._begin_s = time.perf_counter()

    def send(self, due_s: float, then: Callable[[Exchange], None] | None = None, kind: str = "first") -> None:
        """Send the next request, which was due at a time; `then` gets what came of it."""

        def done(status: int, retry_s: float, connection: Connection) -> None:
            exchange = Exchange(due_s, self.now(), status, retry_s, kind)
            self.exchanges.append(exchange)
            self.pending -= 1
            if status:
                self._idle.append(connection)
            if then:
                then(exchange)

        self.pending += 1
        self.lags.append(self.now() - due_s)
        request, self.sent = self._requests[self.sent % len(self._requests)], self.sent + 1
        while self._idle and self._idle[-1].closed:  # the server closes what is idle for long
            self._idle.pop()
        if self._idle:
            self._idle.pop().ask(request, done)
        else:
            self._tasks.append(asyncio.ensure_future(self._ask_anew(request, done)))

    async def _ask_anew(self, request: bytes, done: Callable[[int, float, Connection], None]) -> None:
        connection = Connection()
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection, *self._where)
        except OSError:
            done(0, 0.0, connection)
        else:
            connection.ask(request, done)

    async def drained(self, most_s: float = 60.0) -> None:
        """Wait for the last answers, and close the connections."""
        until = self.now() + most_s
        while self.pending and self.now() < until:
            await asyncio.sleep(0.02)
        for connection in self._idle:
            connection.transport.close()


async def open_load(client: Client, rate: float, seconds: float, seed: int) -> None:
    """Send requests at random times."""
    await client.begin(CONNECTIONS)
    for due in random_arrivals(rate, round(rate * seconds), (seed,)):
        if (wait := float(due) - client.now()) > 0:
            await asyncio.sleep(wait)
        client.send(float(due))
    await client.drained()


async def closed_load(client: Client, rate: float, seconds: float, seed: int) -> None:
    """Send on each connection the next request as soon as the last one has ended."""
    await client.begin(CONNECTIONS)

    def again(exchange: Exchange) -> None:
        if exchange.status and client.now() < seconds:
            client.send(client.now(), again)

    for _ in range(CONNECTIONS):
        client.send(client.now(), again)
    await asyncio.sleep(seconds)
    await client.drained()


async def burst_load(client: Client, rate: float, seconds: float, seed: int) -> None:
    """Send a burst, and each refused request once more after the time that it was told; beside them a few others."""
    loop, number = asyncio.get_running_loop(), round(rate * seconds)
    await client.begin(number + 64)

    def retry(exchange: Exchange) -> None:
        if exchange.status == REFUSED:
            loop.call_later(exchange.retry_s, lambda: client.send(client.now(), kind="retry"))

    for _ in range(number):
        client.send(0.0, retry)
    while not any(e.kind == "probe" and e.status == ANSWERED for e in client.exchanges) and client.now() < 60:
        await asyncio.sleep(0.1)
        client.send(client.now(), kind="probe")
    latest_s = max((e.ended_s + e.retry_s for e in client.exchanges if e.kind == "first"), default=0.0)
    await asyncio.sleep(max(0.0, latest_s - client.now()) + 0.5)
    await client.drained()


LOADS = {"open": open_load, "closed": closed_load, "burst": burst_load}


def run_load(
    kind: str, url: str, frontend: int, requests: Sequence[bytes], rate: float, seconds: float, seed: int
) -> Measured:
    """Send a load from this process, which does nothing else; `frontend` is the server's process."""
    where, before_s = urlsplit(url), _cpu_s(frontend)

    async def load() -> Client:
        client = Client(where.hostname or "", where.port or 80, requests)
        await LOADS[kind](client, rate, seconds, seed)
        return client

    used = resource.getrusage(resource.RUSAGE_SELF)
    client = asyncio.run(load())
    now = resource.getrusage(resource.RUSAGE_SELF)
    lasted = client.now()
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    served = _cpu_s(frontend) - before_s
    lags = sorted(client.lags)
    return Measured(tuple(client.exchanges), lasted, cpu / lasted, served / lasted, lags[len(lags) * 99 // 100])


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prepared(model: Path, number: int, seed: int) -> list[bytes]:
    """HTTP requests with texts of `INPUT` tokens."""
    tokenizer, drawn = load_tokenizer(model), random.Random(seed)
    assert tokenizer, f"{model} has no tokenizer"
    requests: list[bytes] = []
    while len(requests) < number:
        text = tokenizer.decode([drawn.randrange(300, 20_000) for _ in range(INPUT)])
        tokens = tokenizer.encode(text).ids[:INPUT]
        text = tokenizer.decode(tokens)
        if len(tokenizer.encode(text).ids) != INPUT:
            continue
        body = json.dumps({"model": model.name, "prompt": text, "max_tokens": OUTPUT, "ignore_eos": True}).encode()
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        requests.append("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    return requests


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def row(name: str, load: Measured, bound_s: float, seconds: float) -> tuple[str, float, bool]:
    """A line of the table, the goodput, and whether accepted answers and refusals were in time."""
    answered, refused = load.with_status(ANSWERED), load.with_status(REFUSED)
    in_time = [exchange for exchange in answered if exchange.took_s <= bound_s]
    other = len(load.exchanges) - len(answered) - len(refused)
    met, refused_s = len(in_time) / max(1, len(answered)), quantile([e.took_s for e in refused], 0.99)
    line = (
        f"{name:>8} {len(load.exchanges) / seconds:8.1f} {len(in_time) / seconds:8.1f} {met:8.2%} "
        f"{quantile([e.took_s for e in answered], 0.99):7.2f} {1e3 * refused_s:9.1f} {other:6} "
        f"{load.server_cpu:8.0%} {load.client_cpu:7.0%} {1e3 * load.lag_s:7.1f}"
    )
    return line, len(in_time) / seconds, met >= MET and (name == "closed" or refused_s <= REFUSED_S) and not other


HEAD = (
    f"{'load':>8} {'sent/s':>8} {'goodput':>8} {'in time':>8} {'p99 s':>7} {'refusal ms':>9} {'failed':>6} "
    f"{'frontend':>8} {'client':>7} {'lag ms':>7}"
)


def print_burst(load: Measured) -> bool:
    """Print what became of a burst; whether Retry-After told the truth."""
    first = [e for e in load.exchanges if e.kind == "first" and e.status == REFUSED]
    told = [e.ended_s + e.retry_s for e in first] or [0.0]
    again = min((e.due_s for e in load.exchanges if e.kind == "probe" and e.status == ANSWERED), default=float("inf"))
    retried = [e.status == ANSWERED for e in load.exchanges if e.kind == "retry"]
    accepted = sum(retried) / max(1, len(retried))
    print(
        f"burst: {len(first)} refused; a probe was accepted after {again:.1f} s; told to come after {min(told):.1f} to "
        f"{max(told):.1f} s; {accepted:.0%} of {len(retried)} first retries accepted"
    )
    return abs(min(told) / again - 1) <= EARLIEST and accepted >= RETRIED


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bound", type=float, default=5.0, help="the latency bound, in seconds")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each load lasts")
    parser.add_argument("--shares", default="1,2,4,8,16", help="open loads, in multiples of the capacity")
    parser.add_argument("--options", default="", help="more options of exegpt serve, separated by spaces")
    asked = parser.parse_args()
    shares = [float(share) for share in asked.shares.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        model = create_demo_model(Path(directory), 0)
        options = ["-m", str(model), "-l", f"{asked.bound:g}s", "-w", f"{INPUT}/{OUTPUT}", "--pinned"]
        options += asked.options.split()
        with started(Path(directory), options) as (url, server):
            found = schedule_of(url)
            capacity = found["goodput_seq_s"]
            print(f"{cpu_name()}; {found['schedule']['policy']}, capacity {capacity:.1f}/s within {asked.bound:g} s")
            frontend = server.pid  # the command itself has the HTTP connections
            requests = prepared(model, 256, 0)

            def load(kind: str, rate: float, seconds: float, seed: int) -> Measured:
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    return pool.submit(run_load, kind, url, frontend, requests, rate, seconds, seed).result()

            load("open", 0.5 * capacity, min(10.0, asked.seconds), 99)  # until the pace is known
            print(HEAD)
            held, goodputs = True, {}
            for seed, share in enumerate(shares):
                line, goodputs[share], fine = row(
                    f"{share:g}x", load("open", share * capacity, asked.seconds, seed), asked.bound, asked.seconds
                )
                print(line, flush=True)
                held &= fine
                time.sleep(asked.bound)
            line, _, fine = row("closed", load("closed", capacity, asked.seconds, 20), asked.bound, asked.seconds)
            print(line, flush=True)
            held &= fine
            time.sleep(2 * asked.bound)
            held &= print_burst(load("burst", capacity, BURST * asked.bound, 30))
            if 2.0 in goodputs and 16.0 in goodputs:
                flat = goodputs[16.0] / max(1e-9, goodputs[2.0])
                print(f"goodput at 16 times over that at twice: {flat:.2f}")
                held &= flat >= FLAT
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
