"""The package's functions: what the commands print, as dataclasses."""

import dataclasses
import inspect
import json

import pytest

import exegpt
from exegpt.cli import main
from exegpt.options.plan import PlanOptions
from exegpt.options.simulate import SimulateOptions
from exegpt.options.tune import TuneOptions
from xcore.errors import InputError

WHERE = ("llama-3.1-8b", "1xH100-SXM", "2048/256")
TYPED = ("--model", WHERE[0], "--cluster", WHERE[1], "--workload", WHERE[2], "--json")
FIXED = {"max_num_batched_tokens": 512}
"""So that searches are short."""


def printed(capsys, *words):
    main([*words])
    return json.loads(capsys.readouterr().out)


def test_tune_is_the_command(capsys):
    found = exegpt.tune(*WHERE, latency_bound=5.0, policy="orca,chunked")
    command = printed(capsys, "tune", "--latency-bound", "5s", "--policy", "orca,chunked", "--no-advice", *TYPED)
    data = found.to_dict()
    assert json.loads(json.dumps(data["estimate"])) == command["estimate"]
    assert data["schedule"]["control"]["max_num_seqs"] == command["schedule"]["control"]["max_num_seqs"]
    assert list(found.assumptions) == command["assumptions"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.schedule = None


@pytest.mark.slow
def test_the_best_on_an_engine_is_the_commands(capsys):
    """WAA wins, which vLLM doesn't run."""
    question = ("llama-3.1-70b", "8xH100-SXM", "2048/256")
    bounds = {"ttft": "1s", "tpot": "40ms", "dtype": "fp8"}
    found = exegpt.tune(*question, **bounds, policy="chunked,waa-c")
    words = [word for option, value in zip("mcw", question, strict=True) for word in (f"-{option}", value)]
    words += [word for option, value in bounds.items() for word in (f"--{option}", value)]
    command = printed(capsys, "tune", *words, "--policy", "chunked,waa-c", "--no-advice", "--json")["best_on_engine"]
    best = found.best_on_engine
    assert (best.policy, found.schedule.policy) == ("chunked", "waa-c")
    assert command["engine"] == best.estimate.engine == "vllm"
    assert json.loads(json.dumps(found.to_dict()["best_on_engine"]["estimate"])) == command["estimate"]
    assert exegpt.tune(*question, **bounds, policy="waa-c").best_on_engine is None
    rated = exegpt.tune(*WHERE, "5s", rate=4, policy="chunked", fixed={"max_num_seqs": 32})
    assert rated.best_on_engine.schedule == rated.schedule


def test_a_bound_is_seconds_or_a_text():
    policies = {"policy": "chunked", "fixed": FIXED}
    assert exegpt.tune(*WHERE, "5s", **policies).schedule == exegpt.tune(*WHERE, 5, **policies).schedule
    none = exegpt.tune(*WHERE, 0.001, **policies)
    assert none.schedule is None and none.lowest_latency_s > 0.001


def test_tune_at_a_rate():
    found = exegpt.tune(*WHERE, latency_bound=5.0, rate=4, policy="chunked", fixed=FIXED | {"max_num_seqs": 32})
    assert found.rate_seq_s == 4.0 < found.goodput_seq_s and found.schedule.control.max_num_seqs == 32


def test_simulate_is_the_command(capsys):
    found = exegpt.simulate(*WHERE, max_num_seqs=47, max_num_batched_tokens=397)
    command = printed(capsys, "simulate", "--max-num-seqs", "47", "--max-num-batched-tokens", "397", *TYPED)
    assert found.estimate.throughput_tok_s == command["throughput_tok_s"]
    assert list(found.assumptions) == command["assumptions"]
    rated = exegpt.simulate(*WHERE, max_num_seqs=47, rate="2/s")
    assert rated.estimate is None and rated.facts["requests"] == 20_000
    parsed = exegpt.simulate(*WHERE[:2], exegpt.Workload.parse(WHERE[2]), max_num_seqs=47, rate="2/s")
    assert parsed.facts["latency"] == rated.facts["latency"]


@pytest.mark.parametrize(
    ("function", "record"), [("tune", TuneOptions), ("simulate", SimulateOptions), ("plan", PlanOptions)]
)
def test_defaults_are_the_commands(function, record):
    defaults = {field.name: field.default for field in dataclasses.fields(record)}
    for name, parameter in inspect.signature(getattr(exegpt, function)).parameters.items():
        if name in defaults and parameter.default is not parameter.empty:
            assert parameter.default == defaults[name], name


def test_plan_is_the_command(tmp_path):
    file = tmp_path / "models.yaml"
    file.write_text("models:\n  - {name: a, model: opt-13b, workload: S, rate: 1/s, latency_bound: 20s}\n")
    found = exegpt.plan(file, "1xA100-80GB", method="spatial")
    assert found.plan.models[0].name == "a" and found.to_dict()["plan"]["models"]


def test_a_workload_is_parsed():
    assert exegpt.Workload.parse("2048/256").input.mean == 2048
    with pytest.raises(InputError, match="is not a workload"):
        exegpt.Workload.parse("nothing")


def test_a_plan_has_no_columns_of_its_own(tmp_path):
    with pytest.raises(InputError, match="plan has no argument 'columns'"):
        exegpt.plan(tmp_path / "models.yaml", "1xA40", columns="input=a")


@pytest.mark.parametrize(
    "function", [exegpt.tune, exegpt.simulate, lambda *a, **k: exegpt.plan("m.yaml", "1xA40", **k)]
)
def test_an_unknown_argument_is_named(function):
    with pytest.raises(InputError, match="has no argument 'colour'"):
        function(*WHERE, colour=1)


def test_what_is_offered_is_listed_and_nothing_else_is_made_up():
    assert {"tune", "simulate", "plan", "Workload"} <= set(dir(exegpt))
    with pytest.raises(AttributeError, match="no attribute 'tunes'"):
        exegpt.tunes  # noqa: B018
