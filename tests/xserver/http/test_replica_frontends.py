"""A server's dispatcher over replicas: on engines that are made up, and (slow) on a server's two engines."""

import asyncio
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.xserver.conftest import started
from tests.xserver.http.test_completions import expected
from tests.xserver.test_faults import prompts
from tests.xserver.test_plan import directories, plan  # noqa: F401
from xcore import document
from xserver.engines.engine_link import EngineLink
from xserver.http.answering import answer
from xserver.http.api_error import ApiError
from xserver.http.frontend import Frontend
from xserver.http.frontends import Frontends
from xserver.http.journal import Entry, Journal
from xserver.http.served_model import ServedModel
from xserver.telemetry.metrics_page import render


@pytest.fixture
def served(model):
    """Model `a` alone on one engine, and beside `b` on another."""
    made = [Frontend(ServedModel.read(model, name), EngineLink(), "", None, 1.0, 8) for name in "aab"]
    for frontend, unit in zip(made, (made[:1], made[1:], made[1:]), strict=True):
        frontend.unit, frontend.admission = tuple(unit), object()
    return made


def busy(frontend, count):
    frontend.link.outputs = dict.fromkeys(map(str, range(count)))


def test_a_request_goes_to_the_engine_with_the_fewest_of_all_its_models(served):
    first, second, other = served
    frontends = Frontends(served)
    assert frontends.of("a") is first and frontends.of("b") is other
    busy(first, 2)
    assert frontends.of("a") is second
    busy(other, 2)
    assert frontends.of("a") is first
    first.preparing = 1  # its tokens aren't known yet
    assert frontends.of("a") is second
    second.admission = None
    assert frontends.of("a") is first
    first.draining = True
    assert frontends.of("a") is second, "none accepts requests: each says why"
    with pytest.raises(ApiError, match="starting"):
        frontends.of("a").check_ready()


def test_admission_is_asked_of_the_engine_that_was_chosen(served):
    asked, frontends = [], Frontends(served)
    for number, frontend in enumerate(served):
        refuse = ApiError(429, "Too much.", "rate_limit_exceeded")
        frontend.admission = SimpleNamespace(
            refuse_early=lambda *_, n=number, error=refuse: (asked.append((n, served[n].preparing)), _raise(error))
        )
    body = SimpleNamespace(stream=False)
    work = SimpleNamespace(bounds=lambda _: SimpleNamespace(sequences=1, characters=1), body=body)
    http = SimpleNamespace(state=SimpleNamespace(arrival=SimpleNamespace(again=False, at_s=0.0)))
    for _ in range(2):
        chosen = frontends.of("a")
        with pytest.raises(ApiError, match="Too much"):
            asyncio.run(answer(http, lambda: work, chosen))
        busy(served[0], 1)
    assert asked == [(0, 1), (1, 1)] and [frontend.preparing for frontend in served] == [0, 0, 0]
    assert [frontend.arrived for frontend in served] == [1, 1, 0]


def _raise(error):
    raise error


def test_a_journalled_request_stays_with_its_replica(served, tmp_path):
    for frontend in served:
        frontend.journal = Journal(tmp_path, 1.0)
    frontends, entry = Frontends(served), Entry("n", "/v1/completions", "", {"model": "a"}, "id", 0)
    assert frontends.of("a", entry) is served[0]
    busy(served[0], 5)
    assert frontends.of("a", entry) is served[0] and frontends.of("a") is served[1]
    written = {"path": "/v1/completions", "asked": "", "body": {"model": "a", "prompt": "x"}, "ended_s": None}
    (tmp_path / "left.json").write_text(json.dumps(written))
    for frontend in served:
        frontend.journal = Journal(tmp_path, 1.0)
    assert [len(frontends.unfinished(frontend)) for frontend in served] == [1, 0, 0]


