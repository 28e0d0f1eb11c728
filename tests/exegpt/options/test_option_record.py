"""Commands whose parameters are the fields of an options record."""

import inspect
from dataclasses import FrozenInstanceError, dataclass, fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from exegpt.cli.app import app
from exegpt.options.option_record import argument, command, option, option_name, option_words, required, typed_options
from exegpt.options.shared_options import ControlOptions, JsonOption, PredictionOptions
from exegpt.options.simulate import PlanSimulationOptions, SimulateOptions


@dataclass(frozen=True, kw_only=True)
class Paint(JsonOption):
    """A colour and where it goes."""

    what: Path = argument("What is painted.")
    coats: int = option(2, "How often.", "-c", min=1)
    colours: list[str] | None = option(None, "The colours.", "--colour")
    by: str = required("The painter.", "-b")


def run(*words):
    """The record that a command gets, and its exit code."""
    got = []

    @command
    def paint(options: Paint) -> int:
        """Paint something."""
        got.append(options)
        return 3

    one = typer.Typer(rich_markup_mode=None)
    one.command()(paint)
    return got, CliRunner().invoke(one, [str(word) for word in words])


def test_a_command_gets_its_record():
    (options,), _ = run("wall", "-b", "me", "-c", 3, "--colour", "red", "--colour", "blue", "--json")
    assert options == Paint(what=Path("wall"), by="me", coats=3, colours=["red", "blue"], json=True)
    with pytest.raises(FrozenInstanceError):
        options.coats = 1
    (options,), _ = run("wall", "-b", "me")
    assert options == Paint(what=Path("wall"), by="me")


def test_a_field_without_a_default_is_required():
    for words, missing in (((), "what"), (("wall",), "--by")):
        got, done = run(*words)
        assert not got and done.exit_code == 2 and missing in done.output.lower()


def test_only_a_flag_with_an_opposite_name_has_an_opposite():
    flags = {name: run("wall", "-b", "me", name)[1].exit_code for name in ("--json", "--no-json")}
    assert flags == {"--json": 0, "--no-json": 2}


def test_own_fields_come_before_those_of_the_bases():
    @command
    def paint(options: Paint) -> None: ...

    assert list(inspect.signature(paint).parameters) == ["typer_context", "what", "coats", "colours", "by", "json"]


def test_a_group_does_nothing_if_a_subcommand_follows():
    got = []

    @command
    def group(options: JsonOption) -> None:
        got.append(options)

    both = typer.Typer(rich_markup_mode=None)
    both.callback(invoke_without_command=True)(group)
    both.command("sub")(lambda: got.append("sub"))
    CliRunner().invoke(both, ["sub"])
    CliRunner().invoke(both, ["--json"])
    assert got == ["sub", JsonOption(json=True)]


def test_options_with_other_values_than_the_defaults_are_typed():
    options = SimulateOptions(seed=1, max_num_seqs=4, rate=None, plan=Path("p.json"))
    assert typed_options(options, SimulateOptions) == {"seed": 1, "max_num_seqs": 4, "plan": Path("p.json")}
    assert typed_options(options, PlanSimulationOptions) == {"plan": Path("p.json")}
    assert options.fixed == {"max_num_seqs": 4}


def test_an_option_is_written_as_words():
    assert option_words("memory_fraction", 0.9) == ["--gpu-memory-fraction", "0.9"]
    assert option_words("best_effort", True) == ["--best-effort"]
    assert option_words("prefix_caching", False) == ["--no-prefix-caching"]


def commands(group=None, prefix=""):
    """Every command, and every group that is a command too, by its words."""
    group = group or typer.main.get_command(app)
    found = {}
    for name, one in group.commands.items():
        found[f"{prefix}{name}"] = one
        if hasattr(one, "commands"):
            found |= commands(one, f"{prefix}{name} ")
    return found


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_option_is_a_field_of_a_record(name):
    """Each has the field's name, which refusals print."""
    one = commands()[name]
    names = {field.name for kind in (ControlOptions, PredictionOptions) for field in fields(kind)}
    for parameter in one.params:
        if parameter.name in names:
            assert option_name(parameter.name) in parameter.opts
        if parameter.name not in ("help", "what", "version"):
            assert getattr(parameter, "hidden", False) or getattr(parameter, "help", None), parameter.name
