"""What follows from what was typed: lengths that a model's context doesn't hold, threads of a CPU's devices."""

import os
from dataclasses import replace
from functools import partial

import pytest

from tests.exegpt.cli.conftest import run_command
from tests.xcore.specs.test_copula import drawn
from xcore.errors import InputError
from xcore.requests.request_lists import read_for_model
from xcore.specs.builtin_models import builtin_model
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.fit_context import fit_context
from xprofiler import machine
from xrunner.models.create import create_model
from xrunner.models.quantize import quantize_model
from xrunner.threads import set_threads
from xscheduler.setting_search import search_schedule
from xscheduler.settings import find_setting, run_dtype, split_text, threads_of_device


def test_fixed_lengths_up_to_the_context_stand_as_they_are():
    opt = builtin_model("opt-13b")
    assert fit_context(Workload.fixed(1536, 512), opt) == (Workload.fixed(1536, 512), [])
    with pytest.raises(InputError, match="2,049 tokens"):
        fit_context(Workload.fixed(1537, 512), opt)
    assert fit_context(Workload.fixed(9000, 512), builtin_model("t5-11b"))[0].input.mean == 9000


def rows(*lengths, name="trace"):
    return Workload.from_requests(name, [RequestLengths(*pair, arrival_s=float(i)) for i, pair in enumerate(lengths)])


@pytest.mark.parametrize(("longer", "warned"), [(1, False), (5, False), (6, True), (50, True)])
def test_longer_rows_of_a_trace_are_left_out_and_counted(longer, warned):
    opt = builtin_model("opt-13b")
    trace = rows(*[(100, 50)] * (100 - longer), *[(2000, 49)] * longer)
    fitting, (note,) = fit_context(trace, opt)
    assert fitting.requests == trace.requests[: 100 - longer]
    assert (fitting.input.max, fitting.output.max) == (100, 50)
    assert note.startswith("warning: ") is warned
    assert f"{longer} of 100 rows of trace are longer than the context of 2,048 tokens and are left out" in note


def test_a_trace_whose_rows_all_fit_stays_as_it_is():
    trace = rows((2000, 48), (1, 1))
    assert fit_context(trace, builtin_model("opt-13b")) == (trace, [])
    long = rows((9000, 9000))
    assert fit_context(long, builtin_model("t5-11b")) == (long, [])


def test_one_long_row_changes_no_other_rows_lengths():
    """It scaled all of a list of fewer than about 100 rows."""
    trace = rows(*[(100, 50)] * 9, (30_000, 50))
    assert set(fit_context(trace, builtin_model("opt-13b"))[0].input.lengths) == {100}
    scaled = fit_context(trace, builtin_model("opt-13b"), scale=True)[0]
    assert scaled.input.lengths[0] < 100 and len(scaled.requests) == 10


def test_a_rate_that_was_asked_for_stays_where_rows_are_left_out():
    opt, trace = builtin_model("opt-13b"), rows((100, 50), (3000, 50), (100, 50), (100, 50))
    assert fit_context(trace, opt)[0].arrival_rate == pytest.approx(2 / 3)
    assert fit_context(replace(trace, arrival_rate=7.0), opt)[0].arrival_rate == 7.0


