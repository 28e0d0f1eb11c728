"""A run without a profile measures a few points first; the same inputs give the same schedule."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.xprofiler.small import shrink
from xprofiler import machine, store


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder of the test's own, and few points."""
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_BUSY", float("inf"))  # however busy this machine is
    shrink(monkeypatch.setattr)
    return tmp_path / "cache" / "profiles"


@pytest.fixture
def requests(tmp_path):
    def write(count, tokens):
        rows = [{"id": f"r{i}", "prompt_ids": [i % 200, 5, 7], "max_tokens": tokens} for i in range(count)]
        path = tmp_path / "requests.jsonl"
        path.write_text("".join(json.dumps(row | {"ignore_eos": True}) + "\n" for row in rows))
        return path

    return write


def test_line_4_a_run_without_a_profile_measures_a_few_points_once(exegpt, tiny, requests, cache):
    command = ["run", "--model", tiny, "--requests", requests(12, 6), "--policy", "orca", "--json"]
    first, second = (exegpt(*command).json for _ in range(2))
    assert first["schedule"] == second["schedule"]
    assert any("measured on this machine at a few points" in text for text in first["assumptions"])
    assert len(list(cache.glob("*.json"))) == 1  # the second run took what the first had measured


def test_a_run_on_a_busy_machine_uses_what_it_measured_and_keeps_nothing(exegpt, tiny, requests, cache, monkeypatch):
    monkeypatch.setattr(store, "_BUSY", -1.0)
    run = exegpt("run", "--model", tiny, "--requests", requests(12, 6), "--json").json
    (profile,) = [text for text in run["assumptions"] if text.startswith("profile:")]
    assert "measured on this machine" in profile and "used for this run only" in profile
    assert not list(cache.glob("llama*.json"))


def test_line_4_no_profile_takes_the_roofline_which_is_the_same_each_time(exegpt, tiny, requests, cache, monkeypatch):
    real = machine.measured
    monkeypatch.setattr(machine, "measured", lambda *given: _noisy(real(*given)))
    command = ["run", "--model", tiny, "--requests", requests(12, 6), "--json", "--no-profile"]
    first, second = (exegpt(*command).json for _ in range(2))
    assert first["schedule"] == second["schedule"] and first["predicted_steady"] == second["predicted_steady"]
    (assumption,) = [text for text in first["assumptions"] if text.startswith("profile: roofline")]
    assert "no profile" not in assumption and "promise" in assumption
    done = exegpt(*command, "--profile", "p.json")
    assert done.code == 2 and "leave one of them out" in done.err


@pytest.mark.slow
def test_no_profile_takes_what_is_stored_and_measures_nothing(exegpt, tiny, requests, cache):
    command = ["run", "--model", tiny, "--requests", requests(12, 6), "--json"]
    measured = exegpt(*command).json["provenance"]["profile"]
    assert measured["source"] == "measured"
    assert exegpt(*command, "--no-profile").json["provenance"]["profile"] == measured


def test_a_run_without_a_feasible_schedule_has_the_reason_in_its_document(exegpt, tiny, requests, cache):
    command = ["run", "--model", tiny, "--requests", requests(12, 6), "--no-profile", "--latency-bound", "0.001ms"]
    done = exegpt(*command, "--json")
    assert done.code == 3 and "lowest reachable latency" in done.err
    document = json.loads(done.out)
    assert document["schedule"] is None and document["lowest_latency_s"] > 1e-6
    assert document["assumptions"] and document["provenance"]["profile"]["source"] == "roofline"
    done = exegpt(*command)
    assert done.code == 3 and done.out == ""


