"""Request lists for a model directory: read from files, or drawn from a workload."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.columns import parse_columns
from xcore.requests.request import Request
from xcore.specs.model import ModelSpec
from xcore.specs.workload import RequestLengths, Workload
from xcore.tokenizer import TOKENIZER, load_tokenizer
from xcore.tokenizer import encode as encode_text
from xcore.traces.fit_context import fit_context

if TYPE_CHECKING:
    from xcore.requests.requests import Rejected


def read_for_model(
    source: str,
    directory: Path,
    spec: ModelSpec,
    columns: str | None,
    seed: int,
    note: Callable[[str], None],
    skip_invalid: bool = False,
    scale: bool = False,
) -> "tuple[list[Request], list[Rejected]]":
    """Read the requests of a file: those that the model can run, and those that it can't.

    The options are those of `read_requests`. A trace's rows beyond the context are left out; with `scale`, all its
    lengths are scaled instead.
    """
    from xcore.requests.requests import read_requests

    tokenizer = load_tokenizer(directory)
    encode = partial(encode_text, tokenizer) if tokenizer else None
    named = parse_columns(columns) if columns else None
    check = grammar_check(directory, spec)
    fit = fitted_to_context(Path(source).name, spec, note, scale)
    return read_requests(
        source, spec, encode, seed=seed, columns=named, skip_invalid=skip_invalid, note=note, check=check, fit=fit
    )


def fitted_to_context(
    name: str, spec: ModelSpec, note: Callable[[str], None], scale: bool
) -> Callable[[Sequence[RequestLengths]], tuple[RequestLengths, ...]]:
    """Return a function that leaves a trace's rows beyond a model's context out, or scales all, and notes this."""

    def fit(rows: Sequence[RequestLengths]) -> tuple[RequestLengths, ...]:
        fitted, notes = fit_context(Workload.from_requests(name, rows), spec, scale)
        for text in notes:
            note(text)
        return fitted.requests or ()

    return fit


def grammar_check(directory: Path, spec: ModelSpec, prepare: bool = False) -> Callable[[Request], None]:
    """Return a function that raises InputError, naming the id, for a request whose grammar can't be followed.

    The tokenizer is read with the first such request; with `prepare`, at once.
    """
    from xcore.requests.grammar import Grammars

    grammars = Grammars(directory / TOKENIZER, frozenset(), spec.vocab)
    if prepare:
        grammars.prepare()
    return grammars.check


def draw(workload: Workload, num: int, seed: int, longest: int | None) -> tuple[RequestLengths, ...]:
    """Draw `num` requests of a workload, all of which arrive at the start."""
    return tuple(replace(row, arrival_s=0.0) for row in workload.draw(num, seed, longest))
