"""`exegpt profile import`: what others measured, as a profile that the other commands take."""

import json

import pytest

from tests.public_data import needs_data
from xcore.document import from_dict
from xcore.specs.cost_table import CostTable

RUN = ("vllm_runs", "rtxpro6000_llama-3.1-8b", "profile_tp1")


def test_an_imported_profile_is_simulated(exegpt, tmp_path):
    folder, out = needs_data(*RUN), tmp_path / "profile.json"
    done = exegpt("profile", "import", "layers", folder, "-m", "llama-3.1-8b", "-o", out, "--overhead", "1ms", "--json")
    assert done.code == 0, done.err
    assert done.json["profile"]["source"] == "operators" and done.json["degrees"] == [1]
    assert done.json["provenance"]["import"]["overhead_s"] == "0.001"
    command = ("simulate", "-m", "llama-3.1-8b", "-c", "1xRTXPRO6000", "-p", out, "-w", "512/256")
    done = exegpt(*command, "--max-num-seqs", 64, "--json")
    assert done.code == 0, done.err
    assert 0.01 < done.json["tpot_s"] < 0.04  # 16 GB of weights at 1.6 TB/s take 0.01 s


def test_a_cost_table_of_all_models(exegpt, tmp_path):
    folder, out = needs_data("samullm"), tmp_path / "costs.json"
    done = exegpt("profile", "import", "samullm", folder, "-o", out, "--json")
    assert done.code == 0, done.err
    assert {"name": "vicuna-13b-v1.5", "context": 4096, "degrees": [1, 2, 4]} in done.json["models"]
    table = from_dict(CostTable, json.loads(out.read_text()), "it")
    assert len(table.models) == len(done.json["models"]) == 16
    assert "vicuna-13b-v1.5" in exegpt("profile", "import", "samullm", folder, "-o", out).out


def test_the_summary_names_what_the_source_lacks(exegpt, tmp_path):
    done = exegpt("profile", "import", "layers", needs_data(*RUN), "-m", "llama-3.1-8b", "-o", tmp_path / "p.json")
    assert "RTXPRO6000 in bf16" in done.out
    assert "not_in_source: the engine's own time per iteration" in done.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("hearsay -m opt-13b", "'hearsay' is not known: use one of aiconfigurator, vidur, layers"),
        ("layers -m opt-13b", "No folder is given"),
        ("vidur gone -m opt-13b", "no folder 'gone'"),
        ("layers", "Name the model with --model"),
        ("samullm", "No folder is given"),
        ("samullm gone", "no folder 'gone'"),
        ("samullm . -m opt-13b", "leave --model out"),
        ("samullm .", "There is no cost table 'periter_cost_points.csv'"),
        ("aiconfigurator -m opt-13b", "--system: one of a100_sxm"),
        ("aiconfigurator -m opt-13b --system h100_sxm --dtype int3", "--dtype 'int3' is not known: use one of fp32"),
        (
            "aiconfigurator -m opt-13b --system h100_sxm --dtype int4",
            "no gemm_dtype int4_wo in table 'gemm' of vllm: use one of bfloat16, fp8",
        ),
        ("aiconfigurator -m opt-13b --system h1", "no system 'h1'"),
        ("aiconfigurator -m opt-14b --system h100_sxm", "'opt-14b'"),
        ("aiconfigurator -m opt-13b --system h100_sxm --overhead 3", "'3' is not a duration"),
        ("aiconfigurator -m opt-13b --system h100_sxm --overhead inf", "--overhead 'inf' is not a time per iteration"),
    ],
)
def test_bad_inputs(exegpt, tmp_path, arguments, message):
    done = exegpt("profile", "import", *arguments.split(), "-o", tmp_path / "p.json")
    assert (done.code, done.out) == (2, "")
    assert message in done.err and done.err.count("\n") == 1


def test_measuring_without_a_model_names_both_ways_out(exegpt):
    done = exegpt("profile")
    assert done.code == 2 and "--model" in done.err and "profile import" in done.err


def test_a_profile_for_another_model_is_refused_where_it_is_used(exegpt, tmp_path):
    out = tmp_path / "p.json"
    assert exegpt("profile", "import", "layers", needs_data(*RUN), "-m", "llama-3.1-8b", "-o", out).code == 0
    done = exegpt("tune", "-l", "5s", "-m", "opt-13b", "-c", "1xRTXPRO6000", "-p", out)
    assert done.code == 2 and "another model" in done.err
    assert json.loads(out.read_text())["dtype"] == "bf16"


@pytest.mark.slow
def test_iterations_by_share_replay_a_plan(exegpt, tmp_path):
    """Of MuxServe's file; a plan's models are replayed by them, alone or on a share."""
    file, out = needs_data("muxserve", "llama_a100_cost.json"), tmp_path / "iterations.json"
    done = exegpt("profile", "import", "muxserve", file, "-m", "llama-7b", "-o", out, "--json")
    assert done.code == 0, done.err
    assert done.json["shares"]["1"][-1] == 1.0 and len(done.json["shares"]["1"]) > 3
    assert "llama-7b on A100-80GB" in exegpt("profile", "import", "muxserve", file, "-m", "llama-7b", "-o", out).out
    models = [
        {"name": name, "model": "llama-2-7b", "workload": "160/40", "rate": f"{rate}/s", "latency_bound": "20s"}
        for name, rate in (("busy", 2), ("rare", 1))
    ]
    (tmp_path / "models.yaml").write_text(json.dumps({"models": models}))
    plan = tmp_path / "plan.json"
    for method, cluster in (("muxserve", "1xA100-80GB"), ("spatial", "2xA100-80GB")):
        made = exegpt("plan", tmp_path / "models.yaml", "-c", cluster, "--method", method, "-o", plan)
        assert made.code == 0, made.err
        done = exegpt("simulate", "--plan", plan, "--profile", f"busy={out}", "--json")
        if method == "spatial":  # whose policy mixes prompts with decoding
            assert done.code == 2 and "policy 'chunked'" in done.err
            continue
        assert done.code == 0, done.err
        assert any(f"busy: iterations of llama-7b on A100-80GB, from '{out}'" in a for a in done.json["assumptions"])
        busy, rare = done.json["models"]
        assert busy["attainment"] > 0.9 and (busy["requests"], rare["requests"]) == (2000, 1000)
    done = exegpt("simulate", "--plan", plan, "--profile", f"other={out}")
    assert done.code == 2 and "names no model of the file, and '" in done.err
    done = exegpt("simulate", "--plan", plan, "--profile", str(out))
    assert done.code == 2 and "pass --profile NAME=FILE" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("muxserve", "No file is given"),
        ("muxserve gone.json -m llama-7b", "no file 'gone.json'"),
        ("muxserve table.json", "No model is given: pass --model with one of small"),
        ("muxserve table.json -m large", "has no model 'large': pass --model with one of small"),
        ("muxserve other.json -m small", "is not a cost table of MuxServe"),
    ],
)
def test_iterations_that_cannot_be_imported(exegpt, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    cell = {"prefill": 3.0, "decoding": 2.0}
    (tmp_path / "table.json").write_text(json.dumps({"small": {"1": {"100": {"1": {"8": cell, "16": cell}}}}}))
    (tmp_path / "other.json").write_text("[1]")
    done = exegpt("profile", "import", *arguments.split(), "-o", "out.json")
    assert done.code == 2 and message in done.err.replace("\n", " ")
    assert not (tmp_path / "out.json").exists()
