"""Tests judge the mutants of the lines that they reach, the nearest and the shortest first."""

import subprocess
import sys

import pytest

from tests.mutants import judges
from tests.mutants.judges import FOLDERS, ROOT
from tests.mutants.reached import FOLDERS as ASKED
from tests.mutants.reached import Reached

CODE = """import math

MOST = 3


def largest(values, least=0):
    if not values:
        return least
    return max(
        values[:MOST],
    )


class Box:
    size = 2

    def of(self):
        return self.size
"""
NEAR, FAR = "tests/some/test_module.py::test_", "tests/other/test_all.py::test_"
REACHED = Reached(
    {f"{NEAR}slow": 9.0, f"{NEAR}quick": 1.0, f"{FAR}all": 0.5, f"{FAR}fixture": 2.0},
    {
        "some/module.py": {
            1: [""],
            7: ["", f"{NEAR}slow", f"{NEAR}quick", f"{FAR}all"],
            8: [f"{FAR}all"],
            10: [f"{NEAR}slow"],
            18: ["tests/other/test_all.py"],
        }
    },
)


@pytest.mark.parametrize(
    ("line", "tests"),
    [
        (7, [[f"{NEAR}quick", f"{NEAR}slow"], [f"{FAR}all"]]),
        (8, [[f"{FAR}all"]]),
        (9, [[f"{NEAR}slow"]]),  # of the statement's other line
        (6, [[f"{NEAR}quick", f"{NEAR}slow"], [f"{FAR}all"]]),  # a function's defaults: what reaches its body
        (15, [[f"{FAR}all", f"{FAR}fixture"]]),  # a class's: what reaches its methods; a fixture's: all of its file
        (3, [[f"{NEAR}quick", f"{NEAR}slow"], [f"{FAR}all", f"{FAR}fixture"]]),  # the module's: all that reach it
    ],
)
def test_a_mutant_is_judged_by_what_reaches_its_line(line, tests):
    assert judges.tests_of("some/module.py", line, REACHED, CODE) == tests


def test_no_test_judges_what_none_reaches_and_long_ones_are_left_out(monkeypatch):
    assert judges.tests_of("some/other.py", 7, REACHED, CODE) == []
    monkeypatch.setattr(judges, "MOST_S", 5.0)
    assert judges.tests_of("some/module.py", 7, REACHED, CODE)[0] == [f"{NEAR}quick"]
    assert judges.tests_of("some/module.py", 9, REACHED, CODE) == [[f"{NEAR}slow"]], "one at least"
    monkeypatch.setattr(judges, "MOST", 1)
    assert judges.tests_of("some/module.py", 15, REACHED, CODE) == [[f"{FAR}all"]]


def test_what_is_kept_is_read_again(tmp_path):
    REACHED.write(tmp_path / "reached.json")
    assert Reached.read(tmp_path / "reached.json") == REACHED


def test_folders_are_there():
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)
    assert all((ROOT / "tests" / folder).is_dir() for folder in ASKED.split())


def test_tests_are_recorded_with_their_lines_and_those_of_their_fixtures(tmp_path):
    """In a tree with one module and one file of tests."""
    pytest.importorskip("coverage", reason="the extra 'mutants' is not installed")
    files = {
        "xcore/module.py": CODE,
        "tests/test_module.py": "import pytest\nfrom xcore.module import Box, largest\n"
        "@pytest.fixture(scope='module')\ndef box():\n    return Box().of()\n"
        "def test_largest(box):\n    assert largest([1, 2]) == box\n"
        "def test_box(box):\n    assert box == 2\n"
        "def test_that_fails():\n    assert largest([]) == 1\n",
    }
    files["xmulti/none.py"] = files["xscheduler/none.py"] = files["xsimulator/none.py"] = ""
    for name, text in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    (tmp_path / "tree/tests/mutants").symlink_to(ROOT / "tests/mutants")
    work = "from pathlib import Path; from tests.mutants.reached import record; import sys; "
    work += "record(Path(sys.argv[1]), Path(sys.argv[2]), ['tests/test_module.py'])"
    file = tmp_path / "reached.json"
    subprocess.run([sys.executable, "-c", work, tmp_path / "tree", file], cwd=ROOT, check=True, capture_output=True)
    reached = Reached.read(file)
    names = [f"tests/test_module.py::test_{name}" for name in ("largest", "box")]
    assert sorted(reached.seconds) == sorted(names)
    assert reached.tests("xcore/module.py", 7, 7) == {names[0]} and reached.tests("xcore/module.py", 8, 8) == set()
    assert reached.tests("xcore/module.py", 18, 18) == set(names), "a fixture's lines are those of all its tests"
    assert reached.tests("xcore/module.py", 3, 3) == set()
