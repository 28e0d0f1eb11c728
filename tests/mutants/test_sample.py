"""The sample of mutants is that of its seed, and the lists of tests and of equivalent mutants are up to date."""

from pathlib import Path

import pytest
import yaml

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
