"""A tiny model, its profile and a schedule for it, made once by the commands themselves."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from exegpt.cli import main


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and its two outputs."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def run_command(*arguments: object) -> Done:
    """Run `exegpt` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(a) for a in arguments])
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def exegpt():
    """The command as a function of its arguments."""
    return run_command


@pytest.fixture(scope="module", autouse=True)
def short_frontiers():
    """Reports draw the frontier of two bounds and not of eight, each of which is a search under all policies."""
    from xscheduler.setting_search import frontier_bounds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier_bounds, "__defaults__", (1,))
        yield


SIZES = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 64 --vocab 300 --context 128"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A model directory of a few thousand weights."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    assert run_command("model", "create", directory, *SIZES.split()).code == 0
    return directory


@pytest.fixture(scope="session")
def tiny_profile(tiny, tmp_path_factory) -> Path:
    """A profile for the tiny model that depends on no clock."""
    from tests.xcore.small_specs import profile
    from xcore import document
    from xcore.specs.model import ModelSpec

    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    document.write(path, profile(ModelSpec.from_directory(tiny)))
    return path


@pytest.fixture(scope="session")
def tiny_schedule(tiny, tiny_profile, tmp_path_factory) -> Path:
    """The schedule that `tune` finds for it."""
    path = tmp_path_factory.mktemp("schedules") / "schedule.json"
    done = run_command(
        *("tune", "-l", "inf", "--model", tiny, "--workload", "20/10", "--profile", tiny_profile, "--policy", "rra"),
        *("--out", path),
    )
    assert done.code == 0, done.err
    return path
