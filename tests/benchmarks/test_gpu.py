"""The GPU check, where there is no GPU: interpreted, compiled, and its timing with another clock."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import model_sizes, tokens
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import model, shares
from benchmarks.kernels import timing
from benchmarks.kernels.case import REAL, TINY, Case, fitting
from benchmarks.kernels.cases import all_cases, row_cases, seen_pairs
from benchmarks.kernels.check import check
from exegpt.kernels.attention_gpu import INTERPRETED
from xcore import document
from xcore.requests.requests import random_requests
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.workload import RequestLengths
from xrunner.core.engine import Engine
from xrunner.models import load_model

from ..kernels.flashinfer_stand_in import in_its_place
from ..xrunner.stand_in import StandIn

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL_MODEL = ModelSpec("small", "llama", 2, 32, 2, 2, 16, 48, True, 300, 2048)
ROOFLINE = timing.Roofline(bandwidth=1e10, rate=1e11)

interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 was not set when it began")


def command(*arguments):
    """The command in a process of its own, without the interpreter."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    called = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(called, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110)


@pytest.mark.slow
@interpreted
def test_every_kernel_is_right_in_the_interpreter(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "_interpreted_engine", lambda: [{"policy": "orca"}])
    assert gpu.main(["--interpret", "--out", str(tmp_path / "gpu.json")]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert all(row["error"] <= row["allowed"] for row in report["checks"])
    names = [case.name for case in all_cases(TINY, torch.float16, CPU)]
    assert [row["case"] for row in report["checks"]] == names * 2
    assert f"{2 * len(names)} comparisons, 0 wrong." in capsys.readouterr().out
    assert report["engine"] == [{"policy": "orca"}]


@pytest.mark.parametrize("wrong", [lambda x: x + 0.1, lambda x: x * float("nan"), lambda x: x[1:], lambda x: x.float()])
def test_a_wrong_kernel_is_found(wrong):
    x = torch.randn(4, 4).half()
    good = Case("one", "4 × 4", "torch.float16", lambda: x.clone(), lambda: x, bytes=1)
    assert check(good).passed and check(good).error == 0
    assert not check(replace(good, run=lambda: (wrong(x),), reference=lambda: (x,))).passed


@interpreted
def test_a_failed_kernel_is_printed_beside_the_others(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("out of resources\nand more")

    monkeypatch.setattr("exegpt.kernels.swiglu_gpu.gated_gpu", broken)
    monkeypatch.setattr("benchmarks.kernels.cases.all_cases", row_cases)
    with gpu._as_on_a_gpu():
        rows = gpu._check(TINY, CPU)
    failed = [row for row in rows if "failed" in row]
    assert [row["case"] for row in failed] == ["SwiGLU", "GEGLU"] * 2
    assert {row["failed"] for row in failed} == {"RuntimeError: out of resources"}
    assert f"{len(rows)} comparisons, 4 wrong." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@interpreted
def test_timing_goes_through_every_case_and_peer(monkeypatch, capsys):
    """With a clock that needs no GPU, peers uncompiled, PyTorch's attention by whatever backend there is, a stand-in
    for FlashInfer."""

    def clock(function, alike=None):
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin

    monkeypatch.setattr(timing, "device_seconds", clock)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr("benchmarks.kernels.peers.sdpa_kernel", lambda backend: torch.no_grad())
    with in_its_place():
        times = gpu._time(TINY, CPU, ROOFLINE, time.perf_counter() + 1e6)
        checked = gpu._check(TINY, CPU)
        assert len(times) == len(list(all_cases(TINY, torch.float16, CPU)))
    assert not [row for row in checked if "failed" in row]
    for row in times:
        assert row["seconds"] > 0 and row["share"] > 0
        assert all(isinstance(seconds, float) for seconds in row["peers"].values()), row
    assert "of the roofline" in capsys.readouterr().out
    with_peers = {row["case"] for row in times if row["peers"]}
    assert {"prefill", "decoding", "RMSNorm", "SwiGLU", "RoPE and cache", "blocks, gather"} <= with_peers
    assert any("FlexAttention" in row["peers"] for row in times)
    attention = [row["case"] for row in times if row["case"].startswith(("prefill", "decoding"))]
    assert attention[1::2] == [f"{name}, FlashInfer" for name in attention[::2]]
    late = gpu._time(TINY, CPU, ROOFLINE, time.perf_counter() - 1)
    assert all(row["left_out"] for row in late)


def test_a_failed_peer_has_its_reason(monkeypatch):
    def broken():
        raise ValueError("no such backend\nat all")

    case = Case("one", "1", "torch.float16", lambda: None, lambda: None, 10, peers=lambda: {"theirs": broken})
    timed = timing.time_case(case, timing.Roofline(100.0, 1.0), lambda function, alike: function() or 0.5)
    assert timed.peers == {"theirs": "ValueError: no such backend"} and timed.share == pytest.approx(0.2)


@pytest.mark.parametrize(("reads", "share"), [(False, 0.2), (True, 0.1)])
def test_shares_are_given_for_every_bandwidth(reads, share):
    case = Case("one", "1", "torch.float16", lambda: None, lambda: None, 10, reads=reads)
    roofline = timing.Roofline(100.0, 1.0, read_bandwidth=200.0, sheet_bandwidth=250.0)
    timed = timing.time_case(case, roofline, lambda function, alike: 0.5)
    assert timed.share == pytest.approx(share)
    assert timed.shares == pytest.approx({"copy": 0.2, "read": 0.1, "data sheet": 0.08})
    assert list(timing.time_case(case, ROOFLINE, lambda function, alike: 0.5).shares) == ["copy"]


@pytest.mark.parametrize(
    ("name", "tb_s"),
    [
        ("NVIDIA A100-SXM4-40GB", 1.555),
        ("NVIDIA A100-SXM4-80GB", 2.039),
        ("NVIDIA H100 80GB HBM3", 3.35),
        ("NVIDIA H200", 4.8),
        ("NVIDIA B200", 8.0),
        ("NVIDIA L40S", 0.864),
        ("NVIDIA A40", 0.696),
        ("NVIDIA GeForce RTX 4090", 1.008),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 1.792),
        ("NVIDIA A100 80GB PCIe", 1.935),  # another memory than the SXM one's
        ("NVIDIA H100 PCIe", 2.0),
        ("Tesla T4", 0.32),
        ("NVIDIA GB10", None),
    ],
)
def test_the_data_sheet_is_found_by_torchs_name(name, tb_s):
    bandwidth = timing.sheet_bandwidth(name)
    assert bandwidth is None if tb_s is None else bandwidth == pytest.approx(tb_s * 1e12)


@pytest.mark.parametrize(("sheet", "line"), [(4.8e12, "data sheet 4800 GB/s"), (None, "'Some GPU' is none of")])
def test_the_roofline_is_printed(monkeypatch, capsys, sheet, line):
    measured = timing.Roofline(3e12, 8e14, 4e12, sheet)
    monkeypatch.setattr(timing, "measure_roofline", lambda dtype, device: measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert gpu._roofline(CPU) == measured
    out = capsys.readouterr().out
    assert "copy 3000 GB/s, read 4000 GB/s" in out and line in out


@interpreted
@pytest.mark.parametrize("count", [1, 8192, 20_001])
def test_the_reading_kernel_reads_all(count):
    from benchmarks.kernels.read import partial_sums

    x = torch.randint(-1000, 1000, (count,), dtype=torch.int32)
    assert partial_sums(x).tolist() == [part.sum().item() for part in x.split(8192)]


def test_caches_that_do_not_fit_are_left_out():
    assert fitting(REAL, 10**15, 2) == REAL
    small = fitting(REAL, 24 * 2**30, 2).decoding
    assert (1, 262144) in small and (64, 32768) not in small


@pytest.mark.parametrize(("window", "causal"), [(None, True), (3, True), (None, False)])
def test_pairs_are_counted(window, causal):
    new, context = 5, 9
    pairs = 0
    for place in range(context - new, context):
        for key in range(context):
            pairs += not causal or (key <= place and (window is None or key > place - window))
    assert seen_pairs(new, context, window, causal) == pairs


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no CUDA device"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (["--compile", "ninety"], "'ninety' isn't a list"),
                (["--compile", "90,7"], "--compile 7 isn't known"),
                (["--parts", "times,all"], "--parts 'all' isn't known"),
            )
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(arguments, message):
    done = command(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr and not done.stdout


@interpreted
def test_real_shapes_are_not_interpreted(capsys):
    assert gpu.main([]) == 2
    assert "unset it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_kib"), [(80, 163), (86, 99), (90, 227)])
