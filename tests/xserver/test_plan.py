"""Several models in one server: each request reaches the model that it names, whatever becomes of the others."""

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.stored_profile import store_profile
from tests.xcore.small_specs import changed
from tests.xserver.conftest import schedule_for, started
from tests.xserver.http.test_completions import expected
from tests.xserver.test_faults import LONG, prompts, until_accepted
from xcore import document
from xcore.document import to_dict
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.estimate import Estimate
from xrunner.models.create import create_model

NAMES = ["tiny", "wide", "deep"]
"""The first has a device of its own, the others share one."""
BOUND_S = 30.0
BLOCKS = 12
"""Of each model that shares: its longest request has 7."""
ESTIMATE = Estimate(1.0, 16.0, *[None] * 7)


@pytest.fixture(scope="module")
def directories(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    sizes = {"heads": 2, "kv_heads": 2, "vocab": 290, "context": 160}
    create_model(folder / "wide", "qwen2", layers=1, hidden=64, ffn=96, seed=1, **sizes)
    create_model(folder / "deep", "opt", layers=4, hidden=32, ffn=48, seed=2, **sizes)
    for name in NAMES[1:]:
        store_profile(folder / name)
    return {"tiny": model, "wide": folder / "wide", "deep": folder / "deep"}


@pytest.fixture(scope="module")
def plan(directories):
    """Of three models on two devices; the directory of the first has to be given."""
    models = []
    for name, directory in directories.items():
        schedule = replace(schedule_for(directory), latency_bound_s=BOUND_S, admission="grow")
        alone = name == "tiny"
        schedule = schedule if alone else replace(schedule, kv_blocks=BLOCKS)
        share = None if alone else Share("time", pool="merged")
        models.append(
            PlannedModel(name, (0,) if alone else (1,), schedule, ESTIMATE, share=share, directory=str(directory))
        )
    cluster = replace(models[0].schedule.cluster, devices_per_node=2)
    models[0] = replace(models[0], directory=None)
    return Plan(Plan.VERSION, "exegpt", cluster, tuple(models))


@pytest.fixture(scope="module")
def several(plan, directories, tmp_path_factory):
    """A server of the plan's models."""
    folder = tmp_path_factory.mktemp("planned")
    document.write(folder / "plan.json", plan)
    (folder / "token").write_text("secret\n")
    options = ["--plan", str(folder / "plan.json"), "--model", f"tiny={directories['tiny']}", "--pinned"]
    options += ["--admin-token-file", str(folder / "token"), "--log-requests", "--journal", str(folder / "journal")]
    with started(options, folder, engines=3) as server:
        yield server


def ask(server, model, prompt, **options):
    status, _, data = server.post("/v1/completions", LONG | {"model": model, "prompt": prompt} | options)
    return status, json.loads(data)


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def test_models_preempt_in_the_memory_that_they_share(several, directories, want):
    """Under many long requests to both at once."""
    before = counted(several)
    with ThreadPoolExecutor(12) as pool:
        asked = [(name, i, pool.submit(ask, several, name, prompts(6)[i])) for i in range(6) for name in NAMES[1:]]
    for name, i, answer in asked:
        status, given = answer.result()
        assert status == 200 and tokens(given) == want[name][i] == expected(directories[name], prompts(6)[i], 100)
    after = counted(several)
    series = [f'exegpt_preemptions_total{{model_name="{name}"}}' for name in NAMES[1:]]
    assert sum(float(after[name]) - float(before[name]) for name in series) > 0


@pytest.mark.parametrize("busy, other", [("wide", "deep"), ("deep", "wide")])
def test_a_busy_model_does_not_starve_the_other(several, busy, other):
    """However many of its requests wait for blocks of the memory: the other's come before those that arrive later."""
    answered, enough = [], threading.Event()

    def keep_busy(number):
        while not enough.is_set() and len(answered) < 200:
            answered.append(ask(several, busy, prompts(6)[number])[0])

    with ThreadPoolExecutor(6) as pool:
        working = [pool.submit(keep_busy, number) for number in range(6)]
        while not answered:
            time.sleep(0.01)
        assert ask(several, other, prompts(6)[0])[0] == 200
        before = len(answered)
        enough.set()
    assert all(work.exception() is None for work in working)
    assert set(answered) == {200} and before <= 20


@pytest.fixture(scope="module")
def want(several):
    """The tokens of an undisturbed server, by model."""
    return {name: [tokens(ask(several, name, prompt)[1]) for prompt in prompts(6)] for name in NAMES}


def test_mixed_requests_get_the_greedy_tokens_of_their_models(several, directories):
    work = [(name, prompt) for prompt in ([5, 9, 200, 31], list(range(20))) for name in NAMES]
    with ThreadPoolExecutor(len(work)) as pool:
        answers = list(pool.map(lambda each: ask(several, *each, max_tokens=12), work))
    for (name, prompt), (status, answer) in zip(work, answers, strict=True):
        assert status == 200 and answer["model"] == name
        assert tokens(answer) == expected(directories[name], prompt, 12)


def test_every_path_takes_a_model(several):
    cards = json.loads(several.get("/v1/models")[2])["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("tiny", 128), ("wide", 160), ("deep", 160)]
    assert json.loads(several.get("/v1/models/deep")[2]) == cards[2]
    talk = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    bodies = {
        "/v1/completions": {"prompt": "a", "max_tokens": 2},
        "/v1/chat/completions": talk,
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [65]},
    }
    for path, body in bodies.items():
        for name in NAMES:
            assert several.post(path, body | {"model": name})[0] == 200
        status, _, data = several.post(path, body | {"model": "other"})
        error = json.loads(data)["error"]
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "The model 'other' does not exist: this server has 'tiny', 'wide', 'deep'."
        status, _, data = several.post(path, body)
        error = json.loads(data)["error"]
        assert (status, error["code"], error["param"]) == (400, "invalid_value", "model")
        assert error["message"] == "'model' is missing: this server has 'tiny', 'wide', 'deep'."
    wide = json.loads(several.post("/tokenize", {"prompt": "a", "model": "wide"})[2])
    assert wide["max_model_len"] == 160


def test_a_key_belongs_to_one_models_request(several):
    body = LONG | {"prompt": [3, 4], "max_tokens": 5}

    def asked(name):
        status, _, data = several.post("/v1/completions", body | {"model": name}, Idempotency_Key="one")
        return status, json.loads(data)

    first, again, other = asked("wide"), asked("wide"), asked("deep")
    assert first[0] == again[0] == 200 and tokens(first[1]) == tokens(again[1])
    assert other[0] == 422


def test_models_that_share_keep_their_bounds(several):
    shown = {name: json.loads(several.get(f"/schedule?model={name}")[2]) for name in NAMES}
    assert {shown[name]["schedule"]["latency_bound_s"] for name in NAMES} == {BOUND_S}
    assert not any("shares its devices" in text for name in NAMES for text in shown[name]["assumptions"])
    for name, other in (("wide", "deep"), ("deep", "wide")):
        served = rf"serving {name} on http\S+ under 30 ?s: .*; it shares its devices with {other}\n"
        assert re.search(served, several.log.read_text())
    assert several.get("/schedule")[0] == 400 and several.get("/schedule?model=other")[0] == 404


def test_a_schedule_is_posted_for_a_model(several, directories):
    def follow(path, name):
        schedule = changed(schedule_for(directories[name]), max_num_seqs=5, latency_bound_s=BOUND_S)
        return several.post(path, to_dict(schedule), X_Admin_Token="secret")[0]

    assert follow("/schedule", "tiny") == 400  # for which model?
    assert follow("/schedule?model=other", "tiny") == 404
    assert follow("/schedule?model=deep", "deep") == 400  # shares its devices
    assert follow("/schedule?model=tiny", "wide") == 400
    assert follow("/schedule?model=tiny", "tiny") == 202
    until = time.monotonic() + 20
    while json.loads(several.get("/schedule?model=tiny")[2])["schedule"]["control"]["max_num_seqs"] != 5:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_each_model_has_its_status_and_the_page_links_to_all(several):
    for name in NAMES:
        shown = json.loads(several.get(f"/status?model={name}")[2])
        assert (shown["model"], shown["models"], shown["state"]) == (name, NAMES, "ready")
    assert json.loads(several.get("/status")[2])["model"] == "tiny"
    status, _, page = several.get("/?model=deep")
    assert status == 200 and b'"?model=" + encodeURIComponent(name)' in page


def counted(server):
    """Values by name and labels, each metric described once."""
    text = server.get("/metrics")[2].decode()
    described = re.findall(r"^# (?:HELP|TYPE) (\S+)", text, re.MULTILINE)
    assert len(described) == 2 * len(set(described)) and len(described) > 40
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_one_page_has_the_metrics_of_all_models(several):
    before = counted(several)
    assert all("model_name=" in series for series in before)
    assert ask(several, "wide", [1, 2, 3], max_tokens=7)[0] == 200
    assert ask(several, "other", [1])[0] == 404 and ask(several, None, [1])[0] == 400
    time.sleep(0.2)
    after = counted(several)
    grown = {name: float(after[name]) - float(before.get(name, 0)) for name in after if not name.endswith("_created")}
    requests = {name: n for name, n in grown.items() if name.startswith("exegpt_requests_total") and n}
    assert requests == {
        'exegpt_requests_total{class="usual",model_name="wide",outcome="answered"}': 1.0,
        'exegpt_requests_total{class="none",model_name="",outcome="invalid"}': 2.0,
    }
    assert grown['exegpt_tokens_total{kind="output",model_name="wide"}'] == 7
    assert grown['exegpt_tokens_total{kind="output",model_name="deep"}'] == 0
    assert grown['vllm:e2e_request_latency_seconds_count{model_name="wide"}'] == 1
    bounds = {float(edge) for edge in re.findall(r'latency_seconds_bucket.*le="([\d.]+)".*"tiny"', "\n".join(after))}
    assert BOUND_S in bounds


def statuses_of(operation, checks):
    """Of answers to requests that the description allows; bodies name one of the models."""
    statuses = set()

    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(), st.sampled_from(NAMES))
    def answered(case, name):
        if isinstance(case.body, dict):
            case.body["model"] = name
        statuses.add(case.call_and_validate(checks=checks).status_code)

    answered()
    return statuses


