"""Schedules that change while requests run: nothing is lost, and tokens stay what they were."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.xcore.small_specs import changed
from tests.xserver.conftest import schedule_for, serving
from tests.xserver.test_faults import ask, check_all, engine_of, prompts, under_load
from xcore.document import to_dict


@pytest.fixture(scope="module")
def want(server):
    return [ask(server, prompt)[1]["choices"][0]["token_ids"] for prompt in prompts(12)]


def enforced(server):
    return json.loads(server.get("/schedule")[2])["schedule"]


def follow(server, schedule, **headers):
    return server.post("/schedule", to_dict(schedule), **headers)[0]


def wait_until(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def follow_alone(server, schedule):
    """Let a server's next engine follow a schedule, and the one before end."""
    assert follow(server, schedule, X_Admin_Token="secret") == 202
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    wait_until(lambda: enforced(server) == to_dict(schedule) and len(children.read_text().split()) == 1)


def test_without_a_token_nothing_can_be_administered(server, administered, model):
    assert follow(server, schedule_for(model), X_Admin_Token="secret") == 405  # there is a GET alone
    assert follow(administered, schedule_for(model)) == 401
    assert follow(administered, schedule_for(model), X_Admin_Token="wrong") == 401
    assert administered.post("/drain", {}, X_Admin_Token="wrong")[0] == 401


def test_a_schedule_for_other_devices_is_refused(administered, model):
    two = replace(schedule_for(model), replicas=2)
    assert follow(administered, two, X_Admin_Token="secret") == 400
    assert administered.post("/schedule", {"policy": "orca"}, X_Admin_Token="secret")[0] == 400
    other_keys = replace(schedule_for(model), kv_dtype="bf16")
    assert follow(administered, other_keys, X_Admin_Token="secret") == 400
    no_prefixes = replace(schedule_for(model, "static", encode_batch=2), prefix_caching=True)  # which it can't cache
    assert follow(administered, no_prefixes, X_Admin_Token="secret") == 400
    none_at_all = to_dict(schedule_for(model))
    none_at_all["control"]["micro_batches"] = -1  # no request would ever be computed
    assert administered.post("/schedule", none_at_all, X_Admin_Token="secret")[0] == 400


def test_a_schedule_takes_over_in_place_under_load(administered, model, want):
    new = changed(schedule_for(model), max_num_seqs=3)
    check_all(under_load(administered, lambda: follow(administered, new, X_Admin_Token="secret")), want)
    assert enforced(administered)["control"]["max_num_seqs"] == 3
    assert b"exegpt_reschedules_total 1.0" in administered.get("/metrics")[2]
    assert b'exegpt_batch_size{kind="target",phase="decode"} 3.0' in administered.get("/metrics")[2]


@pytest.mark.parametrize(
    "policy", [("rra", {"encode_batch": 2, "decode_batch": 6, "decode_iterations": 4}), ("static", {"encode_batch": 4})]
)
def test_another_policy_goes_on_with_what_runs(administered, model, want, policy):
    name, variables = policy
    new = replace(schedule_for(model, name, **variables), kv_blocks=80)
    check_all(under_load(administered, lambda: follow(administered, new, X_Admin_Token="secret")), want)
    wait_until(lambda: enforced(administered)["policy"] == name)
    check_all([ask(administered, prompt) for prompt in prompts(3)], want[:3])
    assert administered.log.read_text().count("serving tiny") >= 2


@pytest.mark.parametrize("cache", [{"admission": "reserve"}, {"prefix_caching": True}])
def test_another_admission_or_prefix_caching_makes_another_engine(administered, model, want, cache):
    """A cache that is there already can't take them over."""
    assert follow(administered, schedule_for(model), X_Admin_Token="secret") == 202
    wait_until(lambda: enforced(administered) == to_dict(schedule_for(model)))
    loaded = administered.log.read_text().count("serving tiny")
    assert follow(administered, replace(schedule_for(model), **cache), X_Admin_Token="secret") == 202
    wait_until(lambda: administered.log.read_text().count("serving tiny") > loaded)
    assert {name: enforced(administered)[name] for name in cache} == cache
    check_all([ask(administered, prompt) for prompt in prompts(3)], want[:3])


