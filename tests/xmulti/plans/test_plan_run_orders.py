"""`run` and `serve --plan --order learned`: shared engines, and engines under a bound, follow each model's ranker."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exegpt.api.ranking.training import Recipe, train_ranker
from tests.exegpt.cli.conftest import run_command
from tests.stored_profile import store_profile
from tests.xserver.conftest import schedule_for, started
from tests.xserver.http.test_completions import expected
from xcore import document
from xcore.errors import InputError
from xcore.orders.features import Features
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.request_times import summarise
from xcore.specs.workload import LengthDistribution
from xcore.tokenizer import load_tokenizer
from xmulti.serving.ranked_order import ranked_order
from xrunner.core.results import read_results
from xrunner.models.create import create_model

WORDS = {"list": 5, "essay": 40}
SHARES = {"time": Share("time", pool="merged"), "priority": Share("priority", pool="merged"), "alone": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models with rankers that expect short outputs for `list` and long ones for `essay`, on different scales."""
    folder = tmp_path_factory.mktemp("orders")
    sizes = {"heads": 2, "kv_heads": 2, "context": 160}
    create_model(folder / "tiny", "llama", layers=2, hidden=32, ffn=64, vocab=300, seed=0, **sizes)
    create_model(folder / "deep", "opt", layers=4, hidden=32, ffn=48, vocab=300, seed=2, **sizes)
    prompts = [f"{'list' if i % 2 else 'essay'} {i % 17}" for i in range(200)]
    lengths = np.array([WORDS[prompt.split()[0]] for prompt in prompts])
    trained = train_ranker(Features.of(prompts), lengths, Recipe(width=4, hidden=8, epochs=8))
    trained.save(folder / "old.npz")
    for name, scale in (("tiny", 1), ("deep", 1000)):
        ranker = replace(trained, last=scale * trained.last, last_bias=scale * trained.last_bias)
        reference = ranker.scores(prompts[:40]).astype(np.float32)
        replace(ranker, reference=reference).save(folder / f"{name}.npz")
    return folder


def plan_file(folder, tmp_path, share, bound_s=None):
    """Write a plan with one running sequence for each model; models alone have a bound of 300 s."""
    models = []
    for place, name in enumerate(("tiny", "deep")):
        schedule = schedule_for(folder / name, max_num_seqs=1, prefills_per_step=1)
        outputs = LengthDistribution.from_samples(list(WORDS.values()))
        workload = replace(schedule.workload, output=outputs, requests=None)
        kept_s = bound_s if share else 300.0
        schedule = replace(schedule, admission="grow", kv_blocks=24, workload=workload, latency_bound_s=kept_s)
        device = 0 if share else place
        at = summarise((), 0.0)
        models.append(PlannedModel(name, (device,), schedule, at, share=share, directory=str(folder / name)))
    cluster = replace(models[0].schedule.cluster, devices_per_node=2)
    document.write(tmp_path / "plan.json", Plan(Plan.VERSION, "exegpt", cluster, tuple(models)))
    return tmp_path / "plan.json"


def rows():
    """Return requests, long before short ones; the first one of each model keeps it busy until all have arrived."""
    requests = []
    for word in ("first", *("essay",) * 3, *("list",) * 3):
        for model in ("tiny", "deep"):
            length = WORDS.get(word, 100)
            name = f"{word}-{model}-{len(requests)}"
            ids = {"id": name, "model": model, "max_tokens": length, "ignore_eos": True}
            requests.append({**ids, "prompt": f"{'essay' if word == 'first' else word} {len(requests) // 2}"})
    return requests


def run(folder, plan, tmp_path, *options):
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    out = tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    rankers = [word for name in ("tiny", "deep") for word in ("--ranker", f"{name}={folder / name}.npz")]
    order = ["--order", "learned", *rankers] if options == ("learned",) else ["--order", *options]
    done = run_command("run", "--plan", plan, "-r", file, "-o", out, "--threads", 1, "--json", *order)
    assert done.code == 0, done.err
    assert all(model["predicted"]["requests"] == 7 for model in done.json["models"])
    results = read_results(out)
    assert sorted(r.id for r in results) == sorted(row["id"] for row in rows()), "nothing is lost"
    return [r.id.split("-")[:2] for r in results], {r.id: list(r.output_ids) for r in results}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", SHARES)
def test_short_requests_of_both_models_come_first_with_the_same_tokens(folder, tmp_path, share):
    plan = plan_file(folder, tmp_path, SHARES[share])
    by_arrival, tokens = run(folder, plan, tmp_path, "fcfs")
    by_score, again = run(folder, plan, tmp_path, "learned")
    assert tokens == again
    want = {}
    for row in rows():
        tokenizer = load_tokenizer(folder / row["model"])
        want[row["id"]] = expected(folder / row["model"], tokenizer.encode(row["prompt"]).ids, row["max_tokens"])
    assert tokens == want
    for model in ("tiny", "deep"):
        words = [word for word, of in by_arrival if of == model]
        assert words == ["first", *["essay"] * 3, *["list"] * 3]
        words = [word for word, of in by_score if of == model]
        assert [w for w in words if w != "first"] == [*["list"] * 3, *["essay"] * 3]