def test_adjust_is_refused_or_noted_where_it_changes_nothing(exegpt, tiny, requests, cache, tmp_path):
    tune = ["tune", "--latency-bound", "inf", "--model", tiny, "--workload", "6/6", "--policy", "orca"]
    assert exegpt(*tune, "--out", tmp_path / "s.json").code == 0
    command = ["run", "--model", tiny, "--requests", requests(12, 6), "--no-profile", "--adjust", "0.1"]
    done = exegpt(*command, "--schedule", tmp_path / "s.json")
    assert (
        done.code == 2
        and "--adjust 0.1 needs one of the policies rra, waa-c, waa-m, but the schedule has orca" in done.err
    )
    assert "--adjust 0.1 has no effect under orca" in exegpt(*command, "--policy", "orca").err
    assert "--adjust" not in exegpt(*command, "--policy", "rra").err


def test_no_output_replaces_what_is_read_or_another_output(exegpt, tiny, requests, cache, tmp_path):
    source = requests(12, 6)
    before = source.read_bytes()
    command = ["run", "--model", tiny, "--requests", source, "--no-profile"]
    same, link = tmp_path / "same", tmp_path / "link"
    link.symlink_to(source)
    for outputs in (["--out", source], ["--report", source], ["--out", link], ["--out", same, "--report", same]):
        done = exegpt(*command, *outputs)
        assert done.code == 2 and "would be overwritten: choose another" in done.err
    assert source.read_bytes() == before and not same.exists()


def test_bench_refuses_a_number_beside_requests(exegpt, tiny, requests, cache, tmp_path):
    tune = ["tune", "--latency-bound", "inf", "--model", tiny, "--workload", "6/6", "--policy", "orca"]
    assert exegpt(*tune, "--out", tmp_path / "s.json").code == 0
    command = ["bench", "--model", tiny, "--schedule", tmp_path / "s.json", "--repeats", "1"]
    done = exegpt(*command, "--requests", requests(12, 6), "--num", "3")
    assert done.code == 2 and "leave --num 3 or --requests out" in done.err
    done = exegpt(*command, "--requests", requests(12, 6), "--report", tmp_path / "s.json")
    assert done.code == 2 and "would be overwritten" in done.err
    assert exegpt(*command, "--num", "3", "--json").json["policies"][0]["requests"] == 3


def test_a_run_is_another_where_other_requests_are_skipped(exegpt, tiny, cache, tmp_path, monkeypatch):
    """An interrupted run's error for a request that is no longer asked for isn't among the resumed one's results."""
    from exegpt.api import offline_run

    taken = []
    real = offline_run.run_fingerprint
    monkeypatch.setattr(offline_run, "run_fingerprint", lambda *given: taken.append(real(*given)) or taken[-1])
    good = {"id": "a", "prompt_ids": [1], "max_tokens": 2}
    for bad in ("b", "c", "b"):
        lines = (good, good | {"id": bad, "max_tokens": 0})
        (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = ["run", "--model", tiny, "--requests", tmp_path / "r.jsonl", "--profile", "roofline"]
        assert exegpt(*command, "--skip-invalid").code == 0
    assert taken[0] == taken[2] != taken[1]


def _noisy(cluster):
    rates = {dtype: rate * random.uniform(0.5, 2) for dtype, rate in cluster.device.flops_s.items()}
    return replace(cluster, device=replace(cluster.device, flops_s=rates))


@pytest.mark.slow
def test_line_18_a_terminated_run_leaves_what_is_done_and_goes_on(exegpt, tiny, tiny_profile, requests, tmp_path):
    command = ["run", "--model", tiny, "--requests", requests(400, 60), "--profile", tiny_profile, "--policy", "orca"]
    command += ["--max-num-seqs", "2", "--out", tmp_path / "out.jsonl"]
    process = subprocess.Popen(
        [sys.executable, "-m", "exegpt", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    partial = tmp_path / "out.jsonl.partial"
    until = time.monotonic() + 90
    while not (partial.exists() and partial.stat().st_size) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 143, stderr
    assert stderr.splitlines()[-1] == "exegpt: Terminated." and "Traceback" not in stderr
    before = partial.read_text().splitlines()
    assert before and not (tmp_path / "out.jsonl").exists()
    done = exegpt(*command, "--resume")
    assert done.code == 0, done.err
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len({result["id"] for result in results}) == 400 and f"resumed: {len(before)} of 400" in done.err
