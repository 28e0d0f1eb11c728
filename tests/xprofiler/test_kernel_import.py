"""The import of measured kernels that an answer from a data sheet names, with the errors of both."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from tests.exegpt.cli.conftest import run_command
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.device_spec import LinkSpec
from xcore.specs.engine_spec import find_engine
from xprofiler.aiconfigurator import systems_folder
from xprofiler.kernel_import import INSTALL, kernel_import
from xprofiler.roofline import roofline_profile
from xprofiler.roofline_errors import COMPARED, SOURCES

LLAMA, LARGE = builtin_model("llama-3.1-8b"), builtin_model("llama-3.1-70b")


def found(cluster, engine="vllm", model=LARGE, dtype="bf16", kv_dtype="bf16", **more):
    where = parse_cluster(cluster)
    profile = roofline_profile(model, where, dtype, kv_dtype=kv_dtype, engine=find_engine(engine))
    return kernel_import(profile, model, where, kv_dtype, **more)


def test_what_is_better_is_named_with_both_errors_by_degree():
    kernels = found("8xH200-SXM", dtype="fp8")
    facts = [fact for fact in COMPARED if (fact.engine, fact.device) == ("vllm", "H200-SXM")]
    assert kernels.compared == tuple(facts) and kernels.degrees == (1, 2, 4, 8)
    assert kernels.better_at == tuple(f.tp for f in facts if f.imported_error < f.median_error) == (4, 8)
    assert "were better than its data sheet at TP4, TP8: time per token under engine vllm was off by" in kernels.text
    for fact in facts:
        errors = f"{fact.imported_error:.1%} at TP{fact.tp} (data sheet {fact.median_error:.1%}, {fact.rows} rows)"
        assert errors in kernels.text
    assert f"medians over {SOURCES['vllm']}, {facts[0].load}" in kernels.text
    assert kernels.to_dict()["compared_with"] == SOURCES["vllm"]
    assert INSTALL in kernels.text and kernels.command in kernels.text and kernels.options in kernels.text
    assert kernels.command == (
        "exegpt profile import aiconfigurator --system h200_sxm --engine vllm --model llama-3.1-70b --dtype fp8 "
        "--out llama-3.1-70b_h200_sxm.json"
    )
    assert kernels.options == "--profile llama-3.1-70b_h200_sxm.json --engine vllm"


def test_only_degrees_of_the_cluster_are_compared():
    assert [row.tp for row in found("2xH200-SXM").compared] == [1, 2]
    assert found("6xH200-SXM").degrees == (1, 2, 4)
    assert found("2xH200-SXM").better_at == ()


def test_where_the_data_sheet_was_nearer_no_import_is_recommended():
    kernels = found("4xH100-SXM")
    assert kernels.compared and kernels.better_at == ()
    assert "were no better than its data sheet: " in kernels.text and "pip install" not in kernels.text


def test_what_was_never_compared_promises_nothing():
    for cluster, engine in (("2xRTXPRO6000", "vllm"), ("8xH100-SXM", "sglang"), ("8xH200-SXM", "vllm-0.11")):
        kernels = found(cluster, engine)
        assert kernels.compared == () and "better" not in kernels.text and kernels.command in kernels.text
        assert f"neither they nor the data sheet were compared with servers of engine {engine}" in kernels.text
    assert "--engine sglang --model" in found("1xH100-SXM", "sglang", LLAMA).command
    assert "--engine trtllm --model" in found("1xH100-SXM", "tensorrt-llm", LLAMA).command


@pytest.mark.parametrize(
    "question",
    [
        {"cluster": "4xA40"},
        {"cluster": "4xH100-SXM", "engine": "none"},
        {"cluster": "4xH100-SXM", "engine": "exegpt"},
        {"cluster": "4xH100-SXM", "dtype": "fp32", "kv_dtype": "fp32"},
        {"cluster": "4xA100-80GB", "kv_dtype": "fp8"},
        {"cluster": "4xH100-SXM", "model": builtin_model("t5-11b")},
        {"cluster": "4xH100-SXM", "model": builtin_model("opt-2.7b")},
    ],
)
def test_what_no_table_covers_has_none(question):
    assert found(**question) is None


def test_measured_links_are_of_the_stock_device_and_other_profiles_have_no_data_sheet():
    cluster = parse_cluster("4xH100-SXM")
    profile = roofline_profile(LLAMA, cluster, "bf16", engine=find_engine("vllm"))
    assert kernel_import(profile, LLAMA, cluster, "bf16")
    slow = replace(cluster, intra=LinkSpec(2e10, 1e-5))
    assert kernel_import(profile, LLAMA, slow, "bf16") is None
    assert kernel_import(replace(profile, source="measured"), LLAMA, cluster, "bf16") is None


def test_names_are_quoted_and_an_unknown_directory_stands_for_itself():
    other = replace(LLAMA, name="my model")
    assert "--model '/a b/my model' --dtype" in found("1xH100-SXM", model=other, typed="/a b/my model").command
    assert "--model DIR --dtype" in found("1xH100-SXM", model=other).command
    assert "--model llama-3.1-8b --dtype" in found("1xH100-SXM", model=LLAMA).command
    assert found("1xH100-SXM", model=other, name="chat").options.startswith("--profile chat='my model_h100_sxm.json'")
    assert "--kv-dtype fp8 " in found("1xH100-SXM", model=LLAMA, kv_dtype="fp8").command


LARGE_ON_H200 = ("-m", "llama-3.1-70b", "--dtype", "fp8", "-c", "4xH200-SXM", "-w", "2048/256")


@pytest.mark.parametrize(
    "command", ["simulate --max-num-seqs 16", "tune -l inf --policy chunked --no-advice --tp-degree 4"]
)
def test_text_and_json_name_it(command):
    done = run_command(*command.split(), *LARGE_ON_H200)
    expected = found("4xH200-SXM", dtype="fp8", typed="llama-3.1-70b")
    assert done.code == 0 and done.err.count(f"· {expected.text}\n") == 1
    answer = run_command(*command.split(), *LARGE_ON_H200, "--json").json
    assert answer["profile_import"] == json.loads(json.dumps(expected.to_dict()))
    assert answer["profile_import"]["better_at"] == [4] and answer["profile_import"]["install"] == INSTALL
    assert {"tp", "rows", "median_error", "imported_error", "quantity", "engine", "device", "load"} <= set(
        answer["profile_import"]["compared"][0]
    )
    none = run_command(*command.split(), *LARGE_ON_H200, "--engine", "none", "--json").json
    assert none["profile_import"] is None and not [text for text in none["assumptions"] if text.startswith("import")]


def test_a_schedules_file_and_another_engines_policy(tmp_path):
    """A policy that our engine runs stands on its roofline, for which nobody measured kernels."""
    file = tmp_path / "schedule.json"
    assert run_command("tune", "-l", "inf", "--policy", "chunked", "--no-advice", *LARGE_ON_H200, "-o", file).code == 0
    answer = run_command("simulate", "--schedule", file, "--json").json
    assert answer["profile_import"]["better_at"] == [4]
    assert "--model llama-3.1-70b --dtype fp8" in answer["profile_import"]["command"]
    answer = run_command(
        *("simulate", "--policy", "rra", "--encode-batch", 8, "--decode-iterations", 16, *LARGE_ON_H200, "--json")
    ).json
    assert answer["profile_import"] is None and not [t for t in answer["assumptions"] if t.startswith("import")]


@pytest.mark.skipif(systems_folder() is None, reason="the package aiconfigurator is not installed")
def test_the_named_commands_do_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    question = ("-c", "4xH200-SXM", "-w", "2048/256", "-m", "llama-3.1-8b", "--json")
    sheet = run_command("simulate", *question).json
    done = run_command(*shlex.split(sheet["profile_import"]["command"])[1:])
    assert done.code == 0, done.err
    options = shlex.split(sheet["profile_import"]["options"])
    for command in ("simulate", "tune -l inf --policy chunked --no-advice"):
        done = run_command(*command.split(), *question, *options)
        assert done.code == 0 and done.json["profile_import"] is None
        assert re.search("profile: 'llama.*with the time of engine vllm", " ".join(done.json["assumptions"]))
