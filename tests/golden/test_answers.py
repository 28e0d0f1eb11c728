"""`tune`, `simulate` and `plan` answer what they answered: every number, schedule, exit code and key."""

import pytest

from tests.golden.cases import read
from tests.golden.commands import COMMANDS, answers
from xcore.policies import TRAITS
from xcore.specs.schedule_versions import DEGREES, OF_VERSION_1, declared


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_answers_are_what_they_were(number):
    command = COMMANDS[number]
    golden = _version_2(read("answers.json")[command])
    current, golden = _flat(_pruned(answers((command,))[command], golden)), _flat(golden)
    assert current.keys() == golden.keys()
    for path, value in golden.items():
        expected = pytest.approx(value, rel=1e-6, abs=0) if isinstance(value, float) else value
        assert current[path] == expected, path


def _version_2(value):
    """The answers, recorded with schedules of version 1, in the shape of version 2."""
    if isinstance(value, list):
        return [_version_2(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("version") == 1 and "policy" in value:
        own = declared(TRAITS[value["policy"]].control)
        others = {name: value[name] for name in OF_VERSION_1 if name not in own}
        assert not any(others.values())
        null = [name for name in DEGREES if value[name] is None]
        rest = {name: item for name, item in value.items() if name not in {*OF_VERSION_1, *null}}
        return {**rest, "version": 2, "control": {name: value[name] for name in own}}
    return {key: _version_2(item) for key, item in value.items()}


def _pruned(value, golden):
    """The answer without the tensor parallelism that version 1 left out: that of the stages."""
    if isinstance(value, list):
        return [_pruned(*pair) for pair in zip(value, golden, strict=True)]
    if not isinstance(value, dict):
        return value
    return {key: _pruned(item, golden.get(key)) for key, item in value.items() if key in golden or key not in DEGREES}


def _flat(value, path=""):
    """Every number and text by its path, and the lengths of lists."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {f"{path}#": len(value)} | {k: v for key, item in items for k, v in _flat(item, f"{path}/{key}").items()}
    return {path: value}
