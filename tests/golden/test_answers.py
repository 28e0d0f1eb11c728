"""`tune`, `simulate` and `plan` answer what they answered: every number, schedule, exit code and key."""

import pytest

from tests.golden.cases import read
from tests.golden.commands import COMMANDS, answers


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_answers_are_what_they_were(number):
    command = COMMANDS[number]
    current, golden = _flat(answers((command,))[command]), _flat(read("answers.json")[command])
    assert current.keys() == golden.keys()
    for path, value in golden.items():
        expected = pytest.approx(value, rel=1e-6, abs=0) if isinstance(value, float) else value
        assert current[path] == expected, path


def _flat(value, path=""):
    """Every number and text by its path, and the lengths of lists."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"{path}#": len(value)} | {k: v for key, item in items for k, v in _flat(item, f"{path}/{key}").items()}
    return {path: value}
