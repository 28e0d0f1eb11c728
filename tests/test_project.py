"""Project files: licence, types, and CI on every supported Python."""

import re
from pathlib import Path

import pytest
import yaml

from tests.thinned import LONG, THINNED

ROOT = Path(__file__).parent.parent
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
PACKAGES = re.search(r'PACKAGES = "(.+)"', SETUP)[1].split()


def test_every_change_is_checked_on_every_python_that_is_supported():
    """GitHub's schema as far as it is used: each job says where it runs, and each step uses an action or runs."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert set(workflow) <= {"name", True, "jobs"}, "YAML reads the key `on` as true"
    (job,) = workflow["jobs"].values()
    assert set(job) <= {"runs-on", "timeout-minutes", "strategy", "steps"} and job["runs-on"]
    assert all(len({"uses", "run"} & set(step)) == 1 for step in job["steps"])
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    low, high = map(int, re.search(r'python_requires=">=3\.(\d+),<3\.(\d+)"', SETUP).groups())
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(low, high)]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_types(package):
    assert (ROOT / package / "py.typed").is_file() and (ROOT / package / "__init__.py").is_file()


def test_the_licence_is_the_one_that_is_declared():
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8") and 'license="Apache-2.0"' in SETUP


def test_the_changes_begin_with_the_version_to_come():
    first = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1]
    version = re.search(r'__version__ = "(.+)"', (ROOT / "xcore/__init__.py").read_text(encoding="utf-8"))[1]
    assert first.startswith(("Unreleased", version))


@pytest.mark.parametrize("thinned", [*THINNED, *sorted(LONG)])
def test_thinned_tests_exist(thinned):
    file, name = thinned.split("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
