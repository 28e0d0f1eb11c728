"""Make a command of a function that takes one record of options."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

import typer

Record = TypeVar("Record")


def command(run: Callable[[Record], int | None]) -> Callable[..., int | None]:
    """Return the command that calls `run` with its options record, unless a subcommand follows.

    Each field of the record, an `Annotated` type with `typer.Option` or `typer.Argument`, is a parameter. A record's
    own fields come first, then those of its bases from left to right.
    """
    (kind,) = (parameter.annotation for parameter in inspect.signature(run).parameters.values())

    def called(typer_context: typer.Context, **typed: Any) -> int | None:
        return None if typer_context.invoked_subcommand else run(kind(**typed))

    context = inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    called.__name__, called.__doc__ = run.__name__, run.__doc__
    called.__dict__["__signature__"] = inspect.Signature([context, *_parameters(kind)])  # Typer reads this one
    return called


def _parameters(kind: type) -> list[inspect.Parameter]:
    types = get_type_hints(kind, include_extras=True)
    defaults = {f.name: inspect.Parameter.empty if f.default is MISSING else f.default for f in fields(kind)}
    names = dict.fromkeys(name for owner in kind.__mro__ for name in inspect.get_annotations(owner))
    by_name = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, by_name, default=defaults[name], annotation=types[name]) for name in names]


def option_name(field: str) -> str:
    """Return the option that sets a field."""
    return f"--{'gpu-' if field == 'memory_fraction' else ''}{field.replace('_', '-')}"


def typed_options(options: object, kind: type) -> dict[str, object]:
    """Return the fields of a group of options whose values aren't the defaults."""
    values = ((field.name, getattr(options, field.name), field.default) for field in fields(kind))
    return {name: value for name, value, default in values if value != default}
