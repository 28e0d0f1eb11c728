"""`--attention`: passed to every engine and profile, refused where it can't be had, and told."""

import json

import pytest
import torch

from exegpt.models import planning
from tests.xprofiler.small import shrink
from xprofiler import measure
from xrunner.core.engine import Engine

GPU = torch.device("cuda", 0)


@pytest.fixture
def requests(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt_ids": [5, 9, 7], "max_tokens": 4}) + "\n" for i in "ab"))
    return path


@pytest.fixture
def commands(tiny, tiny_schedule, requests, tmp_path):
    """A call of each command that loads an engine."""
    return {
        "run": ("--model", tiny, "--requests", requests),
        "bench": ("--model", tiny, "--schedule", tiny_schedule, "--num", 2, "--repeats", 1),
        "demo": ("--dir", tmp_path / "demo", "--num", 2),
        "profile": ("--model", tiny),
    }


@pytest.mark.parametrize("command", ["run", "bench", "demo", "profile"])
@pytest.mark.parametrize(
    ("asked", "refusal"), [("flashinfer", "FlashInfer runs on GPUs alone. Pass --attention triton"), ("cuda", "'cuda'")]
)
def test_what_can_not_be_had_is_refused_in_one_sentence(exegpt, commands, command, asked, refusal):
    done = exegpt(command, *commands[command], "--device", "cpu", "--attention", asked)
    assert done.code == 2 and not done.out and refusal in done.err and "Traceback" not in done.err


@pytest.fixture
def flashinfer(monkeypatch, tmp_path):
    """FlashInfer is chosen by `auto`, and computed by the CPU: what engines and measurements were asked for."""
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path / "cache"))
    shrink(monkeypatch.setattr)
    asked = {"engine": set(), "profile": set()}

    def choose(attention, *arguments):
        return ("flashinfer", ("attention: flashinfer 0.7",)) if attention == "auto" else ("triton", ())

    def load(*arguments, attention, **options):
        asked["engine"].add(attention)
        return real_load(*arguments, **options)

    def measured(*arguments, attention, **options):
        asked["profile"].add(attention)
        return real_measure(*arguments, **options)

    real_load, real_measure = Engine.load, measure.measure_job
    monkeypatch.setattr(planning, "choose_attention", choose)
    monkeypatch.setattr(planning, "described", lambda attention, device: f"{attention} 0.7")
    monkeypatch.setattr(Engine, "load", staticmethod(load))
    for module in ("xprofiler.measure", "xprofiler.job"):
        monkeypatch.setattr(f"{module}.measure_job", measured)
    return asked


@pytest.mark.parametrize("asked", [(), ("--attention", "auto")])
@pytest.mark.parametrize("command", ["run", "bench", "profile"])
def test_the_choice_reaches_engines_and_profiles_and_is_told(exegpt, commands, flashinfer, command, asked):
    done = exegpt(command, *commands[command], "--device", "cpu", *asked, "--json")
    assert done.code == 0, done.err
    chosen = "flashinfer" if asked else "triton"
    assert flashinfer["engine"] == (set() if command == "profile" else {chosen})
    assert flashinfer["profile"] == (set() if command == "bench" else {chosen})
    told = done.err if command == "profile" else " ".join(done.json["assumptions"])
    assert ("attention: flashinfer 0.7" in told) == bool(asked)
    if command != "profile":
        assert done.json["provenance"]["attention"] == f"{chosen} 0.7"


def test_a_run_on_a_cpu_says_what_auto_came_to_be(exegpt, commands):
    done = exegpt("run", *commands["run"], "--no-profile", "--device", "cpu", "--attention", "auto", "--json")
    assert done.code == 0, done.err
    assert "attention: the CPU's, since FlashInfer runs on GPUs alone" in done.json["assumptions"]
    assert done.json["provenance"]["attention"] is None
