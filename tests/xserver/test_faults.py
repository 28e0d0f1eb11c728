"""What is accepted is answered, whatever becomes of the engine and of clients."""

import json
import os
import signal
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.xserver.conftest import serving
from tests.xserver.http.test_completions import events

LONG = {"max_tokens": 100, "ignore_eos": True, "temperature": 0, "return_token_ids": True}


def engine_of(server) -> int:
    """The engine's process."""
    (child,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return int(child)


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + j) % 250 for j in range(5 + i % 7)] for i in range(count)]


def ask(server, prompt, **options):
    status, _, data = server.post("/v1/completions", LONG | {"prompt": prompt} | options)
    return status, json.loads(data)


def under_load(server, disturb, count=12):
    """Answers to requests during which something happens."""
    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(ask, server, prompt) for prompt in prompts(count)]
        until_accepted(server, asked)
        disturb()
        return [answer.result() for answer in asked]


def until_accepted(server, asked, models=("",)):
    """Wait until a server has all these requests, or has answered them."""
    until = time.monotonic() + 20
    while True:
        done = sum(answer.done() for answer in asked)
        pages = [json.loads(server.get(f"/status?model={name}" if name else "/status")[2]) for name in models]
        if done + sum(page["active_requests"] for page in pages) >= len(asked):
            return
        assert time.monotonic() < until, f"{done} of {len(asked)} answered, others unknown"


def check_all(answers, want):
    for (status, answer), tokens in zip(answers, want, strict=True):
        assert status == 200
        assert answer["choices"][0]["token_ids"] == tokens and answer["usage"]["completion_tokens"] == 100


@pytest.fixture(scope="module")
def want(server):
    """The tokens of an undisturbed server."""
    return [ask(server, prompt)[1]["choices"][0]["token_ids"] for prompt in prompts(12)]


COUNTS_TASKS = """
import asyncio, pathlib, signal

def count(*_):
    pathlib.Path({path!r}).write_text(str(len(asyncio.all_tasks())))

signal.signal(signal.SIGUSR2, count)
"""
"""Runs at the start of a server: a signal makes it write how many tasks its event loop has."""


@pytest.fixture(scope="module")
def doomed(model, schedule, tmp_path_factory):
    """A server with a journal, whose tasks can be counted; it loses its engine, and is ended at last."""
    directory = tmp_path_factory.mktemp("doomed")
    (directory / "sitecustomize.py").write_text(COUNTS_TASKS.format(path=str(directory / "tasks")))
    options = ["--pinned", "--stall-timeout", "5m", "--max-waiting", "2000"]
    options += ["--journal", str(directory / "journal"), "--answer-ttl", "1s"]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(directory))
        with serving(model, schedule, directory, *options) as server:
            yield server


def test_a_killed_engine_is_replaced_and_every_request_answered_once(doomed, want):
    first = engine_of(doomed)
    streamed = {}

    def stream():
        body = LONG | {"prompt": prompts(1)[0], "stream": True}
        streamed["tokens"] = [
            token
            for chunk in events(doomed.post("/v1/completions", body)[2])
            for token in chunk["choices"][0]["token_ids"]
        ]

    streaming = threading.Thread(target=stream)
    streaming.start()
    check_all(under_load(doomed, lambda: os.kill(first, signal.SIGKILL)), want)
    streaming.join(60)
    assert streamed["tokens"] == want[0]
    until = time.monotonic() + 60
    while doomed.get("/ready")[0] != 200 or engine_of(doomed) == first:  # all may have been answered before the kill
        assert time.monotonic() < until, doomed.log.read_text()
        time.sleep(0.1)
    assert "is restarted" in doomed.log.read_text()
    counted = doomed.get("/metrics")[2].decode().splitlines()
    assert "exegpt_engine_restarts_total 1.0" in counted
    assert f"exegpt_time_to_first_token_seconds_count {len(want) + 1}.0" in counted  # each once, by its first token
    assert f"exegpt_queue_wait_seconds_count {len(want) + 1}.0" in counted  # by the clock of its engine
    every = 'exegpt_wait_prediction_error_seconds_bucket{le="+Inf"}'
    (errors,) = [line.split()[1] for line in counted if line.startswith(every)]
    assert float(errors) < len(want) + 1  # no prediction knew of the loss


@pytest.mark.slow
def test_a_stopped_engine_makes_the_server_unready_and_is_replaced(model, schedule, tmp_path, want):
    with serving(model, schedule, tmp_path) as server:
        states = []

        def stop():
            os.kill(engine_of(server), signal.SIGSTOP)
            until = time.monotonic() + 20
            while time.monotonic() < until and (not states or states[-1] == 200):
                states.append(server.get("/ready")[0])
                time.sleep(0.2)

        check_all(under_load(server, stop), want)
        assert states[0] == 200 and states[-1] == 503


@pytest.fixture(scope="module")
def watched(doomed):
    """Its server, with what it holds when nobody asks, and its directory."""
    fill(doomed)
    with ThreadPoolExecutor(64) as pool:  # the frontend's threads have started
        assert all(status == 200 for status, _ in pool.map(lambda _: ask(doomed, [1], max_tokens=1), range(64)))
    return doomed, doomed.log.parent