@pytest.mark.parametrize(("devices", "threads"), [(1, None), (2, 3), (4, 1), (9, 1)])
def test_the_devices_of_a_cpu_share_its_cores(tmp_path, monkeypatch, devices, threads):
    """As its engines do: a profile of all cores made predictions six times too high."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6 if devices < 4 else 4)))
    text = run_command("show", "local", "--yaml").out.replace("devices_per_node: 1", f"devices_per_node: {devices}")
    (tmp_path / "local-several.yaml").write_text(text)
    assert threads_of_device(str(tmp_path / "local-several.yaml")) == threads
    assert threads_of_device("local") is None and threads_of_device("4xA40") is None


def test_without_threads_torch_uses_no_more_than_the_quota(monkeypatch):
    import torch

    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("xcore.usable_cpus.cpu_quota", lambda: None)
    set_threads(None)
    assert asked == []  # OpenMP counts the CPUs that it is bound to, and knows of no quota
    monkeypatch.setattr("xcore.usable_cpus.cpu_quota", lambda: 3.5)
    set_threads(None)
    set_threads(5)
    assert asked == [3, 5]
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    set_threads(None)
    assert asked == [3, 5]


def test_runs_of_a_trace_leave_out_or_scale_rows_beyond_the_context(tmp_path):
    spec, notes = builtin_model("gpt2"), []
    (tmp_path / "t.csv").write_text("input,output\n" + "512,1536\n" * 9)
    read = partial(read_for_model, str(tmp_path / "t.csv"), tmp_path, spec, None, 0, notes.append)
    with pytest.raises(InputError, match=r"None of the 9 rows of t\.csv fits the context of 'gpt2' \(1,024 tokens\)"):
        read()
    requests, _ = read(scale=True)
    assert {(len(request.prompt_ids), request.max_tokens) for request in requests} == {(256, 768)}
    assert notes == ["the lengths of workload t.csv are multiplied by 0.5 to fit the context of 1,024 tokens"]
    (tmp_path / "t.csv").write_text("input,output\n" + "10,5\n" * 39 + "512,1536\n")
    notes.clear()
    requests, _ = read()
    assert len(requests) == 39
    assert notes == ["1 of 40 rows of t.csv are longer than the context of 1,024 tokens and are left out"]


@pytest.mark.parametrize(
    "command",
    [
        "tune -l inf -w S --scale-to-context",
        "simulate -m opt-125m --policy orca --max-num-seqs 4 -w 10/10 --scale-to-context",
        "bench serve --url http://localhost:1 --rate 1/s --scale-to-context",
        "engine --socket s -m m --scale-to-context",
    ],
)
def test_scaling_without_a_trace_is_refused(command):
    done = run_command(*command.split())
    assert done.code == 2 and "--scale-to-context scales the lengths of a trace, but there is no trace" in done.err


def test_weights_in_8_bits_leave_keys_and_values_in_16():
    """As in vLLM, whose --kv-cache-dtype auto is the checkpoint's own dtype."""
    asked = ("llama-3.1-70b", "2xH100-SXM", "2048/256")
    default = find_setting(*asked, dtype="fp8")
    assert default.kv_dtype == default.profile.provenance["kv_dtype"] == "bf16"
    assert any(text.startswith("keys and values: bf16, the default") for text in default.assumptions)
    typed = find_setting(*asked, dtype="fp8", kv_dtype="fp8")
    assert typed.kv_dtype == typed.profile.provenance["kv_dtype"] == "fp8"
    assert not any(text.startswith("keys and values") for text in typed.assumptions)
    assert find_setting(*asked, dtype="fp16").kv_dtype == "fp16"


@pytest.mark.parametrize(
    ("engine", "share", "text"),
    [
        (None, 0.92, "memory: 92% of the 79.19 GiB of H100-SXM, vllm's default"),
        ("tensorrt-llm", 0.9, "memory: 90% of the 79.65 GiB of H100-SXM, after the weights, tensorrt-llm's default"),
        ("paper", 0.9, "memory: 90% of the 79.65 GiB of H100-SXM, the default"),
    ],
)
def test_the_share_of_the_memory_is_the_engines_unless_it_is_typed(engine, share, text):
    asked = ("llama-3.1-8b", "1xH100-SXM", "2048/256")
    default = find_setting(*asked, engine=engine)
    assert default.cluster.memory_fraction == share and text in default.assumptions
    typed = find_setting(*asked, engine=engine, memory_fraction=0.8)
    assert typed.cluster.memory_fraction == 0.8 and not any(t.startswith("memory") for t in typed.assumptions)


def test_a_cluster_file_keeps_its_own_share(tmp_path):
    (tmp_path / "c.yaml").write_text("kind: H100-SXM\nnodes: 1\ndevices_per_node: 1\nmemory_fraction: 0.7\n")
    assert find_setting("llama-3.1-8b", str(tmp_path / "c.yaml"), "2048/256").cluster.memory_fraction == 0.7


@pytest.mark.parametrize(
    ("model", "cluster", "shared", "said"),
    [
        ("gpt-oss-120b", "8xH100-SXM", 0, "choose a number of at least 1 that divides them"),
        ("gpt-oss-120b", "8xH100-SXM", -2, "choose a number of at least 1 that divides them"),
        ("gpt-oss-120b", "8xH100-SXM", 3, "128 experts can't be shared evenly by 3 devices"),
        ("gpt-oss-120b", "6xH100-SXM", 4, "'6xH100-SXM' has 1 x 6 devices, and groups of 4"),
        ("gpt-oss-120b", "2x12xH100-SXM", 8, "'2x12xH100-SXM' has 2 x 12 devices, and groups of 8"),
        ("llama-3.1-8b", "8xH100-SXM", 8, "model 'llama-3.1-8b' has no experts"),
    ],
)
def test_experts_that_devices_can_not_share_are_refused(model, cluster, shared, said):
    with pytest.raises(InputError, match=said):
        find_setting(model, cluster, "1024/256", attention_dp=shared)


