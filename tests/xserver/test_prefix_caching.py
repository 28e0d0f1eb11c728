"""Prompts that begin alike: the usage says how many of their tokens came from the cache, and nothing else changes."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest

from tests.exegpt.cli.conftest import run_command
from tests.xserver.conftest import schedule_for, serving
from tests.xserver.http.test_completions import events
from tests.xserver.test_faults import engine_of
from xcore import document
from xcore.specs.schedule import Schedule

PROMPT = list(range(40, 100))


def caching_schedule(model, directory, **changes):
    path = directory / "schedule.json"
    document.write(path, replace(schedule_for(model), prefix_caching=True, latency_bound_s=60.0, **changes))
    return path


@pytest.fixture(scope="module", params=["grow", pytest.param("reserve", marks=pytest.mark.slow)])
def caching(request, model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("caching")
    with serving(model, caching_schedule(model, directory, admission=request.param), directory) as server:
        yield server


def asked(server, path="/v1/completions", key="", **body):
    status, _, data = server.post(
        path,
        {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "ignore_eos": True} | body,
        **({"Authorization": f"Bearer {key}"} if key else {}),
    )
    assert status == 200, data
    return data


def cached(server, **body):
    return json.loads(asked(server, **body))["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_usage_counts_cached_tokens_and_tokens_stay_the_same(caching, server):
    first, second = (json.loads(asked(caching, n=2, return_token_ids=True)) for _ in range(2))
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached == [0, 48]  # the last of four blocks isn't full
    plain = json.loads(asked(server, n=2, return_token_ids=True))
    assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert [c["token_ids"] for c in first["choices"]] == [c["token_ids"] for c in second["choices"]]
    assert [c["token_ids"] for c in first["choices"]] == [c["token_ids"] for c in plain["choices"]]


def test_a_streams_usage_counts_them_too(caching):
    asked(caching)
    last = events(asked(caching, stream=True, stream_options={"include_usage": True}))[-1]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}


def test_only_requests_with_the_same_salt_share_prefixes(caching):
    prompt = list(range(100, 160))
    assert [cached(caching, prompt=prompt, cache_salt=salt) for salt in ("a", "a", "b", None)] == [0, 48, 0, 0]
    assert [cached(caching, prompt=prompt, cache_salt=salt) for salt in ("b", None, None)] == [48, 48, 48]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "found"), [("epwq", 0), ("prewarm", 48)])
def test_prefixes_of_expected_calls_are_kept(model, tmp_path, policy, found):
    """While an agent searches, which takes ten seconds, other prompts need all blocks but those that are kept."""
    calls = [
        {"application": "agent", "run": run, "unit": unit, "parent": parent, **sizes}
        for run in range(20)
        for unit, parent, sizes in (
            ("think", None, {"input_tokens": 60, "output_tokens": 4}),
            ("search", "think", {"seconds": 10.0 * (run % 2)}),
            ("answer", "search", {"input_tokens": 60, "output_tokens": 4}),
        )
    ]
    (tmp_path / "calls.jsonl").write_text("\n".join(map(json.dumps, calls)))
    assert run_command("graphs", "learn", tmp_path / "calls.jsonl", "--out", tmp_path / "graphs.json").code == 0
    options = ["--warm-prefixes", policy]
    options += ["--graphs", str(tmp_path / "graphs.json"), "--knob", "0.3"] if policy == "prewarm" else []
    schedule = caching_schedule(model, tmp_path, kv_blocks=14)
    document.write(schedule, replace(document.read(Schedule, schedule), latency_bound_s=None))
    with serving(model, schedule, tmp_path, *options) as server:
        run = {"application": "agent", "run": "1"}
        assert cached(server, metadata={**run, "unit": "think"}) == 0
        for start in range(100, 220, 20):
            asked(server, prompt=list(range(start, start + 60)))
        assert cached(server, metadata={**run, "unit": "answer"}) == found


CHAT = {"messages": [{"role": "user", "content": "x" * 60}], "max_tokens": 4, "temperature": 0}
RESPONSE = {"input": "y" * 60, "max_output_tokens": 4, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body", "details"),
    [("/v1/chat/completions", CHAT, "prompt_tokens_details"), ("/v1/responses", RESPONSE, "input_tokens_details")],
)
def test_conversations_have_salts_too(model, tmp_path, path, body, details):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with serving(model, caching_schedule(model, tmp_path), tmp_path, "--chat-template", str(template)) as server:

        def found(salt):
            status, _, data = server.post(path, body | {"cache_salt": salt})
            assert status == 200, data
            return json.loads(data)["usage"][details]["cached_tokens"]

        none, some, other, again = (found(salt) for salt in (None, None, "a", "a"))
        assert none == other == 0 < some == again
        for salt in ("", "x" * 1025, 5):
            status, _, data = server.post(path, body | {"cache_salt": salt})
            assert status == 400 and json.loads(data)["error"]["param"] == "cache_salt"


def test_keys_share_no_prefixes_where_they_are_separated(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    options = ("--api-key-file", str(keys), "--separate-keys")
    with serving(model, caching_schedule(model, tmp_path), tmp_path, *options) as server:
        first, second = (json.loads(asked(server, key=key, return_token_ids=True)) for key in ("one", "two"))
        assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
        assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)] == [0, 0]
        assert [cached(server, key=key, cache_salt=salt) for key in ("one", "two") for salt in (None, "a", "a")] == [
            *(48, 0, 48),
            *(48, 0, 48),
        ]
        assert cached(server, key="one", cache_salt="x" * 1024) == 0


def read_metrics(server):
    lines = (line.rsplit(" ", 1) for line in server.get("/metrics")[2].decode().splitlines() if line[:1] != "#")
    return {name: float(value) for name, value in lines}


def test_metrics_count_the_tokens_of_prompts_and_those_that_were_cached(caching, server):
    names = [f"{prefix}_{name}_total" for prefix in ("exegpt_prefix_cache",) for name in ("queries", "hits")]
    theirs = [f'vllm:prefix_cache_{name}_total{{model_name="tiny"}}' for name in ("queries", "hits")]
    before = read_metrics(caching)
    for n in (1, 2):  # each of the three sequences looks its prompt up
        asked(caching, prompt=list(range(200, 260)), n=n)
    time.sleep(0.2)  # the last answer is counted after its last byte
    after = read_metrics(caching)
    for name in (names, theirs):
        assert [after[each] - before[each] for each in name] == [180, 96]
    assert 0 < json.loads(caching.get("/status")[2])["minute"]["prefix_hit_rate"] < 1
    assert json.loads(server.get("/status")[2])["minute"]["prefix_hit_rate"] is None
    asked(server)
    time.sleep(0.2)
    assert [read_metrics(server)[each] for each in (*names, *theirs)] == [0, 0, 0, 0]  # nothing is looked up


def test_a_restarted_engine_begins_with_an_empty_cache_and_tokens_stay_the_same(caching):
    """The last of its server's tests."""
    prompt = list(range(120, 180))
    before = json.loads(asked(caching, prompt=prompt, return_token_ids=True))["choices"][0]["token_ids"]
    assert cached(caching, prompt=prompt) == 48
    first = engine_of(caching)
    os.kill(first, signal.SIGKILL)
    until = time.monotonic() + 60
    for status in (503, 200):
        while caching.get("/ready")[0] != status:
            assert time.monotonic() < until, f"/ready is never {status}"
            time.sleep(0.02)
    again = [json.loads(asked(caching, prompt=prompt, return_token_ids=True)) for _ in range(2)]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again] == [0, 48]
    assert [answer["choices"][0]["token_ids"] for answer in again] == [before, before]
