"""`serve --plan` of models that take turns on one device keeps both bounds under overload."""

import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.stored_profile import store_profile
from tests.xserver.conftest import schedule_for, started
from xcore import document
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.estimate import Estimate
from xcore.specs.workload import Workload
from xrunner.models.create import create_model

ESTIMATE = Estimate(1.0, 16.0, *[None] * 7)
SIZES = {"quick": {"wide": (1, 64), "deep": (4, 32)}, "long": {"wide": (4, 256), "deep": (6, 192)}}
"""Layers and width of each model."""
LENGTHS = {"wide": (24, 200), "deep": (60, 150)}
"""Input and output tokens of each model's requests."""


def plan_file(folder, kind, bounds_s, stored):
    """Write a plan of two models with these bounds on one CPU device, with a stored profile or a measured one."""
    models = []
    for name, (layers, width) in SIZES[kind].items():
        sizes = {"heads": 2, "kv_heads": 2, "ffn": 2 * width, "vocab": 300, "context": 256}
        create_model(folder / name, "llama", layers=layers, hidden=width, seed=layers, **sizes)
        if stored:
            store_profile(folder / name)
        schedule = schedule_for(folder / name, max_num_seqs=64, prefills_per_step=8)
        workload, bound_s = Workload.fixed(*LENGTHS[name]), bounds_s[name]
        schedule = replace(schedule, kv_blocks=400, workload=workload, latency_bound_s=bound_s)
        at = {"share": Share("time", pool="merged"), "directory": str(folder / name), "rate_seq_s": 1.0}
        models.append(PlannedModel(name, (0,), schedule, ESTIMATE, **at))
    path = folder / "plan.json"
    document.write(path, Plan(Plan.VERSION, "exegpt", models[0].schedule.cluster, tuple(models)))
    return path


def load(server, seconds, rate):
    """Send requests to both models at a rate; each model's (status, latency in seconds, retry-after)."""
    answers, sending, draw = {name: [] for name in LENGTHS}, [], np.random.default_rng(0)

    def ask(name):
        inputs, outputs = LENGTHS[name]
        prompt = draw.integers(3, 290, inputs).tolist()
        body = {"model": name, "prompt": prompt, "max_tokens": outputs, "ignore_eos": True}
        begin_s = time.monotonic()
        status, headers, _ = server.post("/v1/completions", body)
        answers[name].append((status, time.monotonic() - begin_s, headers.get("retry-after")))

    begin_s = time.monotonic()
    for arrival_s in np.cumsum(draw.exponential(1 / (2 * rate), round(2 * rate * seconds))):
        time.sleep(max(0.0, begin_s + arrival_s - time.monotonic()))
        sending.append(threading.Thread(target=ask, args=(("wide", "deep")[len(sending) % 2],)))
        sending[-1].start()
    for thread in sending:
        thread.join()
    return answers


def missed(server):
    """Accepted requests that were answered too late, by the server's own clock."""
    text = server.get("/metrics")[2].decode()
    return sum(float(value) for value in re.findall(r"^exegpt_bound_misses_total\S+ (\S+)", text, re.MULTILINE))


def check(server, seconds, rate):
    """Send more than the devices can answer; both models answer what they accept in time, and refuse the rest."""
    answers = load(server, seconds, rate)
    accepted = {name: [each for each in of if each[0] == 200] for name, of in answers.items()}
    assert {status for of in answers.values() for status, *_ in of} == {200, 429}
    assert all(int(after) >= 1 for of in answers.values() for status, _, after in of if status == 429)
    assert all(len(of) >= 5 for of in accepted.values()), "none is starved"
    assert missed(server) <= 0.01 * sum(map(len, accepted.values()))
    return answers


@pytest.mark.slow  # how much is an overload depends on the machine
def test_both_models_keep_their_bounds_under_overload(tmp_path):
    plan = plan_file(tmp_path, "quick", {"wide": 3.0, "deep": 4.0}, stored=True)
    with started(["--plan", str(plan), "--pinned"], tmp_path) as server:
        for name in LENGTHS:
            shown = json.loads(server.get(f"/schedule?model={name}")[2])["schedule"]
            assert shown["latency_bound_s"] == {"wide": 3.0, "deep": 4.0}[name]
        load(server, 1.0, 5.0)  # the first requests measure the machine's present speed
        check(server, 2.5, 100.0)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_measured_models_keep_their_bounds_for_long(tmp_path):
    """At more than twice the rate that is answered in time, and with profiles that the engine measures first."""
    plan = plan_file(tmp_path, "long", {"wide": 4.0, "deep": 6.0}, stored=False)
    with started(["--plan", str(plan), "--pinned"], tmp_path, engines=2) as server:
        load(server, 5.0, 2.0)
        answers = check(server, 20.0, 30.0)
        accepted = [each for of in answers.values() for each in of if each[0] == 200]
        assert len(accepted) < sum(map(len, answers.values())) / 2


def test_a_bound_that_cannot_be_kept_ends_the_start_with_a_sentence(tmp_path):
    plan = plan_file(tmp_path, "quick", {"wide": 2.0, "deep": 0.001}, stored=True)
    command = [sys.executable, "-m", "exegpt", "serve", "--plan", str(plan), "--threads", "1", "--port", "8999"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3
    assert "Model 'deep' can't keep its latency bound of 1 ms: on this machine a request with 30 output" in ended.stderr
    assert "Traceback" not in ended.stderr
