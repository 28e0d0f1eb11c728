"""Reports that fail: they are counted and logged once, and no client, engine or command ends by them."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

pytest.importorskip("fastapi")

from tests.xserver.conftest import STARTS_S, Server, free_port, schedule_for
from xcore import document
from xcore.console import output
from xserver.admission.gate import ApiKeys, guarded
from xserver.admission.measured import RequestTiming
from xserver.engines.engine_link import EngineLink
from xserver.http.answered import Answered
from xserver.http.frontend import Frontend
from xserver.http.frontends import Frontends
from xserver.http.served_model import ServedModel
from xserver.telemetry import reporting as barrier
from xserver.telemetry.library_log import log_libraries
from xserver.telemetry.monitor import Arrival, Exchange
from xserver.telemetry.reporting import FAILURES, reporting
from xserver.telemetry.request_reports import Reports


class Failing:
    """Whatever is called of it raises."""

    def __getattr__(self, name):
        def fail(*_, **__):
            raise RuntimeError("a client's secret")

        return fail


def failures(kind):
    return FAILURES.labels(kind)._value.get()


def exchange():
    return Exchange("id", "/v1/completions", Arrival(time.monotonic(), {}), 200, None, None)


@pytest.fixture
def frontend(model, monkeypatch):
    monkeypatch.setattr(barrier, "_logged", set())
    return Frontend(ServedModel.read(model, None), EngineLink(), "", None, 1.0, 1, reports=Reports(True, Failing()))


def test_a_failure_is_counted_and_logged_once_for_its_place(capsys, monkeypatch):
    monkeypatch.setattr(barrier, "_logged", set())
    before = failures("history")
    for _ in range(3):
        with reporting("history"):
            raise ValueError("a client's secret")
    with reporting("history"):
        raise KeyError
    written = capsys.readouterr().err
    assert failures("history") == before + 4 and written.count("a report (history) has failed") == 2
    assert "ValueError at" in written and "KeyError at" in written and "secret" not in written


def test_a_cancelled_task_is_no_failure():
    with pytest.raises(asyncio.CancelledError), reporting("log"):
        raise asyncio.CancelledError


def test_predictions_of_numpys_kind_are_logged(capsys, monkeypatch):
    """A queued request's prediction was one, and its log line raised an exception."""
    monkeypatch.setenv(output.LOG_FORMAT, "json")
    answered = Answered("id", "m", "/v1/completions", 200, "answered", "usual", None, 2.0, 1.0)
    before = failures("log")
    Reports(True).answered(replace(answered, wait_error_s=np.float64(0.25), end_error_s=np.float64(0.0)), {})
    line = json.loads(capsys.readouterr().err)
    assert (line["wait_error_s"], line["end_error_s"]) == (0.25, 0.0) and "tpot_s" not in line
    assert failures("log") == before


@pytest.mark.parametrize("part", ["metrics", "observed"])
def test_each_part_of_the_monitor_fails_alone(frontend, part, capsys):
    """The log line comes though tracing fails, and the metrics or the history."""
    monitor, kind = frontend.monitor, {"metrics": "metrics", "observed": "history"}[part]
    before = failures(kind), failures("tracing")
    setattr(monitor, part, Failing())
    monitor.ended(exchange())
    assert (failures(kind), failures("tracing")) == (before[0] + 1, before[1] + 1)
    assert "/v1/completions tiny 200 failed" in capsys.readouterr().err


@pytest.mark.parametrize("event", ["opened", "restarting", "stepped"])
def test_no_event_of_an_engine_fails_by_its_report(frontend, event):
    before = failures("monitor")
    frontend.monitor.metrics = frontend.monitor.observed = Failing()

    async def run():
        getattr(frontend.monitor, event)(*([Failing()] if event != "restarting" else []))

    asyncio.run(run())
    assert failures("monitor") == before + 1


