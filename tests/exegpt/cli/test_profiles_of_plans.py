"""`--profile NAME=FILE` of plans, and one file of the commands for one model."""

import json
from dataclasses import replace

import numpy as np
import pytest

import exegpt as library
from tests.exegpt.cli.test_bad_inputs import check_refused
from xcore import document
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.profile import Table
from xprofiler.roofline import roofline_profile

CHAT = {"name": "chat", "model": "llama-3.1-8b", "workload": "512/64", "requests": 100}
CODE = CHAT | {"name": "code"}
CLUSTER = "2xH100-SXM"
FACTS = {"origin": "a table", "engine": "vllm", "kv_dtype": "bf16", "not_in_source": "the engine's own time; sampling"}


def write(folder, *models):
    (folder / "models.yaml").write_text(json.dumps({"models": models}))  # JSON is YAML
    return folder / "models.yaml"


def kernels(path, slower, model="llama-3.1-8b"):
    """A file of imported kernels, `slower` than the data sheet."""
    spec = builtin_model(model)
    sheet = roofline_profile(spec, parse_cluster(CLUSTER), "bf16")

    def times(table: Table) -> Table:
        return replace(table, values=tuple((slower * np.array(table.values)).tolist()))

    degrees = tuple(
        replace(degree, decoder=replace(degree.decoder, rest=times(degree.decoder.rest))) for degree in sheet.degrees
    )
    document.write(path, replace(sheet, source="operators", degrees=degrees, provenance=FACTS))
    return path


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return kernels(tmp_path_factory.mktemp("profiles") / "slow.json", 4.0)


def planned(exegpt, file, *words, method="spatial"):
    return exegpt("plan", file, "-c", CLUSTER, "--method", method, *words)


def seconds(answer):
    return {model["name"]: model["seconds"] for model in answer["plan"]["models"]}


def test_each_model_is_planned_with_its_own_profile(exegpt, tmp_path, slow):
    """Two that are alike but for their profiles are searched apart."""
    file = write(tmp_path, CHAT, CODE)
    done = planned(exegpt, file, "--profile", f"code={slow}", "--json")
    assert done.code == 0, done.err
    times = seconds(done.json)
    assert times["code"] > 1.5 * times["chat"]
    assert f"code: profile: '{slow}'" in done.json["assumptions"]
    assert [text for text in done.json["assumptions"] if text.startswith("chat: profile: roofline")]
    assert set(done.json["profile_imports"]) == {"chat"}
    assert done.json["profile_imports"]["chat"]["options"].startswith("--profile chat=")
    both = planned(exegpt, file, "--profile", f"code={slow},chat={slow}", "--engine", "vllm", "--json")
    times = seconds(both.json)
    assert times["chat"] == pytest.approx(times["code"]) and both.json["profile_imports"] == {}
    assert f"chat: profile: '{slow}', with the time of engine vllm" in both.json["assumptions"]
    again = planned(exegpt, file, "-p", f"code={slow}", "-p", f"chat={slow}", "--engine", "vllm", "--json")
    assert again.json["plan"]["models"] == both.json["plan"]["models"]


def test_the_only_model_needs_no_name_and_a_roofline_is_for_all(exegpt, tmp_path, slow):
    file = write(tmp_path, CHAT)
    alone, named = (planned(exegpt, file, "-p", text, "--json") for text in (slow, f"chat={slow}"))
    assert alone.code == 0 and alone.json["plan"]["models"] == named.json["plan"]["models"]
    done = planned(exegpt, write(tmp_path, CHAT, CODE), "-p", "roofline")
    assert done.code == 0 and "chat: profile: roofline; " in done.err and "code: profile: roofline; " in done.err
    assert "· chat: import: kernels measured on H100-SXM were no better than its data sheet" in done.err


def test_plans_of_stages_take_them_too(exegpt, tmp_path, slow):
    file = write(tmp_path, CHAT)
    quick, late = (
        planned(exegpt, file, *words, "--json", method="samullm")
        for words in (("--engine", "none"), ("--engine", "none", "-p", f"chat={slow}"))
    )
    assert quick.code == late.code == 0, late.err
    assert quick.json["methods"][0]["seconds"] < late.json["methods"][0]["seconds"]
    assert f"chat: profile: '{slow}', with the time of engine none" in late.json["assumptions"]
    assert late.json["profile_imports"] == {}


def test_the_library_takes_files_by_name(tmp_path, slow):
    file = write(tmp_path, CHAT, CODE)
    found = library.plan(file, CLUSTER, method="spatial", profile={"code": str(slow)})
    chat, code = found.plan.models
    assert code.schedule.profile.source == "operators" and chat.schedule.profile.source == "roofline"
    alone = library.plan(write(tmp_path, CHAT), CLUSTER, method="spatial", profile=str(slow))
    assert alone.plan.models[0].schedule.profile.source == "operators"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            ["{slow}"],
            r"--profile .*slow.json names no model, but '.*models.yaml' has chat, code: pass --profile NAME=FILE",
        ),
        (["other={slow}"], r"--profile other=.* names no model of the file, and '.*models.yaml' has chat, code"),
        (
            ["chat={slow}", "chat=b.json"],
            r"--profile is passed twice for model 'chat', as '.*slow.json' and as 'b.json'",
        ),
        (["chat={slow}", "chat={slow}"], r"--profile is passed twice for model 'chat'"),
        (["chat={slow}", "roofline"], r"--profile is passed twice for model 'chat', as '.*' and as 'roofline'"),
        (["chat="], r"--profile chat= names no model"),
        (["={slow}"], r"names no model"),
        (["chat=gone.json"], r"Model 'chat' of '.*': .*no file 'gone.json'"),
        (
            ["code={small}"],
            r"Model 'code' of '.*': The profile '.*small.json' is for another model than 'llama-3.1-8b'",
        ),
    ],
)
@pytest.mark.parametrize("method", ["spatial", "samullm"])
def test_what_names_no_profile_is_refused(exegpt, tmp_path, slow, typed, message, method):
    small = kernels(tmp_path / "small.json", 1.0, "llama-3.2-1b")
    words = [word for text in typed for word in ("--profile", text.format(slow=slow, small=small))]
    message = message.replace("Model '", "(Model|Node) '")
    check_refused(planned(exegpt, write(tmp_path, CHAT, CODE), *words, method=method), message)


