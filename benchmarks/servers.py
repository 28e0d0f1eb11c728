"""Servers that benchmarks start: of one model, on one thread, with a schedule that is given or searched."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.model_sizes import ModelSizes
from xcore.policies.orca import OrcaControl
from xcore.specs.cluster import local_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import Workload

SIZES = ModelSizes(layers=8, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=8000, context=1024)
INPUT, OUTPUT = 64, 64
"""Tokens of a request that `orca` is for."""
STARTS_S = 180


@contextmanager
def running(directory: Path, model: Path, schedule: Path) -> Iterator[tuple[str, int]]:
    """URL and process of a server that follows a schedule, once it is ready."""
    with started(directory, ["-m", str(model), "-s", str(schedule)]) as (url, server):
        yield url, server.pid


@contextmanager
def tuned_server(
    directory: Path, bound: str, workload: str, model: Path | ModelSizes = SIZES, *more: str
) -> Iterator[tuple[str, Path]]:
    """URL and log of a server of a model that has searched its schedule; its log has a JSON line for each request."""
    if isinstance(model, ModelSizes):
        model.create(directory / "model", seed=1)
        model = directory / "model"
    options = ["-m", str(model), "-l", bound, "-w", workload, "--log-format", "json", "--log-requests", *more]
    with started(directory, options) as (url, _):
        yield url, directory / "server.log"


@contextmanager
def started(directory: Path, options: list[str]) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    command = [sys.executable, "-m", "exegpt", "serve", "--threads", "1", "--port", url.rpartition(":")[2], *options]
    log = directory / "server.log"
    with log.open("w") as written:
        server = subprocess.Popen(command, stdout=written, stderr=written)
        try:
            until = time.monotonic() + STARTS_S
            while not ready(url):
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"The server doesn't start: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield url, server
        finally:
            server.terminate()
            server.wait(90)


@contextmanager
def emulated_server(
    directory: Path, options: list[str], workload: str, bound_s: float
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start a server like `started`, whose engine is emulated by `benchmarks.emulated_engine`."""
    path = directory / "engine"
    command = [sys.executable, "-m", "benchmarks.emulated_engine", "--socket", str(path)]
    engine = subprocess.Popen([*command, "--workload", workload, "--bound", str(bound_s)])
    try:
        with started(directory, [*options, "--engine-socket", str(path)]) as server:
            yield server
    finally:
        engine.terminate()
        engine.wait(30)


def give_text(tokenizer: Path, size: int) -> None:
    """Add a word for every token id: the model's own tokenizer has bytes alone, and clients see no token without text,
    so their times to first token would depend on which tokens come.
    """
    data = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    vocabulary |= {added["content"]: added["id"] for added in data["added_tokens"]}  # else they are numbered anew
    taken = set(vocabulary.values())
    vocabulary |= {f"Ġw{i}": i for i in range(size) if i not in taken}
    tokenizer.write_text(json.dumps(data), encoding="utf-8")


def orca(model: Path, seqs: int) -> Schedule:
    """A schedule of one rank that never lacks memory."""
    spec = ModelSpec.from_directory(model)
    return Schedule(
        version=Schedule.VERSION,
        policy="orca",
        control=OrcaControl(max_num_seqs=seqs, prefills_per_step=2),
        model=ModelReference(spec, spec.fingerprint),
        cluster=local_cluster(),
        workload=Workload.fixed(INPUT, OUTPUT),
        profile=ProfileReference("roofline", "0"),
        stages=(Stage((0,), 1, "both", None, (0, spec.layers)),),
        kv_blocks=seqs * spec.context // 16,
        dtype="fp32",
        kv_dtype="fp32",
        admission="reserve",
    )


def ready(url: str, path: str = "/ready") -> bool:
    try:
        with urllib.request.urlopen(url + path, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def schedule_of(url: str) -> dict[str, Any]:
    """What the server says of its schedule."""
    with urllib.request.urlopen(f"{url}/schedule", timeout=10) as answer:
        document: dict[str, Any] = json.load(answer)
    return document
