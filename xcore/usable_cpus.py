"""The CPUs that this process may use: those that it is bound to, limited by its container's CPU quota."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return within_quota(len(cpu_ids()))


def cpu_ids() -> frozenset[int]:
    """Return the CPUs that this process may run on: all, if processes can't be bound (macOS, Windows)."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def within_quota(cpus: int) -> int:
    """Return the number of these CPUs that the CPU quota pays for, at least 1.

    The quota is rounded down. Otherwise the kernel would stop one thread in each period, and the other threads would
    wait for it.
    """
    quota = cpu_quota()
    return max(1, cpus if quota is None else min(cpus, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the least CPU quota of this process's control groups and their parents, in CPUs; None without a quota.

    Args:
        root: The directory with `proc` and `sys`.
    """
    quotas = [quota for group in _groups(root) for quota in (_v2_quota(group), _v1_quota(group)) if quota is not None]
    return min(quotas, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the directories of this process's control groups that can limit the CPU, each followed by its parents.

    A container may see its own group as the root of the hierarchy, or the host's path with its own group mounted.
    """
    paths = dict(_controller_paths(root))
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, filesystem = (part.split() for part in line.partition(" - "))
        kind, options = filesystem[0], filesystem[-1].split(",")
        controller = "" if kind == "cgroup2" else "cpu" if kind == "cgroup" and "cpu" in options else None
        if controller not in paths:
            continue
        top, path = root / fields[4].lstrip("/"), PurePosixPath(paths[controller])
        inside = path.relative_to(fields[3]).parts if path.is_relative_to(fields[3]) and ".." not in path.parts else ()
        for depth in range(len(inside), -1, -1):
            yield top.joinpath(*inside[:depth])


def _controller_paths(root: Path) -> Iterator[tuple[str | None, str]]:
    """Yield this process's group by controller; the unified hierarchy (version 2) has the controller ''."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _v2_quota(group: Path) -> float | None:
    return _quota(*" ".join(_lines(group / "cpu.max")).split())


def _v1_quota(group: Path) -> float | None:
    return _quota(*_lines(group / "cpu.cfs_quota_us"), *_lines(group / "cpu.cfs_period_us"))


def _quota(*texts: str) -> float | None:
    """Return a quota of microseconds per period in CPUs; None for `max`, -1, or anything but two numbers."""
    if len(texts) != 2 or not all(text.isdecimal() for text in texts):
        return None
    quota_us, period_us = map(int, texts)
    return quota_us / period_us if quota_us and period_us else None


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