@pytest.mark.parametrize(
    ("share", "bound_s"),
    [
        ("time", 300.0),
        pytest.param("priority", 300.0, marks=pytest.mark.slow),
        *(pytest.param(share, None, marks=pytest.mark.slow) for share in SHARES),
    ],
)
@pytest.mark.timeout(300)
def test_a_server_of_a_plan_answers_short_requests_of_both_models_first(folder, tmp_path, share, bound_s):
    """Also under a bound that leaves time for it, and over both models if they share a device."""
    plan = plan_file(folder, tmp_path, SHARES[share], bound_s)
    for name in ("tiny", "deep"):
        store_profile(folder / name)
    options = ["--plan", str(plan), "--pinned", "--order", "learned"]
    options += [word for name in ("tiny", "deep") for word in ("--ranker", f"{name}={folder / name}.npz")]
    ended = []
    with started(options, tmp_path) as server, ThreadPoolExecutor(14) as pool:

        def complete(row):
            status, _, _ = server.post("/v1/completions", {key: row[key] for key in row if key != "id"})
            ended.append(row["id"].split("-")[:2])
            return status

        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        asked = [pool.submit(complete, row) for row in rows()[:2]]
        time.sleep(0.05)
        for engine in children:  # until all have come, however slow the machine is
            os.kill(int(engine), signal.SIGSTOP)
        asked += [pool.submit(complete, row) for row in rows()[2:]]
        time.sleep(1.5)
        for engine in children:
            os.kill(int(engine), signal.SIGCONT)
        assert {answer.result() for answer in asked} == {200}
        log = server.log.read_text()
    promised = SHARES[share] is None or (share == "time" and bound_s is not None)
    assert ("promises no latency bound" in log) is not promised
    assert ("only models that take turns on shared devices keep their bounds" in log) is (
        not promised and bool(bound_s)
    )
    for model in ("tiny", "deep"):
        words = [word for word, of in ended if of == model and word != "first"]
        assert words[-2:] == ["essay"] * 2 and words.index("essay") >= 2, ended


def test_a_score_of_another_scale_stands_for_the_same_length(folder, tmp_path):
    plan = document.read(Plan, plan_file(folder, tmp_path, SHARES["time"]))
    files = {name: folder / f"{name}.npz" for name in ("tiny", "deep")}
    order = ranked_order("learned", files, {model.name: str(model.directory) for model in plan.models})
    for word, tokens in WORDS.items():
        for model in plan.models:
            (score,) = order.rankers[model.name].scores([f"{word} 3"])
            assert order.order.of(model).length(float(score)) == tokens


REFUSED = {
    "no ranker": (["learned"], "--order learned needs a ranker for each model, but 'tiny' has none"),
    "one ranker": (["learned", "tiny=tiny.npz"], "but 'deep' has none: pass --ranker deep=FILE"),
    "another model": (["learned", "huge=tiny.npz"], "--ranker huge=… names no model of the plan: it has tiny, deep"),
    "no model": (["learned", "tiny.npz"], "with --plan, pass --ranker NAME=FILE"),
    "two of one": (["learned", "tiny=a.npz", "tiny=b.npz"], "leave one of them out"),
    "no file": (["learned", "tiny=no.npz", "deep=deep.npz"], "There is no ranker file 'no.npz'"),
    "no scale": (["learned", "tiny=old.npz", "deep=deep.npz"], "has no scores with which those of model 'tiny' could"),
    "without the order": (["fcfs", "tiny=tiny.npz"], "--ranker tiny=tiny.npz is only for --order learned"),
    "an oracle": (["sjf"], "--order sjf does not order the requests of a plan here: use one of fcfs, learned"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_orders_and_rankers_that_are_refused(folder, tmp_path, monkeypatch, case):
    plan = plan_file(folder, tmp_path, SHARES["time"])
    monkeypatch.chdir(folder)
    (order, *rankers), words = REFUSED[case]
    (tmp_path / "r.jsonl").write_text(json.dumps(rows()[0]) + "\n")
    options = [word for ranker in rankers for word in ("--ranker", ranker)]
    done = run_command("run", "--plan", plan, "-r", tmp_path / "r.jsonl", "--order", order, *options)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err, done.err


def test_calls_of_an_application_have_no_order(folder, tmp_path):
    plan = plan_file(folder, tmp_path, SHARES["time"])
    (tmp_path / "app.yaml").write_text("nodes: [{name: tiny, workload: 3/3, requests: 1}]")
    done = run_command("run", "--plan", plan, "--application", tmp_path / "app.yaml", "--order", "fcfs")
    assert done.code == 2 and "--order orders requests, not the calls of an application" in done.err


def test_a_model_without_a_tokenizer_is_named(folder, tmp_path):
    files = dict.fromkeys(("tiny", "mute"), folder / "tiny.npz")
    with pytest.raises(InputError, match="Model 'mute': --order learned reads prompts as text, but the model has no"):
        ranked_order("learned", files, {"tiny": folder / "tiny", "mute": tmp_path})
