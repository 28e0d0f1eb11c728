"""Emulated engine: it serves a frontend's requests at the predicted pace of a GPU, and generates random tokens.

A frontend can so be loaded as by an engine that answers hundreds of requests per second, on a machine without one.
Its pace is that of Llama-3.2-1B on an H200, by the roofline, and it takes hardly any CPU time itself.

    python -m exegpt serve -m DIR --engine-socket PATH &
    python -m benchmarks.emulated_engine --socket PATH --workload T --bound 2
"""

import argparse
import contextlib
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xcore.arrays import Array, Integers
from xcore.policies.chunked import ChunkedControl
from xcore.requests.engine_protocol import (
    BEGIN,
    DRAIN,
    FROM_FRONTEND,
    Abort,
    Ended,
    EngineLoad,
    Frames,
    Opened,
    Stepped,
    Stop,
    TokenColumns,
    framed,
)
from xcore.requests.request import Request
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.traces.trace import parse_workload
from xprofiler.roofline import roofline_profile
from xserver.admission.pace import Pace
from xsimulator.cost.cost_model import ReplicaCost

MODEL, CLUSTER = "llama-3.2-1b", "1xH200"
MOST_SEQS, BLOCKS = 2048, 40_000
VOCAB = range(300, 8000)
"""Tokens that are generated: words of the demo's tokenizer."""


def opened(workload: str, bound_s: float) -> Opened:
    """Return the engine's description; its goodput is that of as many sequences as are in time together."""
    spec, cluster = builtin_model(MODEL), parse_cluster(CLUSTER)
    profile, lengths = roofline_profile(spec, cluster), parse_workload(workload)
    schedule = Schedule(
        version=Schedule.VERSION,
        policy="chunked",
        control=ChunkedControl(max_num_seqs=MOST_SEQS, max_num_batched_tokens=16 * MOST_SEQS),
        model=ModelReference(spec, spec.fingerprint),
        cluster=cluster,
        workload=lengths,
        profile=ProfileReference("roofline", "0"),
        stages=(Stage((0,), 1, "both", None, (0, spec.layers)),),
        kv_blocks=BLOCKS,
        dtype=profile.dtype,
        kv_dtype=profile.dtype,
        admission="grow",
        latency_bound_s=bound_s,
    )
    pace = _pace(Opened(schedule, profile, None, (), 0.0))
    load = pace.load_within(0.85 * bound_s, lengths.output.quantile(0.99))
    goodput = load / pace.service_s(round(lengths.output.mean), load)
    return Opened(schedule, profile, goodput, ("the engine is emulated",), time.monotonic())


def _pace(description: Opened) -> Pace:
    schedule = description.schedule
    return Pace(schedule, ReplicaCost.of(schedule, description.profile), description.profile, 0.0)


@dataclass(eq=False)
class Running:
    """A sequence: its id, its maximum tokens and its generated tokens."""

    number: int
    most: int
    generated: int = 0


class EmulatedEngine:
    """An engine whose sequences each get a token per iteration, which takes as long as predicted at their number."""

    def __init__(self, description: Opened):
        pace, self._zero_s = _pace(description), description.zero_s
        self._most, self._random = int(pace.most), np.random.default_rng(0)
        self._tokens_s: list[float] = [0.0, *pace.tokens_s(self._most).tolist()]
        self.waiting: list[Running] = []
        self.running: list[Running] = []

    @property
    def step_s(self) -> float:
        """Return the seconds of an iteration of the running sequences."""
        return self._tokens_s[len(self.running)]

    def follow(self, order: object) -> None:
        """Take a request, or end one."""
        if isinstance(order, Request):
            self.waiting.append(Running(int(order.id), order.max_tokens))
        elif isinstance(order, (Abort, Stop)):
            ids = {int(each) for each in (order.ids if isinstance(order, Abort) else (order.id,))}
            self.waiting = [each for each in self.waiting if each.number not in ids]
            self.running = [each for each in self.running if each.number not in ids]

    def admit(self) -> None:
        """Start waiting sequences."""
        room = self._most - len(self.running)
        self.running += self.waiting[:room]
        del self.waiting[:room]

    def step(self) -> Stepped:
        """Return a token of each running sequence, and the ends of those that are complete."""
        now_s, count = time.monotonic() - self._zero_s, len(self.running)
        generated = np.array([each.generated for each in self.running], dtype=np.int64)
        for each in self.running:
            each.generated += 1
        ended = tuple(Ended(str(each.number), "length") for each in self.running if each.generated >= each.most)
        ids = np.array([each.number for each in self.running], dtype=np.int64)
        drawn: Integers = self._random.integers(VOCAB.start, VOCAB.stop, count)
        starts: Array = np.where(generated == 0, now_s - self.step_s, np.nan)
        columns = TokenColumns(ids, generated, drawn, np.full(count, now_s), starts, None, {}, {})
        self.running = [each for each in self.running if each.generated < each.most]
        load = EngineLoad(len(self.waiting), 0, len(self.running), 0, BLOCKS, 0)
        return Stepped(now_s, columns, ended, load)


class Connection:
    """The engine's end of the frontend's socket."""

    def __init__(self, path: Path):
        self._socket, self._frames = socket.socket(socket.AF_UNIX), Frames(FROM_FRONTEND)
        while self._socket.connect_ex(str(path)):
            time.sleep(0.05)

    def send(self, message: object) -> None:
        """Send a message; wait while the frontend reads nothing."""
        self._socket.sendall(framed(message))

    def take(self, wait_s: float) -> list[object]:
        """Return the orders that have arrived, after waiting for the first; ConnectionError at the end."""
        if not select.select([self._socket], [], [], wait_s)[0]:
            return []
        data = self._socket.recv(2**18)
        if not data:
            raise ConnectionError
        return self._frames.feed(data)


def serve(path: Path, description: Opened) -> None:
    """Serve the frontend that listens on a socket until it drains or closes the connection."""
    connection, engine, draining = Connection(path), EmulatedEngine(description), False
    connection.send(description)
    due_s = time.monotonic()
    while not draining or engine.running or engine.waiting:
        for order in connection.take(max(0.0, due_s - time.monotonic()) if engine.running else 0.05):
            draining |= order == DRAIN
            engine.waiting = [] if order == BEGIN else engine.waiting
            engine.follow(order)
        now_s = time.monotonic()
        if engine.running and now_s < due_s:
            continue
        if engine.running:
            connection.send(engine.step())
        else:
            due_s = now_s
        engine.admit()
        due_s = max(due_s, now_s - 0.1) + (engine.step_s if engine.running else 0.0)


def main() -> None:
    """Serve one frontend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--workload", default="T")
    parser.add_argument("--bound", type=float, default=2.0, help="the latency bound, in seconds")
    asked = parser.parse_args()
    with contextlib.suppress(ConnectionError):
        serve(asked.socket, opened(asked.workload, asked.bound))


if __name__ == "__main__":
    main()
