"""What is accepted is answered, whatever becomes of the engine and of clients."""

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.conftest import serving
from tests.server.test_completions import events

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
        time.sleep(0.15)
        disturb()
        return [answer.result() for answer in asked]


def check_all(answers, want):
    for (status, answer), tokens in zip(answers, want, strict=True):
        assert status == 200
        assert answer["choices"][0]["token_ids"] == tokens and answer["usage"]["completion_tokens"] == 100


@pytest.fixture(scope="module")
def want(server):
    """The tokens of an undisturbed server."""
    return [ask(server, prompt)[1]["choices"][0]["token_ids"] for prompt in prompts(12)]


def test_a_killed_engine_is_replaced_and_every_request_answered_once(model, schedule, tmp_path, want):
    with serving(model, schedule, tmp_path) as server:
        first = engine_of(server)
        streamed = {}

        def stream():
            body = LONG | {"prompt": prompts(1)[0], "stream": True}
            streamed["tokens"] = [
                token
                for chunk in events(server.post("/v1/completions", body)[2])
                for token in chunk["choices"][0]["token_ids"]
            ]

        streaming = threading.Thread(target=stream)
        streaming.start()
        check_all(under_load(server, lambda: os.kill(first, signal.SIGKILL)), want)
        streaming.join(60)
        assert streamed["tokens"] == want[0]
        assert engine_of(server) != first and "started again" in server.log.read_text()
        counted = server.get("/metrics")[2].decode().splitlines()
        assert "exegpt_engine_restarts_total 1.0" in counted
        assert f"exegpt_time_to_first_token_seconds_count {len(want) + 1}.0" in counted  # each once, by its first token
        (waits,) = [line.split()[1] for line in counted if line.startswith("exegpt_queue_wait_seconds_count")]
        assert float(waits) < len(want) + 1  # engines' clocks differ: only of requests that ended before the loss


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


def test_sigterm_ends_the_server_when_all_is_answered(model, schedule, tmp_path, want):
    with serving(model, schedule, tmp_path) as server:
        refused = []

        def end():
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            refused.append(ask(server, [1, 2]))

        check_all(under_load(server, end), want)
        status, answer = refused[0]
        assert status == 503 and answer["error"]["code"] == "draining"
        assert server.process.wait(20) == 0


def test_clients_that_leave_free_their_sequences(server):
    body = json.dumps(LONG | {"prompt": [1, 2, 3], "n": 4}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Type: application/json\r\n"
    for i in range(30):
        stream = body if i % 2 else body[:-1] + b', "stream": true}'
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(stream) + stream)
            if i % 3 == 0:
                time.sleep(0.02)
    started = time.monotonic()
    status, _ = ask(server, [5, 6, 7], max_tokens=1)
    assert status == 200
    assert time.monotonic() - started < 3  # 30 x 4 sequences of 100 tokens would take longer than that


def test_a_slow_reader_holds_up_nobody(server):
    body = json.dumps(LONG | {"prompt": [1, 2, 3], "n": 8, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Type: application/json\r\n"
    readers = []
    for _ in range(20):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", server.port))
        client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        readers.append(client)
    assert ask(server, [5, 6, 7], max_tokens=2)[0] == 200
    for client in readers:
        client.close()
