"""The sample of mutants is that of its seed, and the lists of tests and of equivalent mutants are up to date."""

from pathlib import Path

import pytest
import yaml

from tests.mutants import judges
from tests.mutants.judges import BESIDE, LONG, TESTS

ROOT = Path(__file__).resolve().parents[2]
LISTED = yaml.safe_load((ROOT / "tests/mutants/equivalent.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", LISTED, ids=lambda entry: f"{entry['module']}: {entry['after']}")
def test_an_equivalent_mutant_is_of_a_line_that_is_there_and_has_a_reason(entry):
    assert set(entry) == {"module", "before", "after", "why"} and entry["why"].endswith(".")
    lines = (ROOT / entry["module"]).read_text(encoding="utf-8").splitlines()
    assert entry["before"] in " ".join(map(str.strip, lines)) and entry["before"] != entry["after"]


def test_a_seed_gives_its_own_mutants_at_different_places(tmp_path):
    pytest.importorskip("cosmic_ray", reason="the extra 'mutants' is not installed")
    from tests.mutants.sample import sample

    (tmp_path / "some").mkdir()
    code = "@dataclass(frozen=True)\nclass Box:\n" + "".join(f"    x{i}: int = 1{i}\n" for i in range(9))
    code += "    def open(self, *, lid):\n        return lid\n"
    (tmp_path / "some/module.py").write_text(code)
    first, again, other = (sample(tmp_path, "some", 5, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({mutant.line for mutant in first}) == 5
    numbers = [[int(text.split("=")[1]) for text in (mutant.before, mutant.after)] for mutant in first]
    assert all(abs(before - after) == 1 for before, after in numbers)
    assert len(sample(tmp_path, "some", 99, 1)) == 9, "the decorator's arguments and `*` are left alone"


@pytest.mark.parametrize("start", TESTS)
def test_the_tests_that_judge_are_there_and_so_are_the_modules(start):
    modules = [path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"{start}*") if path.name != "__pycache__"]
    assert modules, "no such module"
    assert [name for name in TESTS[start].split() if not (ROOT / "tests" / name).exists()] == []
    own, others = judges.tests_of(f"{start}/some.py")
    assert {*own} <= {f"tests/{name}" for names in BESIDE.values() for name in names.split()}
    assert others and all((ROOT / name).is_file() for name in others)
    assert len(others) == len(set(others)) and not set(others) & set(LONG)


@pytest.mark.parametrize("start", BESIDE)
def test_tests_of_other_folders_judge_the_modules_that_they_see_first_and_once(start):
    modules = [path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"{start}*.py")]
    assert modules, "no such module"
    for module in modules:
        own, others = judges.tests_of(module)
        named = [f"tests/{name}" for name in BESIDE[start].split()]
        assert set(named) <= set(own) and all((ROOT / name).is_file() for name in named)
        assert len({*own, *others}) == len(own) + len(others)


@pytest.mark.parametrize("path", LONG)
def test_a_long_test_judges_the_module_of_its_name_first_and_no_folder(path):
    module = f"{Path(path).relative_to('tests').parent}/{Path(path).stem.removeprefix('test_')}.py"
    assert (ROOT / path).is_file() and (ROOT / module).is_file()
    assert judges.tests_of(module)[0] == [path]