def test_all_policies_are_searched_where_replicas_share_experts():
    """Those that prefill on other devices need two for a replica: they have no schedule."""
    setting = find_setting("deepseek-r1", "8xH200-SXM", "1024/64", attention_dp=8)
    answer = search_schedule(setting, 60.0, policies=("orca", "static", "rra", "waa-c", "waa-m"))
    found = {each.policy: each.schedule for each in answer.alternatives}
    assert {policy for policy, schedule in found.items() if schedule is None} == {"waa-c", "waa-m"}
    assert all("two devices for a replica" in each.reason for each in answer.alternatives if each.schedule is None)
    assert all(schedule.replicas == 8 for schedule in found.values() if schedule)


@pytest.mark.parametrize(
    ("flags", "checkpoint", "expected"),
    [
        ("flags\t\t: fpu avx512_bf16 avx2", "bf16", "bf16"),
        ("Features\t: asimd bf16 i8mm", "fp16", "bf16"),
        ("flags\t\t: fpu avx512f avx2", "bf16", "fp32"),
        ("flags\t\t: amx_bf16 amx_tile", "fp32", "fp32"),
        ("flags\t\t: amx_bf16 amx_tile", None, "fp32"),
    ],
)
def test_a_run_on_a_cpu_follows_the_checkpoint_where_the_cpu_computes_in_bf16(
    monkeypatch, tmp_path, flags, checkpoint, expected
):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    model = replace(builtin_model("opt-13b"), dtype=checkpoint)
    assert run_dtype(None, None, model, "cpu") == run_dtype("auto", None, model, "cpu") == expected
    assert run_dtype("fp16", None, model, "cpu") == "fp16"
    assert run_dtype(None, None, model, "cuda") == "bf16"


def test_a_schedules_workload_says_that_its_lengths_depend_on_each_other():
    texts = find_setting("opt-13b", "1xA40", drawn(0.9).without_requests).assumptions
    assert any("depend on each other: steady states" in text for text in texts)
    texts = find_setting("opt-13b", "1xA40", drawn(0.9)).assumptions
    assert any("correlation in the trace is +0.8" in text for text in texts)


def test_a_dtype_that_a_run_refuses_for_its_weights_is_named(tmp_path, monkeypatch):
    """Schedules may still be asked for: before a model is quantised, its gain is a question."""
    for measured in ("matrix_flops_s", "read_bandwidth_bytes_s"):  # in a second, four times
        monkeypatch.setattr(machine, measured, lambda **_: 1e10)
    create_model(tmp_path / "plain", "llama", layers=2, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=300)
    quantize_model(tmp_path / "plain", tmp_path / "codes", bits=4, group_size=32)
    said = {
        (name, dtype): [
            text for text in find_setting(str(tmp_path / name), dtype=dtype).assumptions if "refuses" in text
        ]
        for name, dtype in (("plain", "w4a32"), ("plain", "fp32"), ("codes", "fp16"), ("codes", "fp32"))
    }
    assert said["plain", "fp32"] == said["codes", "fp32"] == []
    assert (
        "refuses w4a32 for plain: its checkpoint has plain floats; `exegpt model quantize" in said["plain", "w4a32"][0]
    )
    assert "weights of 4 bits, which run in --dtype fp32 or bf16" in said["codes", "fp16"][0]


@pytest.mark.parametrize(("engine", "one_engine", "beside"), [("exegpt", 0, 0), ("vllm", 0, 1), ("vllm", 1, 0)])
def test_another_server_has_our_engine_beside_it_for_the_policies_that_it_lacks(engine, one_engine, beside):
    setting = find_setting("opt-1.3b", "1xA40", "128/32", "roofline", engine=engine, one_engine=bool(one_engine))
    assert (setting.own is not None) == bool(beside)
    if setting.own:
        assert setting.own.profile.provenance["engine"] != setting.profile.provenance["engine"] == engine


@pytest.mark.parametrize(("cluster", "said"), [("1xA40", "all on one device"), ("2xA40", "on every device at TP2")])
def test_how_experts_are_shared_is_said_for_one_device_too(cluster, said):
    setting = find_setting("mixtral-8x7b", cluster, "128/32", "roofline")
    assert split_text(setting.model, setting.profile).endswith(said)
