"""The CPUs that a process may use: its affinity, and the quotas of control groups in a tree that the test writes."""

import ast
import os
from pathlib import Path

import pytest

from xcore.usable_cpus import cpu_quota, usable_cpus, within_quota

ROOT = Path(__file__).parent.parent.parent
V2 = "30 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n"
V1 = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
MEMORY = "36 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A file system with these control groups."""
    written = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    for name, text in (written | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "quota"),
    [
        ("0::/\n", V2.format(root="/"), {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", V2.format(root="/"), {"cpu.max": "max 100000\n"}, None),
        ("0::/a.slice/job\n", V2.format(root="/"), {"a.slice/job/cpu.max": "400000 100000\n"}, 4.0),
        (
            "0::/a.slice/job\n",  # the parent's is the least
            V2.format(root="/"),
            {"a.slice/job/cpu.max": "400000 100000\n", "a.slice/cpu.max": "100000 50000\n"},
            2.0,
        ),
        ("0::/a.slice/job\n", V2.format(root="/"), {"a.slice/job/cpu.max": "max 100000\n", "b/cpu.max": "1 1\n"}, None),
        ("0::/docker/x/sub\n", V2.format(root="/docker/x"), {"cpu.max": "300000 100000\n"}, 3.0),
        ("0::/docker/x/sub\n", V2.format(root="/docker/x"), {"sub/cpu.max": "100000 100000\n"}, 1.0),
        ("0::/../other\n", V2.format(root="/"), {"cpu.max": "200000 100000\n"}, 2.0),
        (
            "4:cpu,cpuacct:/docker/x\n3:memory:/docker/y\n",
            V1.format(root="/") + MEMORY,
            {"cpu,cpuacct/docker/x/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        (
            "4:cpu,cpuacct:/docker/x\n0::/\n",
            V1.format(root="/docker/x"),
            {"cpu,cpuacct/cpu.cfs_quota_us": "600000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            6.0,
        ),
        (
            "4:cpu,cpuacct:/\n",
            V1.format(root="/"),
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("0::/\n", V2.format(root="/"), {"cpu.max": "garbage\n"}, None),
        ("0::/\n", V2.format(root="/"), {"cpu.max": "100000 0\n"}, None),
        ("0::/\n", MEMORY, {"cpu.max": "100000 100000\n"}, None),
    ],
)
def test_the_least_quota_of_a_group_and_its_parents(tmp_path, groups, mounts, files, quota):
    assert cpu_quota(tree(tmp_path, groups, mounts, files)) == quota


def test_a_system_without_control_groups_has_no_quota(tmp_path):
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("bound", "quota", "usable"), [(8, None, 8), (8, 2.9, 2), (8, 0.5, 1), (2, 16.0, 2), (1, None, 1)]
)
def test_usable_cpus_are_the_bound_ones_within_the_quota(monkeypatch, bound, quota, usable):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(10, 10 + bound)), raising=False)
    monkeypatch.setattr("xcore.usable_cpus.cpu_quota", lambda: quota)
    assert usable_cpus() == usable == within_quota(bound)


def test_a_system_that_binds_no_process_uses_all_its_cpus(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setattr("xcore.usable_cpus.cpu_quota", lambda: None)
    assert usable_cpus() == 6
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert usable_cpus() == 1


def test_one_module_counts_cpus():
    """Elsewhere a count would miss the affinity or the quota."""
    counting = {"cpu_count", "process_cpu_count"}
    tops = ("exegpt", "kernels", "xprofiler", "xsimulator", "xscheduler", "xrunner", "benchmarks")
    for path in (path for top in tops for path in (ROOT / top).rglob("*.py")):
        if "cpu_count" not in (text := path.read_text("utf-8")):
            continue  # to parse it takes longer
        named = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        assert path.name == "usable_cpus.py" or not named & counting, path


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes can't be bound here")
def test_searches_start_no_more_processes_than_cpus_are_usable(monkeypatch):
    from xcore import processes

    started = []

    class Pool:
        def __init__(self, workers, context, initializer):
            started.append(workers)

        def submit(self, work, *arguments):
            return type("Future", (), {"result": lambda _: work(*arguments)})()

        def shutdown(self, cancel_futures):
            pass

    monkeypatch.setattr(processes, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    done = []
    with processes.Processes() as pool:
        assert pool.each(abs, [(-place,) for place in range(5)], lambda *at: done.append(at)) == [0, 1, 2, 3, 4]
    assert done == [(number, 5) for number in range(1, 6)]
    assert started == [1]
