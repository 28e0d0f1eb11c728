"""`exegpt run` under mpirun: one file of results, and what it says where ranks or files don't fit."""

import json
import re

import pytest

from exegpt import document
from exegpt.cli import main
from exegpt.model import ModelSpec
from exegpt.models import load_model
from xrunner.engine import Engine

from .cells import requests, schedule


@pytest.fixture(scope="module")
def llama(directories):
    return directories["llama"]


@pytest.fixture(scope="module")
def want(llama):
    """The tokens of one rank alone."""
    model = load_model(llama)
    return {r.id: list(r.output_ids) for r in Engine(model, schedule(model.spec)).run(requests()).results}


@pytest.fixture
def asked(llama, tmp_path):
    """The arguments of a run, by the policy and layout of its schedule; files lie in the test's folder."""

    def write(policy="rra", degrees=(1, 1), **variables):
        plan = schedule(ModelSpec.from_directory(llama), policy, degrees, **variables)
        document.write(tmp_path / "schedule.json", plan)
        lines = [{"id": r.id, "prompt_ids": list(r.prompt_ids), "max_tokens": r.max_tokens} for r in requests()]
        text = "".join(json.dumps(line | {"ignore_eos": True}) + "\n" for line in lines)
        (tmp_path / "requests.jsonl").write_text(text)
        files = ["--schedule", tmp_path / "schedule.json", "--requests", tmp_path / "requests.jsonl"]
        return ["run", "--model", llama, *files, "--profile", "roofline", "--out", tmp_path / "out.jsonl"]

    return write


def sentence(text):
    """The one sentence that the command says."""
    (found,) = [line for line in text.splitlines() if line.startswith("exegpt: ")]
    assert "Traceback" not in text
    return re.sub(r"\s+", " ", found)


def outputs(path):
    return {r["id"]: r["output_ids"] for r in map(json.loads, path.read_text().splitlines())}


def test_two_ranks_write_one_file_and_report_what_was_predicted(job, asked, want, tmp_path):
    done = job(2, "-m", "exegpt", *asked(), "--json")
    assert done.returncode == 0, done.stderr
    assert outputs(tmp_path / "out.jsonl") == want
    assert not (tmp_path / "out.jsonl.partial").exists()
    found = json.loads(done.stdout)
    assert found["requests"] == len(want) and found["throughput_tok_s"] > 0 and found["predicted"]["latency_s"] > 0
    assert len(found["utilisation"]) == 2 and all(0 < share <= 1 for share in found["utilisation"])


def test_a_schedule_of_several_devices_says_how_to_start_it(asked, capsys, tmp_path):
    assert main([str(a) for a in asked("orca", (2, 1))]) == 2
    said = capsys.readouterr().err
    assert "for 3 devices" in sentence(said) and "mpirun -n 3 exegpt run" in sentence(said)
    assert not list(tmp_path.glob("out*"))
