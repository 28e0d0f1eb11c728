"""Spans of requests, as a collector gets them: the caller's trace, what happened when, and no text."""

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.exegpt.cli.conftest import run_command
from tests.xserver.conftest import schedule_for, serving
from tests.xserver.test_faults import ask, prompts
from xcore import document
from xcore.errors import InputError
from xserver.telemetry.tracing import tracing

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

SECRET = "Xylophone quartz"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": SECRET, "max_tokens": 12, "ignore_eos": True, "temperature": 0}


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self):
        self.bodies, self.paths = [], []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                collector.paths.append(self.path)
                collector.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def resources(self):
        for body in list(self.bodies):
            yield from ExportTraceServiceRequest.FromString(body).resource_spans

    def spans(self, count):
        """All spans by name, once there are so many."""
        until = time.monotonic() + 30
        while True:
            spans = [s for resource in self.resources() for scope in resource.scope_spans for s in scope.spans]
            if len(spans) >= count:
                return spans
            assert time.monotonic() < until, [span.name for span in spans]
            time.sleep(0.05)

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector():
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def traced(model, collector, tmp_path_factory):
    """A server that finds the collector in its environment."""
    directory = tmp_path_factory.mktemp("traced")
    path = directory / "schedule.json"
    document.write(path, replace(schedule_for(model), latency_bound_s=30.0))
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
            patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
            server = stack.enter_context(serving(model, path, directory, "--max-waiting", "3"))
        yield server


def read(values):
    """Attributes as a dict."""
    found = {}
    for item in values:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


