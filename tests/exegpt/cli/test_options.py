"""Options objects of commands."""

import inspect
from dataclasses import dataclass, fields

import pytest

from exegpt import cli
from exegpt.api.bench import BenchOptions
from exegpt.api.offline_run import RunOptions
from exegpt.api.profiling import ProfileOptions
from exegpt.cli.bench import bench
from exegpt.cli.bench_serve import serve
from exegpt.cli.options import build, directories
from exegpt.cli.profile import profile
from exegpt.cli.run import run
from exegpt.loadtest.load_options import LoadOptions
from xcore.errors import InputError


@dataclass(frozen=True)
class Pair:
    first: int
    second: str


def test_a_field_is_the_parameter_of_its_name():
    assert build(Pair, {"second": "b", "first": 1, "json": True}) == Pair(1, "b")
    with pytest.raises(KeyError, match="second"):
        build(Pair, {"first": 1})


def test_a_model_has_one_directory():
    assert directories(["a=x", "b=y", "a=x"]) == {"a": "x", "b": "y"}
    with pytest.raises(InputError, match="--model has 'x' and 'z' for model 'a': leave one of them out"):
        directories(["a=x", "a=z"])


@pytest.mark.parametrize(("command", "line"), [("engine", ""), ("serve", "exegpt: Interrupted.\n")])
def test_an_engine_leaves_it_to_its_server_to_say_that_it_was_interrupted(command, line, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_check_given", interrupted)
    assert cli.main([command]) == 130
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        (bench, BenchOptions, set()),
        (profile, ProfileOptions, set()),
        (run, RunOptions, {"policies", "fixed"}),
        (serve, LoadOptions, set()),
    ],
)
def test_every_option_reaches_the_object(command, options, expected):
    """But for those of the output, and those that `made` fields stand for."""
    names = {field.name.removesuffix("_s") for field in fields(options)}
    typed = set(inspect.signature(command).parameters) - {"json", "plot", "context", "plugin"}
    assert names - expected <= typed
    if not expected:
        assert names == typed
