"""What a newcomer asks first: lengths, bounds, an engine's settings, and what the answers' tables say."""

import re

import pytest

from xcore.specs.builtin_models import builtin_model
from xcore.specs.workload import RequestLengths, Workload, task
from xcore.traces.fit_context import fit_context

ASKED = ("tune", "-m", "llama-3.1-8b", "-c", "1xH100", "-w", "2048/256", "--policy", "orca,rra", "--no-advice")


@pytest.mark.parametrize(
    "command",
    ["tune -l inf -m opt-13b -w 3000/512", "simulate -m opt-13b --max-num-seqs 4 -w 3000/512"],
)
def test_fixed_lengths_beyond_the_context_are_refused(exegpt, command):
    done = exegpt(*command.split())
    assert done.code == 2 and done.out == ""
    assert "3,000 + 512 = 3,512 tokens exceed the context of 'opt-13b' (2,048 tokens)" in done.err


def test_the_headline_names_the_simulated_workload(exegpt, tmp_path):
    """A trace may be scaled or cut; its name has that wherever it is printed."""
    path = tmp_path / "long.csv"
    path.write_text("input,output\n" + "3000,1096\n" * 9)
    command = [*"tune -l inf -m opt-13b --policy orca --no-advice --scale-to-context -w".split(), path]
    done = exegpt(*command)
    assert "opt-13b on 4xA40, long.csv × 0.5, inf" in done.out
    json = exegpt(*command, "--json").json
    assert json["schedule"]["workload"]["name"] == "long.csv × 0.5"
    rows = [RequestLengths(100, 100)] * 199 + [RequestLengths(3000, 100)]
    clipped, notes = fit_context(Workload.from_requests("mixed", rows), builtin_model("opt-13b"), scale=True)
    assert clipped.name == "mixed clipped to 2,048 tokens" and notes[0].startswith("0.5% of the requests")
    cut, notes = fit_context(Workload.from_requests("mixed", rows), builtin_model("opt-13b"))
    assert cut.name == "mixed up to 2,048 tokens" and notes[0].startswith("1 of 200 rows of mixed are longer")
    assert fit_context(task("T"), builtin_model("opt-13b"))[0].name == "T"


def test_a_bound_on_tokens_alone_is_enough(exegpt):
    done = exegpt(*ASKED, "--ttft", "500ms", "--json").json
    bounded = exegpt(*ASKED, "-l", "inf", "--ttft", "500ms", "--json").json
    assert done["schedule"] == bounded["schedule"] and done["schedule"]["latency_bound_s"] is None
    assert exegpt(*ASKED, "--tpot", "20ms").code == 0
    done = exegpt(*ASKED)
    assert done.code == 2 and "--latency-bound 5s" in done.err and "--ttft" in done.err


def test_times_of_tokens_have_columns_where_they_are_bounded(exegpt):
    printed = exegpt(*ASKED, "--ttft", "500ms", "--tpot", "20ms").out
    assert "inf, TTFT 500ms, TPOT 20ms" in printed and "TTFT p99" in printed and "TPOT p99" in printed
    assert "TTFT" not in exegpt(*ASKED, "-l", "5s").out
    printed = exegpt(*ASKED, "-l", "4s,5s", "--tpot", "20ms").out
    assert "TPOT p99" in printed and "TTFT p99" not in printed