@pytest.fixture(scope="module")
def spans(traced, collector):
    """Of an answer, a chat of two choices as a stream, one with a stop text, a rejection and an invalid request."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    traces = [f"{i:032x}" for i in range(1, 5)]
    statuses = [traced.post("/v1/completions", BODY | {"temperature": 0.5, "top_p": 0.9, "seed": 1}, **headers)[0]]
    talk = BODY | {"messages": [{"role": "user", "content": SECRET}], "n": 2, "stream": True}
    del talk["prompt"]
    asked = ["/v1/chat/completions", talk], ["/v1/completions", BODY | {"n": 4}], ["/v1/completions", {SECRET: 1}]
    for trace, (path, body) in zip(traces, asked, strict=False):
        statuses.append(traced.post(path, body, traceparent=f"00-{trace}-{PARENT}-01")[0])
    statuses.append(traced.post("/v1/completions", BODY, traceparent="garbage " + SECRET)[0])
    assert statuses == [200, 200, 429, 400, 200]
    all_spans = collector.spans(5 + 3 * 3)
    time.sleep(0.3)
    assert len(collector.spans(0)) == 5 + 3 * 3  # each once
    return all_spans


def whole(spans, trace):
    (span,) = [s for s in spans if s.trace_id.hex() == trace and s.kind == Span.SPAN_KIND_SERVER]
    return span


def test_a_request_belongs_to_its_callers_trace(spans):
    span = whole(spans, TRACE)
    assert span.parent_span_id.hex() == PARENT and span.name == "text_completion tiny"
    orphan = [s for s in spans if s.kind == Span.SPAN_KIND_SERVER and not s.parent_span_id]
    assert len(orphan) == 1 and orphan[0].trace_id.hex() not in (TRACE, "0" * 32)  # whose header was garbage


def test_its_phases_follow_each_other_within_it(spans):
    span = whole(spans, TRACE)
    inner = [s for s in spans if s.parent_span_id == span.span_id]
    assert [s.name for s in sorted(inner, key=lambda s: s.start_time_unix_nano)] == ["queue", "prefill", "decode"]
    times = {s.name: (s.start_time_unix_nano, s.end_time_unix_nano) for s in inner}
    assert times["queue"][0] == span.start_time_unix_nano
    assert times["queue"][1] == times["prefill"][0] and times["prefill"][1] == times["decode"][0]
    assert all(begin < end for begin, end in times.values()) and times["decode"][1] <= span.end_time_unix_nano
    assert abs(span.end_time_unix_nano - time.time_ns()) < 600e9  # the wall's clock


def test_attributes_have_the_names_of_the_conventions(spans):
    span = whole(spans, TRACE)
    facts = read(span.attributes)
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert facts.pop("gen_ai.latency.e2e") == pytest.approx(seconds, abs=1e-5)
    queue, first = facts.pop("gen_ai.latency.time_in_queue"), facts.pop("gen_ai.latency.time_to_first_token")
    assert 0 < queue < first < seconds
    assert len(facts.pop("gen_ai.request.id")) == 24
    assert facts == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 16,
        "gen_ai.usage.output_tokens": 12,
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "exegpt.outcome": "answered",
        "exegpt.class": "usual",
    }
    chat = read(whole(spans, f"{1:032x}").attributes)
    assert chat["gen_ai.operation.name"] == "chat" and chat["gen_ai.response.finish_reasons"] == ["length"] * 2
    assert chat["gen_ai.usage.output_tokens"] == 24


def test_requests_that_are_not_answered_have_a_span_with_the_reason(spans):
    rejected, invalid = (read(whole(spans, f"{i:032x}").attributes) for i in (2, 3))
    assert (rejected["http.response.status_code"], rejected["error.type"]) == (429, "concurrency_limit")
    assert (invalid["http.response.status_code"], invalid["exegpt.outcome"]) == (400, "invalid")
    assert "gen_ai.usage.output_tokens" not in rejected | invalid
    assert {s.status.code for s in spans} == {Status.STATUS_CODE_UNSET}  # errors of clients


def test_no_text_leaves_and_the_resource_is_named(spans, collector):
    assert set(collector.paths) == {"/v1/traces"}
    for body in collector.bodies:
        assert b"Xylophone" not in body and b"quartz" not in body
    for resource in collector.resources():
        facts = read(resource.resource.attributes)
        assert facts["service.name"] == "exegpt" and facts["deployment.environment.name"] == "test"


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True], ids=["refusing", "silent"])
def test_a_dead_collector_changes_no_answer_and_does_not_keep_the_server(
    model, schedule, server, tmp_path, monkeypatch, silent
):
    """Nobody listens there, or a program that never answers."""
    want = [ask(server, prompt)[1]["choices"][0]["token_ids"] for prompt in prompts(4)]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # the library waits for so long, or 30 s at its end
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        if silent:
            dead.listen()
        endpoint = f"http://127.0.0.1:{dead.getsockname()[1]}/v1/traces"
        with serving(model, schedule, tmp_path, "--otlp-traces-endpoint", endpoint) as running:
            answers = [ask(running, prompt) for prompt in prompts(4)]
            assert [answer["choices"][0]["token_ids"] for _, answer in answers] == want
            if silent:
                dead.settimeout(20)
                dead.accept()[0].recv(10)  # spans were sent
            running.process.terminate()
            assert running.process.wait(20) == 0
            assert "Traceback" not in running.log.read_text()


def test_packages_are_asked_for_by_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InputError, match=r"package .* is not installed: pip install 'exegpt\[otel\]'\.$"):
        tracing("http://localhost:4318/v1/traces")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "http://", "http://[", "http://host:99999", "ftp://host"])
def test_an_endpoint_is_a_url(endpoint):
    with pytest.raises(InputError, match="give the URL of an OTLP collector"):
        tracing(endpoint)


def test_another_protocol_is_refused(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(InputError, match="can only be sent as http/protobuf"):
        tracing("http://localhost:4317")


def test_a_bad_endpoint_ends_the_command_with_a_sentence(model, schedule):
    done = run_command("serve", "-m", model, "-s", schedule, "--otlp-traces-endpoint", "nowhere")
    assert done.code == 2 and "Traceback" not in done.err
    assert "Traces can't be sent to 'nowhere'" in done.err


def test_without_an_endpoint_nothing_is_imported():
    program = """
import json, sys
from xserver.engines import supervisor
from xserver.telemetry.tracing import tracing
ours = "opentelemetry.sdk", "opentelemetry.exporter"  # FastAPI imports opentelemetry's API by itself
print(json.dumps([tracing(None), [name for name in sys.modules if name.startswith(ours)]]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, []]
