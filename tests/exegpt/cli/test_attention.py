"""`--attention`: passed to every engine and profile, refused where unavailable, and printed."""

import json

import pytest
import torch

from tests.xprofiler.small import shrink
from xprofiler import measure
from xrunner.core.engine import Engine
from xrunner.models import attention_planning

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
    ("value", "refusal"), [("flashinfer", "FlashInfer runs only on GPUs. Pass --attention triton"), ("cuda", "'cuda'")]
)
def test_unavailable_attention_is_refused_in_one_sentence(exegpt, commands, command, value, refusal):
    done = exegpt(command, *commands[command], "--device", "cpu", "--attention", value)
    assert done.code == 2 and not done.out and refusal in done.err and "Traceback" not in done.err


@pytest.fixture
def flashinfer(monkeypatch, tmp_path):
    """FlashInfer is chosen by `auto`, and computed by the CPU: what engines and measurements were asked for."""
    monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path / "cache"))
    shrink(monkeypatch.setattr)
    calls = {"engine": set(), "profile": set()}

    def choose(attention, *arguments):
        return ("flashinfer", ("attention: flashinfer 0.7",)) if attention == "auto" else ("triton", ())

    def load(*arguments, attention, **options):
        calls["engine"].add(attention)
        return real_load(*arguments, **options)

    def measured(*arguments, attention, **options):
        calls["profile"].add(attention)
        return real_measure(*arguments, **options)

    real_load, real_measure = Engine.load, measure.measure_job
    monkeypatch.setattr(attention_planning, "choose_attention", choose)
    monkeypatch.setattr(attention_planning, "described", lambda attention, device: f"{attention} 0.7")
    monkeypatch.setattr(Engine, "load", staticmethod(load))
    for module in ("xprofiler.measure", "xprofiler.job"):
        monkeypatch.setattr(f"{module}.measure_job", measured)
    return calls


AUTO = ("--attention", "auto")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("run", ()),
        ("run", AUTO),
        ("bench", AUTO),
        ("profile", AUTO),
        *(pytest.param(command, (), marks=pytest.mark.slow) for command in ("bench", "profile")),
    ],
)
def test_the_choice_reaches_engines_and_profiles_and_is_printed(exegpt, commands, flashinfer, command, option):
    done = exegpt(command, *commands[command], "--device", "cpu", *option, "--json")
    assert done.code == 0, done.err
    chosen = "flashinfer" if option else "triton"
    assert flashinfer["engine"] == (set() if command == "profile" else {chosen})
    assert flashinfer["profile"] == (set() if command == "bench" else {chosen})
    notes = done.err if command == "profile" else " ".join(done.json["assumptions"])
    assert ("attention: flashinfer 0.7" in notes) == bool(option)
    if command != "profile":
        assert done.json["provenance"]["attention"] == f"{chosen} 0.7"


def test_a_run_on_a_cpu_prints_what_auto_chose(exegpt, commands):
    done = exegpt("run", *commands["run"], "--no-profile", "--device", "cpu", "--attention", "auto", "--json")
    assert done.code == 0, done.err
    assert "attention: the CPU's, since FlashInfer runs only on GPUs" in done.json["assumptions"]
    assert done.json["provenance"]["attention"] is None
