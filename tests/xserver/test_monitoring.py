"""Metrics, the schedule as it is kept, the status page's data, and logs: they count what happened, and have no text."""

import json
import re
import shutil
import subprocess
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.xserver.conftest import BOUND_S

KEY = {"Authorization": "Bearer sesame"}
SECRET = "Xylophone quartz"
BODY = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}


def samples(server):
    """All values by name and sorted labels."""
    status, headers, text = server.get("/metrics", **KEY)
    assert status == 200 and headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(text.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def read(values, name, **labels):
    return values[name, tuple(sorted(labels.items()))]


@pytest.fixture(scope="module")
def asked(bounded):
    """What metrics said before and after two answers, a stream, a rejection and an invalid request."""
    before = samples(bounded)
    for options in ({}, {"n": 2}, {"stream": True}):
        status, _, _ = bounded.post("/v1/completions", BODY | {"prompt": SECRET} | options, **KEY)
        assert status == 200
    assert bounded.post("/v1/completions", BODY | {"prompt": SECRET, "n": 4}, **KEY)[0] == 429
    assert bounded.post("/v1/completions", {"prompt": SECRET, SECRET: 1}, **KEY)[0] == 400
    time.sleep(0.2)  # the last answer is counted after its last byte
    return before, samples(bounded)


def test_every_request_is_counted_once(asked):
    before, after = asked

    def grown(name, **labels):
        return read(after, name, **labels) - read(before, name, **labels)

    assert grown("exegpt_requests_total", outcome="answered", **{"class": "usual"}) == 3
    assert grown("exegpt_requests_total", outcome="rejected", **{"class": "none"}) == 1
    assert grown("exegpt_requests_total", outcome="invalid", **{"class": "none"}) == 1
    assert grown("exegpt_rejections_total", reason="concurrency_limit") == 1
    assert grown("exegpt_tokens_total", kind="output") == 4 * 12
    assert grown("exegpt_tokens_total", kind="prompt") == 3 * 16
    assert sum(value for (name, _), value in after.items() if name == "exegpt_bound_misses_total") == 0
    for name in ("request_latency", "time_to_first_token", "time_per_output_token", "queue_wait"):
        labels = {"class": "usual"} if name == "request_latency" else {}
        assert read(after, f"exegpt_{name}_seconds_count", **labels) == (4 if name == "time_per_output_token" else 3)
        assert read(after, f"exegpt_{name}_seconds_sum", **labels) > 0
    assert read(after, "vllm:e2e_request_latency_seconds_count", model_name="tiny") == 3


def test_the_bound_is_an_edge_and_gauges_return_to_zero(asked):
    _, after = asked
    assert read(after, "exegpt_request_latency_seconds_bucket", le=str(BOUND_S), **{"class": "usual"}) == 3
    assert read(after, "exegpt_wait_prediction_error_seconds_bucket", le="+Inf") == 3
    assert read(after, "exegpt_end_prediction_error_seconds_bucket", le="+Inf") == 3
    assert read(after, "exegpt_end_prediction_error_seconds_bucket", le="10.0") == 3
    assert read(after, "exegpt_end_prediction_error_seconds_bucket", le="-10.0") == 0
    for name in ("queue_requests", "running_requests", "kv_usage_ratio"):
        assert read(after, f"exegpt_{name}") == 0
    assert read(after, "exegpt_batch_size", phase="decode", kind="target") == 8
    assert 1 <= read(after, "exegpt_batch_size", phase="decode", kind="actual") <= 2
    assert read(after, "exegpt_phase_seconds_count", phase="decode") > 0


def test_the_schedule_is_shown_with_what_it_gives(bounded, asked):
    until = time.monotonic() + 20
    while not (shown := json.loads(bounded.get("/schedule", **KEY)[2]))["predicted"]["steady_state"]:
        assert time.monotonic() < until  # it is computed beside the first requests
        time.sleep(0.1)
    assert shown["schedule"]["latency_bound_s"] == BOUND_S and shown["schedule"]["policy"] == "orca"
    assert shown["predicted"]["steady_state"]["throughput_tok_s"] > 0
    observed = shown["observed"]
    assert observed["within_bound"] == 1.0 and observed["rejected"] == 1 and observed["scale_of_predictions"] > 0
    assert 0 < observed["latency_s"]["p50"] <= observed["latency_s"]["p99"] < BOUND_S


def test_the_status_has_the_same_figures(bounded, asked):
    shown = json.loads(bounded.get("/status", **KEY)[2])
    assert (shown["state"], shown["model"], shown["restarts"]) == ("ready", "tiny", 0)
    assert [r[-1] for r in shown["series"]["requests"]].count(True) == 1
    assert sum(tokens for _, tokens in shown["series"]["tokens"]) == 48
    (measured,), (predicted,) = shown["timeline"]["measured"], shown["timeline"]["predicted"]
    assert measured["device"] == predicted["device"] == 0
    assert measured["spans"][0][1] == predicted["spans"][0][1] == 0
    assert {span[0] for span in measured["spans"]} >= {"decode"}
    assert all(duration > 0 for _, _, duration, _ in measured["spans"])


def test_the_page_needs_no_key_and_its_data_does(bounded):
    status, headers, text = bounded.get("/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "script-src 'sha256-" in headers["content-security-policy"]
    assert not re.findall(rb"(?:src|href)=\"(?!data:)", text)
    for path in ("/status", "/metrics", "/schedule"):
        assert bounded.get(path)[0] == 401


def test_logs_are_json_lines_without_text(bounded, asked):
    written = bounded.log.read_text()
    assert "Xylophone" not in written and "quartz" not in written
    events = [json.loads(line) for line in written.splitlines()]
    assert "ready" in {event["event"] for event in events}
    requests = [event for event in events if event["event"] == "request"]
    assert [r["outcome"] for r in requests].count("answered") == 3
    assert {r.get("code") for r in requests} == {None, "concurrency_limit", "unsupported_parameter"}
    assert all("time" in event and "message" in event for event in events)


def test_the_start_of_an_output_that_a_stop_text_ends_is_known(bounded, asked):
    (letter,) = json.loads(bounded.post("/tokenize", {"prompt": "a"}, **KEY)[2])["tokens"]
    body = {"prompt": SECRET, "logit_bias": {str(letter): 100}, "stop": "aaa", "max_tokens": 60}
    before = read(samples(bounded), "exegpt_queue_wait_seconds_count")
    answer = json.loads(bounded.post("/v1/completions", body, **KEY)[2])
    assert answer["choices"][0]["finish_reason"] == "stop"
    time.sleep(0.2)
    assert read(samples(bounded), "exegpt_queue_wait_seconds_count") == before + 1


def test_a_browser_draws_the_page(server):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    assert server.post("/v1/completions", BODY | {"prompt": "drawn"})[0] == 200
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    drawn = subprocess.run(
        [*command, "--virtual-time-budget=3000", server.url + "/"], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in drawn.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints
    assert ">ready</span>" in drawn.stdout and "<circle" in drawn.stdout and "decode, " in drawn.stdout
