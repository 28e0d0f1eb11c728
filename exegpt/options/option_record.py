"""Options as fields of a record, and commands of functions that take one record."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Record = TypeVar("Record")
Value = TypeVar("Value")


def option(
    default: Value,
    help: str,
    *names: str,
    min: float | None = None,
    max: float | None = None,
    hidden: bool = False,
    callback: Callable[[Value], Value] | None = None,
    is_eager: bool = False,
) -> Value:
    """Return the field of an option with these names: short names, or a long name that replaces the field's name.

    The other arguments are those of `typer.Option`.
    """
    settings = {"min": min, "max": max, "hidden": hidden, "callback": callback, "is_eager": is_eager}
    value: Value = field(default=default, metadata={"names": names, "settings": {"help": help, **settings}})
    return value


def required(help: str, *names: str) -> Any:
    """Return the field of an option that a command needs."""
    return field(metadata={"names": names, "settings": {"help": help}})


def argument(help: str, default: Any = MISSING, metavar: str | None = None) -> Any:
    """Return the field of a positional argument; it is required without a default."""
    return field(default=default, metadata={"settings": {"help": help, "metavar": metavar}})


def command(run: Callable[[Record], int | None]) -> Callable[..., int | None]:
    """Return the command that calls `run` with its options record, unless a subcommand follows.

    Each field of the record is a parameter: an `option`, a `required` option or an `argument`. A record's own fields
    come first, then those of its bases from left to right.
    """
    (kind,) = (parameter.annotation for parameter in inspect.signature(run).parameters.values())

    def called(typer_context: typer.Context, **typed: Any) -> int | None:
        return None if typer_context.invoked_subcommand else run(kind(**typed))

    context = inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    called.__name__, called.__doc__ = run.__name__, run.__doc__
    called.__dict__["__signature__"] = inspect.Signature([context, *_parameters(kind)])  # Typer reads this one
    return called


def _parameters(kind: type) -> list[inspect.Parameter]:
    types, by_name = get_type_hints(kind), {each.name: each for each in fields(kind)}
    names = dict.fromkeys(name for owner in kind.__mro__ for name in inspect.get_annotations(owner))
    return [_parameter(by_name[name], types[name]) for name in names]


def _parameter(each: "Field[Any]", kind: Any) -> inspect.Parameter:
    settings, names = each.metadata["settings"], each.metadata.get("names")
    own = () if names is None or any(name.startswith("--") for name in names) else (option_name(each.name),)
    made = typer.Argument(**settings) if names is None else typer.Option(*own, *names, **settings)
    default = inspect.Parameter.empty if each.default is MISSING else each.default
    annotation = Annotated[kind, made]
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option_name(field: str) -> str:
    """Return the option that sets a field."""
    return f"--{'gpu-' if field == 'memory_fraction' else ''}{field.replace('_', '-')}"


def option_words(field: str, value: object) -> list[str]:
    """Return an option with its value as words of a command line."""
    name = option_name(field)
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [word for each in value for word in (name, str(each))]
    return [name, str(value)]


def typed_options(options: object, kind: type) -> dict[str, object]:
    """Return the fields of a group of options whose values aren't the defaults."""
    values = ((each.name, getattr(options, each.name), each.default) for each in fields(kind))
    return {name: value for name, value, default in values if value != default}