def test_no_answer_fails_by_its_report(frontend):
    """An answer was followed by a reset of its connection."""
    frontends, sent = Frontends([frontend]), []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def take(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": [], "state": {"request_id": "a"}}
    before = failures("monitor")
    asyncio.run(RequestTiming(app, Failing(), ["/v1/completions"])(scope, receive, take))
    assert failures("monitor") == before + 1 and [message["type"] for message in sent][-1] == "http.response.body"
    text = frontends.only.monitor.metrics.render("")[0].decode()
    assert f'exegpt_reporting_failures_total{{kind="monitor"}} {before + 1}' in text


def test_a_server_of_several_models_counts_once(model):
    made = [Frontend(ServedModel.read(model, name), EngineLink(), "", None, 1.0, 1) for name in "ab"]
    names = [sample.name for metric in Frontends(made).counted.collect() for sample in metric.samples]
    assert names.count("exegpt_reporting_failures_total") == 7


def test_a_librarys_message_that_cannot_be_formatted_is_counted(monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log_libraries()
    before = failures("log")
    logging.getLogger("some").warning("%d", "not a number")
    assert failures("log") == before + 1


def test_a_note_that_cannot_be_written_ends_nothing(monkeypatch):
    for log_format in ("text", "json"):
        monkeypatch.setenv(output.LOG_FORMAT, log_format)
        with open("/dev/null", "w") as closed:
            closed.close()
            monkeypatch.setattr(sys, "stderr", closed)
            output.note("text")
            assert not output.log("text", "event")
            before = failures("log")
            Reports(True).answered(Answered("i", "m", "/", 200, "answered", "usual", None, 2.0, 1.0), {})
            assert failures("log") == before + 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_reader_of_notes_that_has_gone_ends_no_process(log_format):
    program = "from xcore.console import output\nfor _ in range(9):\n    output.note('text')\nprint('done')"
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", program]
    environment = os.environ | {output.LOG_FORMAT: log_format}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, env=environment, timeout=60)
    os.close(writing)
    assert done.stdout == b"done\n"


def kept_alive(port, count):
    """How many answers one connection gives."""
    answers = 0
    body = json.dumps({"prompt": [5], "max_tokens": 24, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        read = connection.makefile("rb")
        for _ in range(count):
            connection.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            status = read.readline()
            if not status:
                break
            length = 0
            while (line := read.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            read.read(length)
            answers += status.split()[1] in (b"200", b"429")
    return answers


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("log", ["file", "/dev/full"])
def test_connections_under_load_are_kept(model, tmp_path, log):
    """With a bound and --log-requests a queued request's connection was reset. A full disk changes nothing."""
    from concurrent.futures import ThreadPoolExecutor

    path, port = tmp_path / "schedule.json", free_port()
    document.write(path, replace(schedule_for(model), latency_bound_s=30.0))
    command = [sys.executable, "-m", "exegpt", "serve", "-m", str(model), "-s", str(path), "--port", str(port)]
    written = tmp_path / "server.log" if log == "file" else log
    with open(written, "w") as stream:
        options = ["--threads", "1", "--log-requests"]
        process = subprocess.Popen([*command, *options], stdout=stream, stderr=stream)
    server, until = Server(process, port, tmp_path / "server.log"), time.monotonic() + STARTS_S
    try:
        while not server.ready():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        with ThreadPoolExecutor(24) as pool:
            assert list(pool.map(lambda _: kept_alive(port, 6), range(24))) == [6] * 24
        metrics = server.get("/metrics")[2].decode()
        (failed,) = [
            line for line in metrics.splitlines() if line.startswith('exegpt_reporting_failures_total{kind="log"}')
        ]
        assert (float(failed.split()[1]) == 0) == (log == "file")
        process.terminate()
        assert process.wait(30) is not None
    finally:
        process.kill()


def test_a_log_line_has_the_time_both_ids_the_tokens_and_the_latencies(capsys, monkeypatch):
    monkeypatch.delenv(output.LOG_FORMAT, raising=False)
    answered = Answered("own", "m", "/v1/completions", 200, "answered", "usual", None, 2.0, 1.5)
    finished = replace(answered, client_id="theirs", ttft_s=0.25, prompt_tokens=7, output_tokens=5)
    Reports(True).answered(finished, {})
    date, line = capsys.readouterr().err.strip().split(" ", 1)
    assert datetime.fromisoformat(date).tzinfo is not None
    expected = "own (theirs) /v1/completions m 200 answered in 1.500 s, first token after 0.250 s, 7 + 5 tokens"
    assert line.removeprefix("· ") == expected


def test_a_clients_own_id_reaches_the_monitor(frontend):
    seen = []

    class Counts:
        def ended(self, exchange):
            seen.append((exchange.request_id, exchange.client_id))

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(headers):
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}

        async def nothing(*_):
            return {"type": "http.request", "body": b""}

        await guarded(RequestTiming(app, Counts(), ("/v1/completions",)), ApiKeys(()), (), ())(scope, nothing, nothing)

    host = (b"host", b"localhost")
    asyncio.run(ask([host, (b"x-request-id", b"mine")]))
    asyncio.run(ask([host]))
    (own, client), (_, none) = seen
    assert client == "mine" and own != "mine" and none is None
