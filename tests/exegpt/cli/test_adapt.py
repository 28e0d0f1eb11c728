"""`exegpt run` where lengths drift, and where batches are picked for theirs."""

import json

import pytest

from tests.xrunner.at_once import at_once
from xrunner.core import adaptation, drift


@pytest.fixture
def drifting(tmp_path):
    """Requests that begin as the schedule expects none of them to."""
    rows = [{"id": str(i), "prompt_ids": [1 + i % 7] * (2 + i % 3), "max_tokens": 1 + i % 2} for i in range(20)]
    rows += [{"id": str(i), "prompt_ids": [1 + i % 7] * (60 + i % 9), "max_tokens": 20 + i % 9} for i in range(20, 60)]
    for row in rows:
        row["ignore_eos"] = True
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "r.jsonl"


def outputs(path):
    rows = map(json.loads, path.read_text().splitlines())
    return {row["id"]: row["output_ids"] for row in rows}


def test_the_schedule_changes_with_the_lengths(exegpt, tiny, tiny_profile, drifting, tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "WINDOW", 16)
    monkeypatch.setattr(adaptation, "beside", at_once)
    path = tmp_path / "s.json"
    tune = ("tune", "-l", "inf", "-m", tiny, "--cluster", "local", "-w", "3/2", "--policy", "rra", "--out", path)
    assert exegpt(*tune, "-p", tiny_profile).code == 0
    schedule = json.loads(path.read_text()) | {"kv_blocks": 400}  # unbounded, it would take all
    schedule["control"]["encode_batch"] = 4
    path.write_text(json.dumps(schedule))
    run = ("run", "-m", tiny, "-r", drifting, "-s", path, "-p", tiny_profile)
    assert exegpt(*run, "--out", tmp_path / "plain.jsonl").code == 0
    done = exegpt(*run, "--out", tmp_path / "adapted.jsonl", "--adapt", "--json")
    assert done.code == 0, done.err
    changes = done.json["changes"]
    assert "searching for another schedule" in done.err and "found: rra encode_batch=" in done.err
    assert changes and not any(change["moved"] for change in changes)
    assert changes[0]["schedule"]["workload"]["output"] != schedule["workload"]["output"]
    assert changes[0]["schedule"]["stages"] == schedule["stages"]
    assert outputs(tmp_path / "adapted.jsonl") == outputs(tmp_path / "plain.jsonl")
    assert len(outputs(tmp_path / "plain.jsonl")) == 60


def test_batches_are_picked_for_their_lengths(exegpt, tiny, tiny_schedule, tiny_profile, drifting, tmp_path):
    run = ("run", "-m", tiny, "-r", drifting, "-s", tiny_schedule, "-p", tiny_profile, "--out")
    assert exegpt(*run, tmp_path / "plain.jsonl").code == 0
    done = exegpt(*run, tmp_path / "picked.jsonl", "--adjust", "0.1", "--json")
    assert done.code == 0, done.err
    assert done.json["changes"] == []
    assert outputs(tmp_path / "picked.jsonl") == outputs(tmp_path / "plain.jsonl")
