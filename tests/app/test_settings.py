"""What follows from what was typed: lengths that a model's context doesn't hold, threads of a CPU's devices."""

import os

import pytest

from exegpt.app.settings import fit_context, set_threads, threads_of_device
from exegpt.builtin_models import builtin_model
from exegpt.errors import InputError
from exegpt.workload import Workload
from tests.cli.conftest import run_command


def test_fixed_lengths_up_to_the_context_stand_as_they_are():
    opt = builtin_model("opt-13b")
    assert fit_context(Workload.fixed(1536, 512), opt) == (Workload.fixed(1536, 512), [])
    with pytest.raises(InputError, match="2,049 tokens"):
        fit_context(Workload.fixed(1537, 512), opt)
    assert fit_context(Workload.fixed(9000, 512), builtin_model("t5-11b"))[0].input.mean == 9000


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
    monkeypatch.setattr("exegpt.usable_cpus.cpu_quota", lambda: None)
    set_threads(None)
    assert asked == []  # OpenMP counts the CPUs that it is bound to, and knows of no quota
    monkeypatch.setattr("exegpt.usable_cpus.cpu_quota", lambda: 3.5)
    set_threads(None)
    set_threads(5)
    assert asked == [3, 5]
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    set_threads(None)
    assert asked == [3, 5]
