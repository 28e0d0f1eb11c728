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

With an emulated engine (`benchmarks.emulated_engine`), which answers more than the frontend can, the frontend is the
limit. The capacity is then what it answers to 64 closed connections, in requests of task T within 2 s:

    python -m benchmarks.overload --engine emulated
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
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.servers import emulated_server, schedule_of, started
from exegpt.api.demo import create_demo_model
from xcore.tokenizer import load_tokenizer
from xcore.traces.arrivals import random_arrivals
from xcore.traces.trace import parse_workload
from xprofiler.machine import cpu_name

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


Load = Callable[[str, float, float, int], Measured]
"""Sends a load: its kind, rate, seconds and seed."""
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


def prepared(model: Path, workload: str, number: int, seed: int) -> list[bytes]:
    """HTTP requests with texts of a workload's lengths."""
    tokenizer, drawn, rng = load_tokenizer(model), random.Random(seed), np.random.default_rng(seed)
    lengths = parse_workload(workload)
    assert tokenizer, f"{model} has no tokenizer"
    requests: list[bytes] = []
    while len(requests) < number:
        tokens, most = int(lengths.input.sample(1, rng)[0]), int(lengths.output.sample(1, rng)[0])
        text = tokenizer.decode([drawn.randrange(300, 20_000) for _ in range(tokens)])
        text = tokenizer.decode(tokenizer.encode(text).ids[:tokens])
        if len(tokenizer.encode(text).ids) != tokens:
            continue
        body = json.dumps({"model": model.name, "prompt": text, "max_tokens": most, "ignore_eos": True}).encode()
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


def run_loads(load: Load, capacity: float, bound_s: float, seconds: float, shares: Sequence[float]) -> bool:
    """Print the table of all loads; whether each goal is met."""
    print(HEAD)
    held, goodputs = True, {}
    for seed, share in enumerate(shares):
        line, goodputs[share], fine = row(
            f"{share:g}x", load("open", share * capacity, seconds, seed), bound_s, seconds
        )
        print(line, flush=True)
        held &= fine
        time.sleep(bound_s)
    line, _, fine = row("closed", load("closed", capacity, seconds, 20), bound_s, seconds)
    print(line, flush=True)
    held &= fine
    time.sleep(2 * bound_s)
    held &= print_burst(load("burst", capacity, BURST * bound_s, 30))
    if 2.0 in goodputs and 16.0 in goodputs:
        flat = goodputs[16.0] / max(1e-9, goodputs[2.0])
        print(f"goodput at 16 times over that at twice: {flat:.2f}")
        held &= flat >= FLAT
    return held


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("cpu", "emulated"), default="cpu", help="what answers the requests")
    parser.add_argument("--workload", help="the lengths; 40/16, or T of an emulated engine, if it is left out")
    parser.add_argument("--bound", type=float, help="the latency bound, in seconds; 5, or 2 of an emulated engine")
    parser.add_argument("--capacity", type=float, help="answers per second; measured or predicted if it is left out")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each load lasts")
    parser.add_argument("--shares", default="1,2,4,8,16", help="open loads, in multiples of the capacity")
    parser.add_argument("--options", default="", help="more options of exegpt serve, separated by spaces")
    asked = parser.parse_args()
    emulated = asked.engine == "emulated"
    workload, bound_s = asked.workload or ("T" if emulated else "40/16"), asked.bound or (2.0 if emulated else 5.0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = create_demo_model(directory, 0)
        if emulated:
            starting = emulated_server(directory, ["-m", str(model), *asked.options.split()], workload, bound_s)
        else:
            options = ["-m", str(model), "-l", f"{bound_s:g}s", "-w", workload, "--pinned", *asked.options.split()]
            starting = started(directory, options)
        with starting as (url, server):
            requests = prepared(model, workload, 256, 0)
            load = partial(_load, url, server.pid, requests)  # the command itself has the HTTP connections
            goodput = schedule_of(url)["goodput_seq_s"]
            print(f"{cpu_name()}; the engine's goodput is {goodput:.1f}/s within {bound_s:g} s")
            if emulated:
                measured = load("open", 0.15 * goodput, min(10.0, asked.seconds), 99)
                capacity = len(measured.with_status(ANSWERED)) / measured.seconds / measured.server_cpu
                print(f"the frontend answers {capacity:.1f} requests per second of its CPU time")
            else:
                capacity = goodput
                load("open", 0.5 * capacity, min(10.0, asked.seconds), 99)  # until the pace is known
            shares = [float(share) for share in asked.shares.split(",")]
            held = run_loads(load, asked.capacity or capacity, bound_s, asked.seconds, shares)
    sys.exit(0 if held else 1)


def _load(
    url: str, frontend: int, requests: Sequence[bytes], kind: str, rate: float, seconds: float, seed: int
) -> Measured:
    """Send a load from a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run_load, kind, url, frontend, requests, rate, seconds, seed).result()


if __name__ == "__main__":
    main()