def test_what_was_accepted_under_a_larger_cache_goes_on_in_the_next_engine(administered, model, want):
    """Which follows the schedule that has taken over: in its blocks alone, none of these has room."""
    follow_alone(administered, schedule_for(model))
    first = engine_of(administered)

    def lose():
        small = replace(schedule_for(model), kv_blocks=2)
        assert follow(administered, small, X_Admin_Token="secret") == 202
        wait_until(lambda: enforced(administered)["kv_blocks"] == 2)
        os.kill(first, signal.SIGKILL)

    check_all(under_load(administered, lose), want)
    assert engine_of(administered) != first


def test_a_schedule_that_finds_no_memory_leaves_the_one_that_had_taken_over(administered, model, want):
    """It is tried once, with all that runs, and no request is lost."""
    follow_alone(administered, schedule_for(model))
    assert follow(administered, changed(schedule_for(model), max_num_seqs=3), X_Admin_Token="secret") == 202
    wait_until(lambda: enforced(administered)["control"]["max_num_seqs"] == 3)
    kept = "the server keeps its schedule"
    assert kept not in administered.log.read_text()

    def ask_too_much():
        too_large = changed(schedule_for(model), max_num_seqs=5, kv_blocks=10**9)
        assert follow(administered, too_large, X_Admin_Token="secret") == 202
        wait_until(lambda: kept in administered.log.read_text())

    check_all(under_load(administered, ask_too_much), want)
    wait_until(lambda: enforced(administered)["control"]["max_num_seqs"] == 3)
    time.sleep(1.0)
    assert enforced(administered)["control"]["max_num_seqs"] == 3 and enforced(administered)["kv_blocks"] == 64
    assert administered.log.read_text().count(kept) == 1


def test_the_last_of_several_schedules_holds(administered, model):
    """The first two need another engine each, while whose layers are loaded the next one comes."""
    asked = [
        replace(schedule_for(model, "rra", encode_batch=2, decode_batch=4, decode_iterations=3), kv_blocks=72),
        replace(schedule_for(model, "static", encode_batch=3), kv_blocks=88),
        changed(schedule_for(model), max_num_seqs=5, kv_blocks=96),
    ]
    for schedule in asked:
        assert follow(administered, schedule, X_Admin_Token="secret") == 202
    wait_until(lambda: enforced(administered)["kv_blocks"] == 96)
    time.sleep(0.5)
    assert enforced(administered)["policy"] == "orca"


@pytest.mark.slow
def test_outputs_that_stop_texts_end_are_followed(model, schedule, tmp_path):
    """The schedule is for 16 + 16 tokens, and these have 16 + 3."""
    with serving(model, schedule, tmp_path) as server:
        (letter,) = json.loads(server.post("/tokenize", {"prompt": "a"})[2])["tokens"]
        body = {"prompt": [1] * 16, "n": 100, "logit_bias": {str(letter): 100}, "stop": "aaa", "max_tokens": 60}
        for _ in range(3):
            choices = json.loads(server.post("/v1/completions", body)[2])["choices"]
            assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("", "stop")] * 100
        assert ask(server, [1] * 16, max_tokens=2)[0] == 200
        assert b"exegpt_drift_statistic 1.0" in server.get("/metrics")[2]


@pytest.mark.slow  # the search has what the engine leaves of the CPUs
@pytest.mark.timeout(300)
def test_drifted_lengths_change_the_schedule(model, schedule, tmp_path):
    """The schedule is for 16 + 16 tokens; requests of 3 + 90 come."""
    bounded = replace(schedule_for(model), latency_bound_s=20.0)
    path = tmp_path / "bounded.json"
    path.write_text(json.dumps(to_dict(bounded)))
    with serving(model, path, tmp_path) as server:
        statuses, over = [], threading.Event()

        def load(seed):
            number = 0
            while not over.is_set():
                number += 1
                prompt = [(seed + number + i) % 250 for i in range(3)]
                statuses.append(ask(server, prompt, max_tokens=90)[0])

        threads = [threading.Thread(target=load, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: enforced(server)["workload"]["output"]["lengths"][-1] == 90, 240)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert set(statuses) == {200}
        assert "lengths have changed" in server.log.read_text()
