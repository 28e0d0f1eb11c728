"""The CPU's kernels beside PyTorch's, on tiny shapes and without compiling."""

import warnings
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels.case import TINY
from benchmarks.kernels.cases import all_cases
from benchmarks.kernels.timing import Roofline, Timed, cpu_seconds, measure_roofline

CPU = torch.device("cpu")
SIZES = replace(TINY, vocab=300, hidden=64)
ROOFLINE = Roofline(bandwidth=1e10, rate=1e11)


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without")
        patch.setattr(torch, "compile", lambda function, **_: function)
        yield kernels.run(SIZES, ROOFLINE, clock=lambda function, alike: (function(), alike()) and 0.5)


def test_every_kernel_is_right_on_the_cpu(rows):
    assert [row.case for row in rows] == [case.name for case in all_cases(SIZES, torch.float32, CPU)]
    assert all(row.right for row in rows)


def test_peers_are_timed_beside_them(rows):
    compared: dict[str, set[str]] = {}
    for row in rows:
        compared.setdefault(row.case, set()).update(row.timed.peers)
    assert compared["RMSNorm"] == {"PyTorch", "torch.compile"}
    assert {"SDPA", "FlexAttention", "gathered, SDPA"} <= compared["decoding"]
    assert {"SDPA", "FlexAttention"} <= compared["prefill"]


def test_the_table_has_the_best_peer(capsys):
    row = kernels.Row("a", "1", True, Timed(2.0, {"x": 3.0, "y": 1.0, "z": "ValueError: no"}, 0.5))
    assert row.ratio == 0.5
    kernels.show([row, replace(row, right=False, timed=Timed(2.0, {}, 0.5))], ROOFLINE)
    out = capsys.readouterr().out
    assert "0.50" in out and "ValueError: no" in out and "NO" in out


def test_a_clock_returns_the_median(monkeypatch):
    monkeypatch.setattr("benchmarks.kernels.timing._FLUSH_BYTES", 8)
    ticks = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    assert cpu_seconds(lambda: None, lambda: next(ticks)) == 1.0


def test_the_cpus_limit_is_measured(monkeypatch):
    monkeypatch.setattr("xprofiler.machine.matrix_flops_s", lambda: 2.0)
    monkeypatch.setattr("xprofiler.machine.read_bandwidth_bytes_s", lambda: 3.0)
    assert measure_roofline(torch.float32, CPU) == Roofline(bandwidth=3.0, rate=2.0)