def held(server, directory) -> dict[str, int]:
    """What a server holds for its clients."""
    written = directory / "tasks"
    written.unlink(missing_ok=True)
    server.process.send_signal(signal.SIGUSR2)
    while not written.exists() or not written.read_text():
        time.sleep(0.01)
    shown = json.loads(server.get("/status")[2])
    return {
        "tasks": int(written.read_text()),
        "files": len(os.listdir(f"/proc/{server.process.pid}/fd")),
        "journalled": len(list((directory / "journal").iterdir())),
        **{name: shown[name] for name in ("active_requests", "waiting", "running")},
    }


def check_freed(before, server, directory):
    """A server soon holds no more than it held."""
    until = time.monotonic() + 10
    while any((now := held(server, directory))[name] > count for name, count in before.items()):
        assert time.monotonic() < until, (now, before)
        time.sleep(0.1)


def fill(server):
    """Answer what needs every block and every sequence that the engine may have; preemptions until then."""
    status, answer = ask(server, list(range(28)), n=8)
    assert status == 200 and answer["usage"]["completion_tokens"] == 800
    return json.loads(server.get("/status")[2])["preemptions"]


def connected(server, body, **headers):
    """A client that has sent a request, and reads little."""
    data = json.dumps(body).encode()
    headers |= {"Host": f"localhost:{server.port}", "Content-Type": "application/json", "Content-Length": len(data)}
    lines = ["POST /v1/completions HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # else the kernel keeps megabytes for it
    client.connect(("127.0.0.1", server.port))
    client.sendall("\r\n".join([*lines, "", ""]).encode() + data)
    return client


def dechunked(stream) -> bytes:
    """The body of a streamed response."""
    while stream.readline() != b"\r\n":
        pass
    data = b""
    while size := int(stream.readline(), 16):
        data += stream.read(size)
        stream.readline()
    return data


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_clients_that_leave_free_their_sequences(watched, count):
    server, directory = watched
    before, preemptions = held(server, directory), fill(server)
    clients = deque()
    for i in range(count):
        body = LONG | {"prompt": [1, 2, 3 + i % 200], "stream": i % 2 == 0, "n": 4}
        journalled = i % 10 == 0  # goes on without its client
        if journalled:
            body |= {"n": 1, "max_tokens": 20}
        clients.append(connected(server, body, **({"Idempotency-Key": f"{count}-{i}"} if journalled else {})))
        if i % 3 == 0:
            time.sleep(0.02)
        if len(clients) == 100:
            clients.popleft().close()
    for client in clients:
        client.close()
    started = time.monotonic()
    status, _ = ask(server, [5, 6, 7], max_tokens=1)
    assert status == 200
    assert time.monotonic() - started < 3  # 30 x 4 sequences of 100 tokens would take longer than that
    check_freed(before, server, directory)
    assert fill(server) == preemptions


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
@pytest.mark.slow
def test_slow_readers_hold_up_nobody(watched, count):
    """The engine makes all that they asked for, and answers others, while none of them has read its answer."""
    server, directory = watched
    before = held(server, directory)
    body = LONG | {"prompt": [1, 2, 3], "n": 8, "stream": True, "logprobs": 20}
    readers = [connected(server, body) for _ in range(count)]
    idle = {"active_requests": count, "waiting": 0, "running": 0}
    until = time.monotonic() + 100
    while not idle.items() <= (now := held(server, directory)).items():
        assert time.monotonic() < until, now
        time.sleep(0.2)
    assert ask(server, [5, 6, 7], max_tokens=2)[0] == 200
    with readers.pop().makefile("rb") as stream:
        pieces = [choice for event in events(dechunked(stream)) for choice in event["choices"]]
        assert sum(len(piece["token_ids"]) for piece in pieces) == 800
    for client in readers:
        client.close()
    check_freed(before, server, directory)


@pytest.mark.slow
def test_readers_that_stop_are_taken_for_gone(model, schedule, tmp_path):
    """Their connections end too, those of whole answers among them, though what was sent can't be delivered."""
    with serving(model, schedule, tmp_path, "--stall-timeout", "1s", "--pinned") as server:
        files = f"/proc/{server.process.pid}/fd"
        before = len(os.listdir(files))
        body = LONG | {"prompt": [1, 2, 3], "n": 8, "logprobs": 20}
        readers = [connected(server, body | {"stream": i % 2 == 0}) for i in range(16)]
        until = time.monotonic() + 20
        while b'exegpt_requests_total{class="usual",outcome="cancelled"} 8.0' not in server.get("/metrics")[2]:
            assert time.monotonic() < until
            time.sleep(0.1)
        while len(os.listdir(files)) > before:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert all(client.fileno() >= 0 for client in readers)  # none of them has closed its end


def test_sigterm_ends_the_server_when_all_is_answered(doomed, want):
    """Last in this file: the server ends."""
    refused = []

    def end():
        doomed.process.send_signal(signal.SIGTERM)
        while (answer := ask(doomed, [1, 2]))[0] == 200:
            pass  # the signal hasn't arrived
        refused.append(answer)

    check_all(under_load(doomed, end), want)
    status, answer = refused[0]
    assert status == 503 and answer["error"]["code"] == "draining"
    assert doomed.process.wait(20) == 0
