"""A server of a tiny model, which several tests share."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sharing import SHARING, shared_by
from tests.stored_profile import store_profile
from xcore import document
from xcore.policies import TRAITS
from xcore.specs.cluster import local_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import Workload
from xrunner.models.create import create_model

pytest.importorskip("fastapi")
_SHARED: list[subprocess.Popen[bytes]] = []
"""The servers of several files."""
BOUND_S = 30.0
"""Latency bound of the server `bounded`."""
STARTS_S = 120
"""Longest start of a server: a fresh clone compiles its kernels first."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End servers behind the last test that shares them: while they wait, they take three hundredths of a core.

    Without several processes, files that share them don't follow each other.
    """
    group, after = shared_by(item.nodeid), nextitem and shared_by(nextitem.nodeid)
    while "PYTEST_XDIST_WORKER" in os.environ and group in SHARING.values() and after != group and _SHARED:
        _SHARED.pop().terminate()


class Server:
    """A running `exegpt serve`."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path):
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **headers: str):
        """(status, headers, body) of a GET."""
        return self.send("GET", path, None, **headers)

    def post(self, path: str, body, **headers: str):
        """(status, headers, body) of a POST of a document, or of bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send("POST", path, data, **({"Content-Type": "application/json"} | headers))

    def send(self, method: str, path: str, data: bytes | None, **headers: str):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def ready(self) -> bool:
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@contextmanager
def serving(model: Path, schedule: Path, directory: Path, *options: str) -> Iterator[Server]:
    """A server of one model that is ready; it is killed at the end, if it hasn't ended."""
    with started(["-m", str(model), "-s", str(schedule), *options], directory) as server:
        yield server


@contextmanager
def started(options: list[str], directory: Path, engines: int = 1) -> Iterator[Server]:
    """A server of whatever models that is ready; it is killed at the end, if it hasn't ended."""
    port, log = free_port(), directory / "server.log"
    command = [sys.executable, "-m", "exegpt", "serve", "--port", str(port)]
    with log.open("w") as written:
        process = subprocess.Popen(
            [*command, "--threads", "1", *options], stderr=written, stdout=written, env=os.environ | {"NO_COLOR": "1"}
        )
    server, until = Server(process, port, log), time.monotonic() + engines * STARTS_S
    try:
        while not server.ready():
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the server doesn't start: {log.read_text()}")
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def schedule_for(model: Path, policy: str = "orca", **variables) -> Schedule:
    """A schedule of one rank for a model directory."""
    spec = ModelSpec.from_directory(model)
    usual = {"orca": {"max_num_seqs": 8, "prefills_per_step": 2}}
    return Schedule(
        version=Schedule.VERSION,
        policy=policy,
        control=TRAITS[policy].control(**(variables or usual[policy])),
        model=ModelReference(spec, spec.fingerprint),
        cluster=local_cluster(),
        workload=Workload.fixed(16, 16),
        profile=ProfileReference("roofline", "0"),
        stages=(Stage((0,), 1, "both", None, (0, spec.layers)),),
        kv_blocks=64,
        dtype="fp32",
        kv_dtype="fp32",
        admission="grow",
    )


def create_tiny(directory: Path) -> Path:
    """Create a model of a few thousand parameters, with profiles for one and two ranks."""
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 300, "context": 128}
    create_model(directory, "llama", **sizes, seed=0)
    for ranks in (1, 2):
        store_profile(directory, ranks)
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return create_tiny(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def schedule(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("schedule") / "schedule.json"
    document.write(path, schedule_for(model))
    return path


@pytest.fixture(scope="session")
def server(model, schedule, tmp_path_factory) -> Iterator[Server]:
    """A server with a journal, which only requests with a key use."""
    directory = tmp_path_factory.mktemp("server")
    with serving(model, schedule, directory, "--journal", str(directory / "journal")) as running:
        _SHARED.append(running.process)
        yield running


@pytest.fixture(scope="session")
def administered(model, schedule, tmp_path_factory) -> Iterator[Server]:
    """A server whose administrator's token is `secret`."""
    directory = tmp_path_factory.mktemp("administered")
    (directory / "token").write_text("secret\n")
    with serving(model, schedule, directory, "--admin-token-file", str(directory / "token"), "--pinned") as running:
        _SHARED.append(running.process)
        yield running


@pytest.fixture(scope="session")
def bounded(model, tmp_path_factory) -> Iterator[Server]:
    """A server with a bound, logs of JSON, and the key `sesame` in the file `keys` beside its log."""
    directory = tmp_path_factory.mktemp("bounded")
    path, keys = directory / "schedule.json", directory / "keys"
    document.write(path, replace(schedule_for(model), latency_bound_s=BOUND_S))
    keys.write_text("sesame\n")
    options = ("--api-key-file", str(keys), "--log-format", "json", "--log-requests", "--max-waiting", "3")
    with serving(model, path, directory, *options) as running:
        _SHARED.append(running.process)
        yield running


@pytest.fixture(scope="session")
def scripted(tmp_path_factory) -> Iterator[Server]:
    """A server of a model that calls a tool."""
    from tests.xserver.scripted import schedule_file, scripted_model

    directory = tmp_path_factory.mktemp("scripted")
    model = scripted_model(directory / "scripted")
    with serving(model, schedule_file(model, directory / "schedule.json"), directory) as running:
        _SHARED.append(running.process)
        yield running


@pytest.fixture(scope="session")
def unscripted(tmp_path_factory) -> Iterator[Server]:
    """A server of random weights with room for tools in its prompts."""
    directory = tmp_path_factory.mktemp("random")
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 300, "context": 8192}
    create_model(directory / "tiny", "llama", **sizes, seed=0)
    store_profile(directory / "tiny", 1)
    document.write(directory / "schedule.json", replace(schedule_for(directory / "tiny"), kv_blocks=4096))
    with serving(directory / "tiny", directory / "schedule.json", directory) as running:
        _SHARED.append(running.process)
        yield running
