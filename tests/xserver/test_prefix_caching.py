"""Prompts that begin alike: the usage says how many of their tokens came from the cache, and nothing else changes."""

import json
from dataclasses import replace

import pytest

from tests.xserver.conftest import schedule_for, serving
from tests.xserver.http.test_completions import events
from xcore import document

PROMPT = list(range(40, 100))


@pytest.fixture(scope="module")
def caching(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("caching")
    document.write(directory / "schedule.json", replace(schedule_for(model), prefix_caching=True))
    with serving(model, directory / "schedule.json", directory) as server:
        yield server


def asked(server, path="/v1/completions", **body):
    status, _, data = server.post(
        path, {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "ignore_eos": True} | body
    )
    assert status == 200, data
    return data


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
