"""Any rank killed at any moment: the job ends and names it, and finished requests are not run again."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.xrunner.cells import WAA, disaggregated, requests, schedule
from xcore import document
from xcore.specs.model import ModelSpec
from xrunner.core.engine import Engine
from xrunner.models import load_model

LENGTHS = [(5 + 7 * i % 40, 10 + 11 * i % 35) for i in range(120)]


@pytest.fixture(scope="module")
def expected(directories):
    """The tokens of one rank alone."""
    model = load_model(directories["llama"])
    results = Engine(model, schedule(model.spec, "orca", kv_blocks=200, max_num_seqs=24)).run(requests(LENGTHS)).results
    return {r.id: list(r.output_ids) for r in results}


def arguments(directory, tmp_path, policy):
    spec = ModelSpec.from_directory(directory)
    kv = {"kv_blocks": 30}
    plan = schedule(spec, "rra", (1, 1), **kv) if policy == "rra" else disaggregated(spec, (1,), (1,), **(WAA | kv))
    document.write(tmp_path / "schedule.json", plan)
    lines = [
        {"id": r.id, "prompt_ids": list(r.prompt_ids), "max_tokens": r.max_tokens, "ignore_eos": True}
        for r in requests(LENGTHS)
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["--schedule", tmp_path / "schedule.json", "--requests", tmp_path / "requests.jsonl"]
    return [
        "-m",
        "exegpt",
        "run",
        "--model",
        directory,
        *files,
        "--profile",
        "roofline",
        "--out",
        tmp_path / "out.jsonl",
    ]


def process_of(rank, parent, deadline_s=60):
    """The process of a rank of a job that `parent` started, as soon as there is one."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                names = dict(v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v)
                mine = int(re.search(r"PPid:\s+(\d+)", (folder / "status").read_text())[1]) == parent
            except (OSError, UnicodeDecodeError, TypeError):
                continue  # it has ended, or is another's
            if mine and names.get("OMPI_COMM_WORLD_RANK") == str(rank):
                return int(folder.name)
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} has not come up in {deadline_s} s")


def wait_for_results(path, process, deadline_s=90):
    until = time.monotonic() + deadline_s
    while time.monotonic() < until and process.poll() is None:
        if path.is_file() and path.read_bytes().count(b"\n") >= 3:
            return
        time.sleep(0.005)
    raise AssertionError(f"no results: {process.stderr.read() if process.poll() is not None else 'still running'}")


def kill(process, rank):
    """Kill a rank; returns how the job ended and how long that took."""
    os.kill(process_of(rank, process.pid), signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    return process.returncode, err, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "rank"),
    [
        ("rra", 1),
        pytest.param("waa", 0, marks=pytest.mark.slow),
        pytest.param("rra", 0, marks=pytest.mark.slow),
        pytest.param("waa", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_the_job_which_can_be_resumed(start, job, directories, expected, tmp_path, policy, rank):
    command = arguments(directories["llama"], tmp_path, policy)
    process = start(2, *command)
    partial = tmp_path / "out.jsonl.partial"
    wait_for_results(partial, process)
    code, err, seconds = kill(process, rank)
    assert code != 0 and seconds < 10
    assert re.search(rf"rank {rank} with PID .* signal 9", re.sub(r"\s+", " ", err)), err
    complete = partial.read_bytes().rpartition(b"\n")[0].splitlines()
    finished = {r["id"]: r["output_ids"] for r in map(json.loads, complete)}
    assert 3 <= len(finished) < len(expected)
    done = job(2, *command, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"resumed: {len(finished)} of {len(expected)}" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [r["id"] for r in lines[: len(finished)]] == list(finished)
    assert {r["id"]: r["output_ids"] for r in lines} == expected and len(lines) == len(expected)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_killed_while_the_job_starts(start, directories, tmp_path, rank):
    process = start(2, *arguments(directories["llama"], tmp_path, "rra"))
    code, _, seconds = kill(process, rank)
    assert code != 0 and seconds < 10 and not (tmp_path / "out.jsonl").exists()