def test_answers_are_as_described(several):
    openapi = pytest.importorskip("tests.xserver.http.test_openapi")
    described = openapi.schemathesis.openapi.from_url(several.url + "/openapi.json")
    assert openapi.operations(described) == {*openapi.OPERATIONS, *openapi.ADMINISTERED, "GET /plan", "POST /plan"}
    for operation in [*openapi.OPERATIONS, "GET /plan"]:
        method, path = operation.split()
        statuses = statuses_of(described[path][method], openapi.CHECKS)
        assert statuses <= {200, 400, 404}
        assert 200 in statuses or path in ("/schedule", "/tokenizer_info", "/v1/models/{name}")  # drawn names


def engines(server):
    """The processes of the server's engines: those with a device of their own, and shared ones."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0") for child in children}
    (alone,) = [child for child, words in commands.items() if b"--plan" not in words]
    (shared,) = [child for child, words in commands.items() if b"--plan" in words]
    return alone, shared


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lost", [["tiny"], ["wide", "deep"]])
def test_an_engine_is_replaced_while_others_go_on(several, want, lost):
    alone, shared = engines(several)
    killed = {"tiny": alone, "wide": shared}[lost[0]]
    others = [name for name in NAMES if name not in lost]
    meanwhile = 0
    with ThreadPoolExecutor(12) as pool:
        asked = [(name, i, pool.submit(ask, several, name, prompts(6)[i])) for name in lost for i in range(6)]
        until_accepted(several, [answer for *_, answer in asked], lost)
        os.kill(killed, signal.SIGKILL)
        while several.get("/ready")[0] == 200:
            time.sleep(0.01)
        assert ask(several, lost[0], [1])[1]["error"]["code"] == "engine_restarting"
        while several.get("/ready")[0] == 503:
            for name in others:
                status, answer = ask(several, name, prompts(6)[meanwhile % 6])
                assert status == 200 and tokens(answer) == want[name][meanwhile % 6]
            meanwhile += 1
        for name, i, answer in asked:
            status, given = answer.result()
            assert status == 200 and tokens(given) == want[name][i]
    assert meanwhile >= 2
    assert killed not in engines(several) and len({alone, shared} & set(engines(several))) == 1
    restarts = {name: counted(several)[f'exegpt_engine_restarts_total{{model_name="{name}"}}'] for name in NAMES}
    assert all(float(restarts[name]) == 1 for name in lost)
    assert f"the engine of {', '.join(lost)} has ended (exit code -9) and is restarted" in several.log.read_text()


def moved(plan, directories, place, directory=None):
    """The same models elsewhere: `place` has their device, and those on the same one share it."""
    alone = {name for name in NAMES if list(place.values()).count(place[name]) == 1}
    share = Share("time", pool="merged")
    models = [
        replace(
            model,
            devices=(place[model.name],),
            share=None if model.name in alone else share,
            schedule=replace(model.schedule, kv_blocks=64 if model.name in alone else BLOCKS),
            directory=directory or str(directories[model.name]),
        )
        for model in plan.models
    ]
    return replace(plan, models=tuple(reversed(models)))


def follow(server, plan, token="secret"):
    return server.post("/plan", to_dict(plan), X_Admin_Token=token)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_models_move_while_they_have_requests(several, plan, directories, want):
    """From a device of its own to one that is shared, and back: nothing is lost, and nobody gets a token twice."""
    first, lost = engines(several), float(counted(several)['exegpt_engine_restarts_total{model_name="tiny"}'])
    with ThreadPoolExecutor(60) as pool:
        for place in ({"tiny": 0, "deep": 0, "wide": 1}, {"tiny": 0, "wide": 1, "deep": 1}):
            every = [(name, i) for _ in range(3) for name in NAMES for i in range(6)]
            asked = [(name, i, pool.submit(ask, several, name, prompts(6)[i])) for name, i in every]
            until_accepted(several, [answer for *_, answer in asked], NAMES)
            assert follow(several, moved(plan, directories, place, "of another machine"))[0] == 202
            while several.get("/ready")[0] == 200:
                time.sleep(0.01)
            while several.get("/ready")[0] == 503:
                time.sleep(0.05)
            for name, i, answer in asked:
                status, given = answer.result()
                assert (status, given.get("error")) == (200, None) and tokens(given) == want[name][i]
    assert not set(first) & set(engines(several))
    assert float(counted(several)['exegpt_engine_restarts_total{model_name="tiny"}']) == lost, "none has failed"
    assert several.log.read_text().count("the plan has changed: ") == 2


def test_the_plan_that_is_followed_is_shown(several, plan, directories):
    """The one that was posted last, with the directories in use; it stays, as it is pinned."""
    posted = moved(plan, directories, {"tiny": 0, "wide": 1, "deep": 1})
    assert follow(several, posted)[0] == 202
    until = time.monotonic() + 60
    while (shown := json.loads(several.get("/plan")[2]))["plan"] != to_dict(posted):
        assert time.monotonic() < until
        time.sleep(0.05)
    while several.get("/ready")[0] == 503:
        time.sleep(0.05)
    assert (shown["watched_seq_s"], shown["last"]) == (None, None)
    assert shown["replans"] == {"followed": 0, "kept": 0, "failed": 0}


def test_an_engine_that_another_plan_does_not_change_goes_on(several, plan, directories):
    before = engines(several)
    place = {"tiny": 0, "wide": 1, "deep": 1}
    changed = moved(plan, directories, place)
    changed = replace(changed, models=(*changed.models[:2], replace(changed.models[2], attainment=0.5)))
    assert follow(several, changed)[0] == 202
    time.sleep(0.5)
    assert several.get("/ready")[0] == 200 and engines(several) == before


def test_what_is_no_plan_for_this_server_is_refused(several, plan, directories):
    good = moved(plan, directories, {"tiny": 0, "wide": 1, "deep": 1})
    other = replace(good, models=tuple(replace(m, directory=str(directories["tiny"])) for m in good.models))
    first, *rest = good.models
    for_another = replace(first, schedule=replace(first.schedule, model=rest[0].schedule.model))
    refused = {
        "must have the models of this server": replace(good, models=tuple(rest)),
        "is for 2 nodes": replace(good, cluster=replace(good.cluster, nodes=2)),
        "of the plan is": replace(good, models=(for_another, *rest)),
    }
    assert follow(several, good, "wrong")[0] == 401
    assert follow(several, other)[0] == 202, "directories are the server's own"
    time.sleep(0.3)
    assert several.get("/ready")[0] == 200
    for words, wrong in refused.items():
        status, _, body = follow(several, wrong)
        assert status == 400 and words in json.loads(body)["error"]["message"]
    assert several.post("/plan", {"models": 3}, X_Admin_Token="secret")[0] == 400


@pytest.mark.slow  # five engines in a row
@pytest.mark.timeout(240)
def test_a_plan_whose_engine_finds_no_memory_is_left_for_the_one_before(several, plan, directories, want):
    """With the requests that had been accepted."""
    place = {"tiny": 0, "wide": 1, "deep": 1}
    follow(several, moved(plan, directories, place))
    while several.get("/ready")[0] == 503:
        time.sleep(0.05)
    changed = moved(plan, directories, place)
    models = [
        replace(model, schedule=replace(model.schedule, kv_blocks=10**9)) if model.name == "tiny" else model
        for model in changed.models
    ]
    with ThreadPoolExecutor(60) as pool:
        asked = [(name, i, pool.submit(ask, several, name, prompts(6)[i])) for name in NAMES for i in range(6)]
        until_accepted(several, [answer for *_, answer in asked], NAMES)
        assert follow(several, replace(changed, models=tuple(models)))[0] == 202
        while not (shown := json.loads(several.get("/plan")[2]))["last"]:
            time.sleep(0.1)
        for name, i, answer in asked:
            status, given = answer.result()
            assert status == 200 and tokens(given) == want[name][i]
    while several.get("/ready")[0] == 503:
        time.sleep(0.05)
    assert shown["plan"] == to_dict(changed) and shown["replans"]["failed"] == 1
    assert shown["last"] == "the server returns to the earlier plan and keeps it: the engine of tiny can't be started"


def test_sigterm_ends_the_server_when_all_models_requests_are_answered(several, want):
    """Last in this file: the server ends."""
    with ThreadPoolExecutor(18) as pool:
        asked = [(name, i, pool.submit(ask, several, name, prompts(6)[i])) for name in NAMES for i in range(6)]
        until_accepted(several, [answer for *_, answer in asked], NAMES)
        several.process.send_signal(signal.SIGTERM)
        while (refused := ask(several, "deep", [1], max_tokens=1))[0] == 200:
            pass  # the signal hasn't arrived
        assert refused[1]["error"]["code"] == "draining"
        for name, i, answer in asked:
            status, given = answer.result()
            assert status == 200 and tokens(given) == want[name][i]
    assert several.process.wait(20) == 0
