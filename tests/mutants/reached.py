"""Which tests reach a line, and how long they take: found once by coverage, and kept in a file.

As a plugin of pytest, this module tells coverage which test runs.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

FOLDERS = "golden xcore xsimulator xscheduler xmulti/sharing xmulti/plans xmulti/applications xmulti/stages exegpt"
"""Folders of tests that are asked, without those that start servers and engines."""
PACKAGES = "xcore,xmulti,xscheduler,xsimulator"
_seconds: dict[str, float] = {}


def _entered(name: str) -> None:
    import coverage

    running = coverage.Coverage.current()
    assert running is not None, "the plugin runs under coverage"
    running.switch_context(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Record a test's fixtures under its file: only the first test of a file runs a shared fixture."""
    _entered(item.nodeid.partition("::")[0])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _entered(item.nodeid)
    began = time.process_time()
    result = yield
    _seconds[item.nodeid] = time.process_time() - began
    return result


def pytest_sessionfinish() -> None:
    Path(os.environ["REACHED_SECONDS"]).write_text(json.dumps(_seconds), encoding="utf-8")


def record(tree: Path, file: Path, tests: list[str]) -> None:
    """Run the quick tests of a tree under coverage, and keep what each one that passes reaches."""
    import coverage

    data, seconds = file.with_suffix(".coverage"), file.with_suffix(".seconds")
    run = [sys.executable, "-m", "coverage", "run", "--data-file", str(data), "--source", PACKAGES, "-m", "pytest"]
    options = ["-q", "-p", "tests.mutants.reached", "-p", "no:cacheprovider", "-m", "not slow"]
    environment = {**os.environ, "REACHED_SECONDS": str(seconds)}
    ended = subprocess.run([*run, *options, *tests], cwd=tree, env=environment, check=False).returncode
    if ended > 1:  # 1: some tests failed, which judge nothing
        sys.exit(f"The quick tests of {tree} did not run to their end: exit code {ended}.")
    found = coverage.CoverageData(str(data))
    found.read()
    lines = {
        str(Path(path).relative_to(tree)): found.contexts_by_lineno(path) for path in sorted(found.measured_files())
    }
    Reached(json.loads(seconds.read_text(encoding="utf-8")), lines).write(file)


@dataclass(frozen=True)
class Reached:
    """The quick tests and what they reach."""

    seconds: dict[str, float]
    """CPU seconds of each test."""
    lines: dict[str, dict[int, list[str]]]
    """By path and line: the tests, and the files of tests whose fixtures reach it; empty: it was imported."""

    @staticmethod
    def read(file: Path) -> "Reached":
        """Read what was kept."""
        kept = json.loads(file.read_text(encoding="utf-8"))
        names = kept["names"]
        lines = {
            path: {int(line): [names[place] for place in places] for line, places in of_path.items()}
            for path, of_path in kept["lines"].items()
        }
        return Reached(kept["seconds"], lines)

    def write(self, file: Path) -> None:
        """Keep it in a file, in which each name stands once."""
        names = sorted({name for of_path in self.lines.values() for found in of_path.values() for name in found})
        places = {name: place for place, name in enumerate(names)}
        lines = {
            path: {line: [places[name] for name in found] for line, found in of_path.items()}
            for path, of_path in self.lines.items()
        }
        file.write_text(json.dumps({"seconds": self.seconds, "names": names, "lines": lines}), encoding="utf-8")

    @cached_property
    def _of_file(self) -> dict[str, list[str]]:
        files: dict[str, list[str]] = {}
        for name in self.seconds:
            files.setdefault(name.partition("::")[0], []).append(name)
        return files

    def tests(self, path: str, first: int, last: int) -> set[str]:
        """Tests that reach one of these lines of a file, the last included."""
        found = {
            name for line, names in self.lines.get(path, {}).items() if first <= line <= last for name in names if name
        }
        of_fixtures = {test for name in found for test in self._of_file.get(name, ())}
        return (found & self.seconds.keys()) | of_fixtures