def test_a_profile_that_is_read_is_not_replaced(exegpt, tmp_path, slow):
    before = slow.read_text()
    done = planned(exegpt, write(tmp_path, CHAT), "-p", f"chat={slow}", "--out", slow)
    check_refused(done, "is used twice in this command")
    assert slow.read_text() == before


ONE = ("-m", "llama-3.1-8b", "-c", CLUSTER, "-w", "512/64")


@pytest.mark.parametrize("command", ["simulate --max-num-seqs 8", "tune -l inf --policy chunked --no-advice"])
def test_one_model_has_one_file(exegpt, command, slow):
    """With and without an engine's time; a second file is no silent choice."""
    sheet, alone, under = (
        exegpt(*command.split(), *ONE, *words, "--json").json
        for words in ((), ("-p", slow), ("-p", slow, "--engine", "tensorrt-llm"))
    )
    rates = [(answer.get("estimate") or answer)["throughput_tok_s"] for answer in (sheet, alone, under)]
    assert rates[0] > rates[1] > rates[2] and alone["profile_import"] is None
    done = exegpt(*command.split(), *ONE, "-p", slow, "-p", "other.json")
    check_refused(done, "--profile names '.*slow.json' and 'other.json': pass one file")


def test_a_plan_is_simulated_with_profiles_one_by_one_or_between_commas(exegpt, tmp_path, slow):
    plan = tmp_path / "plan.json"
    assert planned(exegpt, write(tmp_path, CHAT, CODE), "-o", plan).code == 0
    answers = [
        exegpt("simulate", "--plan", plan, *words, "--json")
        for words in (("-p", f"chat={slow}", "-p", f"code={slow}"), ("-p", f"chat={slow},code={slow}"), ())
    ]
    assert [done.code for done in answers] == [0, 0, 0], answers[0].err
    late, same, quick = ([model["latency"]["mean"] for model in done.json["models"]] for done in answers)
    assert late == same and min(late) > 1.3 * max(quick)
    check_refused(exegpt("simulate", "--plan", plan, "-p", slow), "names no model, but .* has chat, code")
    twice = exegpt("simulate", "--plan", plan, "-p", f"chat={slow}", "-p", "chat=b.json")
    check_refused(twice, "passed twice for model 'chat'")


def test_a_plan_is_simulated_under_the_engine_that_it_was_made_for(exegpt, tmp_path, slow):
    """Imported kernels have no engine's time: the plan's own is taken, as that of a schedule is."""
    plan = tmp_path / "plan.json"
    words = ("-p", f"chat={slow}", "--engine", "tensorrt-llm")
    assert planned(exegpt, write(tmp_path, CHAT), *words, "-o", plan).code == 0
    made = json.loads(plan.read_text())["models"][0]
    done = exegpt("simulate", "--plan", plan, *words[:2], "--json")
    assert done.code == 0, done.err
    front_end_s = 7e-3  # of the last request; a plan counts until the engine is done
    assert done.json["models"][0]["seconds"] == pytest.approx(made["seconds"] + front_end_s)
    assert any("the time of engine tensorrt-llm, as in the search" in text for text in done.json["assumptions"])
    other = kernels(tmp_path / "other.json", 5.0)
    done = exegpt("simulate", "--plan", plan, "-p", f"chat={other}", "--json")
    assert any("the schedule was found with another profile, operators" in text for text in done.json["assumptions"])


def test_a_schedule_is_simulated_under_the_engine_that_it_was_found_with(exegpt, tmp_path, slow):
    file = tmp_path / "schedule.json"
    tune = ("tune", "-l", "inf", "--policy", "chunked", "--no-advice", *ONE, "-p", slow, "--engine", "tensorrt-llm")
    found = exegpt(*tune, "-o", file, "--json").json["estimate"]
    again, named = (
        exegpt("simulate", "--schedule", file, "-p", slow, *words, "--json").json
        for words in ((), ("--engine", "tensorrt-llm"))
    )
    assert again["throughput_tok_s"] == named["throughput_tok_s"] == pytest.approx(found["throughput_tok_s"])
    assert not [text for text in named["assumptions"] if text.startswith("the schedule was found")]
    other = exegpt("simulate", "--schedule", file, "-p", slow, "--engine", "vllm", "--json").json
    assert other["throughput_tok_s"] != found["throughput_tok_s"]
    assert [
        text for text in other["assumptions"] if text.startswith("profile: the schedule was found with another profile")
    ]