def test_pages_tell_replicas_apart(served):
    frontends = Frontends(served)
    families = text_string_to_metric_families(render(frontends.counted, "")[0].decode())
    builds = [s.labels for family in families for s in family.samples if s.name == "exegpt_build_info"]
    labels = [(labels["model_name"], labels.get("replica")) for labels in builds]
    assert labels == [("a", "0"), ("a", "1"), ("b", None)]
    assert [frontends.replica("a", number) for number in (0, 1)] == served[:2] and frontends.replicas(served[1]) == 2
    with pytest.raises(ApiError, match="There is no replica 2 of the model: it has 0 to 1") as raised:
        frontends.replica("a", 2)
    assert raised.value.status == 404 and frontends.names == ["a", "b"]
    served[0].admission = None
    frontends.check_ready()  # the other replica accepts requests
    served[1].admission = None
    with pytest.raises(ApiError):
        frontends.check_ready()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_spreads_requests_over_both_replicas(plan, directories, tmp_path):  # noqa: F811
    """One has a device of its own, the other shares a device."""
    tiny, wide = (replace(model, directory=str(directories[model.name])) for model in plan.models[:2])
    models = (tiny, replace(tiny, devices=wide.devices, share=wide.share), wide)
    document.write(tmp_path / "plan.json", replace(plan, models=models))
    (tmp_path / "token").write_text("secret\n")
    options = ["--plan", str(tmp_path / "plan.json"), "--pinned", "--admin-token-file", str(tmp_path / "token")]
    with started(options, tmp_path, engines=3) as server:
        asked = [("tiny", prompt) for prompt in prompts(6)] * 2 + [("wide", prompt) for prompt in prompts(6)]

        def ask(name, prompt):
            body = {"model": name, "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            return json.loads(server.post("/v1/completions", body | {"return_token_ids": True})[2])

        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda each: ask(*each), asked))
        for (name, prompt), given in zip(asked, answers, strict=True):
            want = expected(directories[name], prompt, 20)  # these end at a stop token
            assert given["choices"][0]["token_ids"][: len(want)] == want
        families = text_string_to_metric_families(server.get("/metrics")[2].decode())
        counts = Counter()
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == "exegpt_requests_total":
                counts[sample.labels["model_name"], sample.labels.get("replica")] += sample.value
        assert counts["tiny", "0"] + counts["tiny", "1"] == 12 and counts["wide", None] == 6
        assert min(counts["tiny", "0"], counts["tiny", "1"]) > 0
        shown = [json.loads(server.get(f"/schedule?model=tiny&replica={number}")[2]) for number in (0, 1)]
        assert [each["replicas"] for each in shown] == [2, 2]
        assert "shares its devices with wide" in str(shown[1]["assumptions"]) not in str(shown[0]["assumptions"])
        assert [card["id"] for card in json.loads(server.get("/v1/models")[2])["data"]] == ["tiny", "wide"]
        assert server.get("/schedule?model=tiny&replica=2")[0] == 404

        larger = replace(tiny, schedule=replace(tiny.schedule, kv_blocks=tiny.schedule.kv_blocks + 8))
        posted = replace(plan, models=(models[1], larger, wide))  # the shared engine stays, in its place
        assert server.post("/plan", document.to_dict(posted), X_Admin_Token="secret")[0] == 202
        until = time.monotonic() + 120
        while blocks(server) != larger.schedule.kv_blocks:
            assert time.monotonic() < until and server.get("/ready")[0] == 200, "the other replica accepts requests"
            time.sleep(0.1)
        for (name, prompt), given in zip(asked, answers, strict=True):
            assert ask(name, prompt)["choices"][0]["token_ids"] == given["choices"][0]["token_ids"]
        fewer = replace(plan, models=(tiny, replace(wide, share=None)))
        status, _, data = server.post("/plan", document.to_dict(fewer), X_Admin_Token="secret")
        assert status == 400 and "as many replicas of each model as this server: 2 of 'tiny'" in data.decode()


def blocks(server):
    """KV blocks of the first replica's schedule; None while it has no engine."""
    status, _, data = server.get("/schedule?model=tiny&replica=0")
    return json.loads(data)["schedule"]["kv_blocks"] if status == 200 else None