def test_times_of_tokens_are_always_in_the_report(exegpt, tmp_path):
    exegpt(*ASKED, "-l", "5s", "--report", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "<th>TTFT p99</th><th>TPOT p99</th>" in page and "8.03 billion parameters" in page


SIMULATE = ("simulate", "-w", "2048/256", "--max-num-seqs")


def test_the_usual_tensor_parallelism_is_a_nodes(exegpt):
    done = exegpt(*SIMULATE, "512", "-m", "llama-3.1-70b", "-c", "8xH100-SXM")
    assert "on TP8" in done.out and "TP8, the widest degree that the model and a node allow" in done.err
    assert "100%" in next(line for line in done.out.splitlines() if "devices busy" in line)
    assert "on PP2×TP8" in exegpt(*SIMULATE, "64", "-m", "llama-3.1-405b", "-c", "2x8xH100").out
    assert (
        "on 2 replicas of TP4" in exegpt(*SIMULATE, "64", "-m", "llama-3.1-70b", "-c", "8xH200", "--replicas", "2").out
    )
    done = exegpt(*SIMULATE, "64", "-m", "llama-3.1-70b", "-c", "8xH100", "--tp-degree", "4")
    assert "on PP2×TP4" in done.out and "as wide as" not in done.err
    assert "on PP2×TP4" in exegpt(*SIMULATE, "64", "-m", "qwen2.5-7b", "-c", "8xH100").out  # 28 heads: 4 at most


def test_an_engine_without_settings_has_vllms_defaults(exegpt):
    for cluster, most in (("1xH100", 1024), ("1xA100-80GB", 256), ("1xL40S", 256)):
        done = exegpt("simulate", "-m", "opt-1.3b", "-c", cluster, "-w", "20/10")
        assert f"max_num_seqs={most} " in done.out and f"max_num_seqs: {most:,}, the default of vllm on" in done.err
    done = exegpt("simulate", "-m", "opt-1.3b", "-c", "1xH100", "-w", "20/10", "--max-num-batched-tokens", "512")
    assert "max_num_seqs=512 " in done.out


def test_weights_that_exceed_the_memory_are_refused_with_the_figures(exegpt):
    done = exegpt("simulate", "-m", "llama-3.1-70b", "-c", "1xH100", "-w", "20/10")
    assert done.code == 2 and "in bf16 take 131.4 GiB and the engine" in done.err
    assert "2.089 GiB, but only 72.85 GiB are usable" in done.err  # 92 % of 79.19 GiB


def test_the_lowest_time_to_first_token_is_that_of_any_schedule(exegpt):
    """No schedule that meets a looser bound has a lower one than what a tight bound's refusal calls the lowest."""
    chunked = (*ASKED[:-3], "--policy", "chunked", "--no-advice", "--json")
    refused = exegpt(*chunked, "--ttft", "1ms").json["alternatives"][0]["reason"]
    lowest = float(re.search(r"its lowest time to first token is ([\d.]+) ms, over 1 ms", refused)[1])
    assert exegpt(*chunked, "--ttft", f"{1.01 * lowest:.4f}ms").code == 0
    assert exegpt(*chunked, "--ttft", f"{0.99 * lowest:.4f}ms").code == 3


def test_dtypes_and_policies_by_their_other_names(exegpt):
    done = exegpt(*ASKED[:-3], "--policy", "ORCA", "--no-advice", "-l", "inf", "--dtype", "float16", "--json").json
    assert done["schedule"]["dtype"] == "fp16" and done["schedule"]["policy"] == "orca"
    assert exegpt(*ASKED, "-l", "inf", "--dtype", "auto", "--json").json["schedule"]["dtype"] == "bf16"
    assert "vllm serve" in exegpt(*ASKED[:-3], "--policy", "Chunked", "-l", "inf", "--export", "vLLM").out


def test_an_infinite_bound_is_none(exegpt):
    printed = exegpt(*ASKED, "-l", "5s", "--tpot", "inf").out
    assert "TPOT" not in printed


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("llama3.1:8b", "meta-llama/Llama-3.1-8B"),
        ("https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_exports_name_what_can_be_loaded(exegpt, model, served):
    options = ("-c", "1xH100", "-w", "20/10", "-l", "inf", "--policy", "chunked", "--no-advice", "--export", "vllm")
    assert f"vllm serve {served} " in exegpt("tune", "-m", model, *options).out


def write_trace(path, column="arrival"):
    path.write_text(f"input,output,{column}\n" + "".join(f"100,20,{i / 2}\n" for i in range(40)))
    return path


@pytest.mark.parametrize("column", ["arrival", "timestamp", "arrived_at"])
def test_arrivals_are_replayed(exegpt, tmp_path, column):
    """All at once, the last of forty waits; at two a second none does."""
    trace = write_trace(tmp_path / "t.csv", column)
    command = ("simulate", "-m", "opt-13b", "-c", "1xA40", "--max-num-seqs", "1", "--replay", trace)
    at_once = exegpt(*command, "--columns", "input=input,output=output,arrival=zero")
    assert at_once.code == 2 and "no arrival column 'zero'" in at_once.err
    answer = exegpt(*command[:-3], "8", "--replay", trace, "--json").json
    assert answer["seconds"] > 19 and answer["ttft"]["p99"] < 0.2


def test_columns_that_the_answer_ignores_are_named(exegpt, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("input,output,session_id,request_time\n" + "100,20,a,5\n" * 5)
    for command, said in (
        (
            ("tune", "-l", "inf", "--policy", "orca", "--no-advice", "-w", path),
            "which prompts share prefixes; a steady state ignores this",
        ),
        (
            ("simulate", "-m", "opt-13b", "--replay", path),
            "which prompts begin with the same tokens; --prefix-caching uses this",
        ),
    ):
        done = exegpt(*command)
        assert f"prompts: t.csv says {said}" in " ".join(done.err.split())
        assert (
            "'request_time' is not used for arrivals; if it holds arrivals, pass --columns arrival=request_time"
            in done.err
        )
        assert sum("t.csv says which" in text for text in exegpt(*command, "--json").json["assumptions"]) == 1


def test_more_sequences_than_memory_holds_wait(exegpt):
    """The figures are those of the sequences that the cache holds, and nothing stands beside 'not feasible'."""
    done = exegpt(*SIMULATE, "512", "-m", "llama-3.1-8b", "-c", "1xA100-40GB")
    assert "not feasible" not in done.out and done.code == 0
    assert "--max-num-seqs allows 512; the other requests wait in the queue, and the figures are for 69" in done.err
    answer = exegpt(*SIMULATE, "512", "-m", "llama-3.1-8b", "-c", "1xA100-40GB", "--json").json
    assert answer["feasible"] and max(answer["memory_bytes"]) <= 0.92 * 39.5 * 2**30
    fewer = exegpt(*SIMULATE, "69", "-m", "llama-3.1-8b", "-c", "1xA100-40GB", "--json").json
    assert answer["throughput_tok_s"] == fewer["throughput_tok_s"]