def test_every_kernel_compiles_for_a_gpu(capability, shared_kib, tmp_path):
    done = command("--compile", str(capability), "--out", str(tmp_path / "compiled.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "compiled.json").read_text())["compiled"]
    attention = {"_attend_prefill", "_attend_decode"}
    assert attention | {"_norm", "_gate", "_rotate", "_copy", "_edit", "_sample"} == {row["kernel"] for row in rows}
    for row in rows:
        assert row["spilled_bytes"] <= (0 if capability >= 90 or row["kernel"] == "_attend_decode" else 400), row
        assert row["shared_bytes"] <= shared_kib * 1024 and row["resident"] >= 1, row
        if row["kernel"] in attention:
            assert row["matrix_instructions"] and row["async_copies"], row
        if row["kernel"] == "_attend_decode":
            assert row["buffers"] > 1 and row["wait_group"] > 0, row
    assert re.search(r"the greatest share is 1\.0\d\d times the mean", done.stdout)


@interpreted
@pytest.mark.slow
def test_the_engine_is_right_in_the_interpreter():
    rows = gpu._interpreted_engine()
    assert {row["policy"] for row in rows} == {"static", "orca", "chunked", "rra"}
    assert all(row["tokens"] > 10 and not row["differences"] for row in rows)


@pytest.mark.slow
@interpreted
def test_an_engine_with_a_wrong_kernel_is_found(monkeypatch, capsys):
    from exegpt.kernels import swiglu_gpu

    real = swiglu_gpu.gated_gpu
    monkeypatch.setattr(swiglu_gpu, "gated_gpu", lambda *given: real(*given).neg_())
    monkeypatch.setattr("benchmarks.tokens.POLICIES", {"orca": {"max_num_seqs": 12, "prefills_per_step": 2}})
    rows = gpu._interpreted_engine()
    assert any("not transformers'" in row.get("failed", "") for row in rows)
    assert "outputs are not" in capsys.readouterr().out


@pytest.mark.slow
def test_a_decoding_iteration_is_timed_beside_its_roofline(monkeypatch, capsys):
    """On the CPU, whose graphs run the layers again."""
    monkeypatch.setattr("xrunner.comm.gpu.Gpu", lambda device: StandIn())
    monkeypatch.setattr("xcore.specs.builtin_models.builtin_model", lambda name: SMALL_MODEL)
    (row,) = gpu._steps(CPU, ROOFLINE, 64)
    assert "failed" not in row and row["alike"] and min(row["eager"], row["graph"]) > row["bound"] > 0
    assert "of the roofline" in capsys.readouterr().out


@interpreted
@pytest.mark.slow
def test_both_ways_of_attention_are_compared(monkeypatch, capsys):
    """The engine's tokens and a decoding iteration, by the stand-in for FlashInfer."""
    monkeypatch.setattr(model, "_STEPS", 1)
    monkeypatch.setattr(tokens, "POLICIES", {"orca": {"max_num_seqs": 12, "prefills_per_step": 2}})
    assert gpu._ways(CPU) == ["triton"] and "only on GPUs" in gpu._flashinfer_engine(CPU)[0]["left_out"]
    with in_its_place() as calls:
        assert gpu._ways(CPU) == ["triton", "flashinfer"]
        step = model.time_step(SMALL_MODEL, "bf16", 3, 40, StandIn(), ROOFLINE, print, "flashinfer")
        assert step.alike and step.attention == "flashinfer" and calls
        (row,) = tokens.run_flashinfer(2, 0, CPU, ("llama",), model_sizes.TINY)
    assert row.policy == "orca, FlashInfer" and row.tokens and not row.differences


def test_every_way_is_timed(monkeypatch, capsys):
    calls = []
    step = model.Step("small", 64, 1024, 2.0, 1.0, 0.5, True, "flashinfer")
    monkeypatch.setattr(model, "time_step", lambda *arguments: calls.append(arguments) or step)
    monkeypatch.setattr("xrunner.comm.gpu.Gpu", lambda device: StandIn())
    assert gpu._steps(CPU, ROOFLINE, 64, "flashinfer")[0]["attention"] == "flashinfer" == calls[0][-1]
    assert "bfloat16, flashinfer: graph 1000.00 ms" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(model, "free_memory", lambda device: 2**30)
    assert model.time_step(SMALL_MODEL, "bf16", 2, 20, StandIn(), ROOFLINE, print) is None
    assert "left out for lack of memory: small" in capsys.readouterr().out


def test_two_models_of_the_part_of_shares_give_their_own_tokens(tmp_path):
    """In turns on the CPU: what is compared with models beside each other is what each engine gives alone."""
    todo, directories = {}, {name: tmp_path / name for name in "ab"}
    for seed, (name, directory) in enumerate(directories.items()):
        model_sizes.TINY.create(directory, seed)
        todo[name] = random_requests([RequestLengths(4, 6)] * 5, 300, seed)
    models = [shares.planned(name, path, "fp32") for name, path in directories.items()]
    seconds, got = shares.timed_run(models, directories, todo, CPU, [])
    assert seconds > 0 and len(got) == 10
    for each in models:
        alone = Engine(load_model(each.directory), each.schedule).run(todo[each.name])
        assert {result.id: got[each.name, result.id] for result in alone.results} == {
            result.id: result.output_ids for result in alone.results
        }


@pytest.mark.parametrize(("longer", "failed"), [(1.1, True), (3.9, False)])
def test_a_share_that_is_not_in_force_is_found(monkeypatch, capsys, longer, failed):
    monkeypatch.setattr(shares, "streams_on_shares", lambda device, wanted: ["a stream"])
    monkeypatch.setattr(shares, "PRODUCT", 8)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    times = iter([1.0, longer, 2.0, 1.0])
    monkeypatch.setattr(shares, "graph_seconds", lambda device, compute: next(times))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(shares, "model_times", lambda device: [{"gain": 1.2}])
    rows = gpu._shares(CPU)
    assert [row.get("times_as_long") for row in rows] == [longer, 2.0, 1.0, None]
    assert ("failed" in rows[0]) == failed
    assert ("on a quarter takes 1.10 times as long" in capsys.readouterr().out) == failed


def test_every_part_is_done_and_written_while_there_is_time(monkeypatch, tmp_path, capsys):
    parts = []

    def part(name):
        return lambda *given: parts.append(name) or [{"part": name}]

    for name in ("_check", "_engine", "_shares", "_two_ranks", "_steps", "_serving", "_profile", "_time"):
        monkeypatch.setattr(gpu, name, part(name))
    monkeypatch.setattr(gpu, "_no_flashinfer", lambda device: "FlashInfer is not installed")
    monkeypatch.setattr(gpu, "_real_sizes", lambda: None)
    monkeypatch.setattr(gpu, "_roofline", lambda device: ROOFLINE)
    monkeypatch.setattr(gpu, "_provenance", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = tmp_path / "gpu.json"
    assert gpu.main(["--out", str(out)]) == 0
    assert parts == ["_check", "_engine", "_shares", *["_steps"] * 3, "_serving", "_two_ranks", "_profile", "_time"]
    assert set(json.loads(out.read_text())) == {"provenance", "roofline", *gpu.PARTS}
    assert gpu.main(["--out", str(out), "--parts", "serving"]) == 0
    assert set(json.loads(out.read_text())) == {"provenance", "serving"} and parts[-1] == "_serving"
    assert gpu.main(["--out", str(out), "--limit-s", "-1", "--parts", "engine,ranks"]) == 0
    assert json.loads(out.read_text())["ranks"] == [{"left_out": "no time left"}] and parts[-1] == "_serving"
    assert "left out for lack of time: engine" in capsys.readouterr().out


def test_the_roofline_of_an_iteration():
    """A batch that moves little computes little; bound by what takes longer."""
    weights = SMALL_MODEL.parameters - 300 * 32
    moved = 4 * (weights + 64 * 1024 * 2 * 2 * 2 * 16)
    assert model.bound(SMALL_MODEL, "fp32", 64, 1024, timing.Roofline(1.0, 1e30)) == moved
    flops = 2 * weights * 64 + 64 * 4 * 1024 * 2 * 16 * 2
    assert model.bound(SMALL_MODEL, "fp32", 64, 1024, timing.Roofline(1e30, 1.0)) == flops


def test_a_profile_lies_beside_the_results(monkeypatch, tmp_path):
    from tests.xcore.small_specs import profile

    calls = []
    measured = profile(SMALL_MODEL)
    monkeypatch.setattr(
        "xprofiler.measure.measure_profile", lambda *arguments, **on: calls.append((arguments, on)) or measured
    )
    (row,) = gpu._profile(CPU, str(tmp_path / "gpu.json"))
    assert document.read(Profile, tmp_path / "gpu.profile.json").fingerprint == row["fingerprint"]
    assert calls[0][0][1] == "bf16" and calls[0][1] == {"device": CPU}
