"""Requests of several models in one file: each names its model of the plan."""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from xcore.errors import InputError
from xcore.requests.request import Request
from xcore.requests.request_lists import fitted_to_context, grammar_check
from xcore.requests.requests import (
    Encode,
    check_request,
    is_trace,
    random_requests,
    read_entry,
    request_lines,
    request_of,
)
from xcore.specs.cluster_plan import Plan, PlannedModel
from xcore.specs.workload import RequestLengths
from xcore.tokenizer import encode, load_tokenizer
from xcore.traces.trace import Note, read_model_trace, silent


def read_plan_requests(
    source: str,
    plan: Plan,
    seed: int,
    columns: dict[str, str] | None = None,
    note: Note = silent,
    scale: bool = False,
) -> dict[str, list[Request]]:
    """Read the requests of each model, which their key `model` names.

    The source is JSONL, standard input (`-`), or a trace (lengths only). A trace's column names and notes are as in
    `xcore.traces.trace.read_trace`. Rows beyond the models' contexts are left out, or lengths are scaled to them.

    Raises:
        InputError: A request is wrong; the message names the first.
    """
    if is_trace(source, columns):
        of_models = {name: replicas[0] for name, replicas in plan.replicas.items()}
        lengths = read_model_trace(source, of_models, columns, note)
        for name, rows in lengths.items():
            if rows:
                fit = fitted_to_context(name, of_models[name].schedule.model.spec, note, scale)
                lengths[name] = list(fit(rows))
        return {name: _made_up(of_models[name], rows, seed) for name, rows in lengths.items()}
    if columns:
        raise InputError(f"--columns names columns of a trace, but '{source}' is not a trace: leave it out.")
    readers = {name: _Reader.of(replicas[0]) for name, replicas in plan.replicas.items()}
    requests: dict[str, list[Request]] = {}
    seen: set[str] = set()
    for where, line in request_lines(source):
        entry = read_entry(line, where)
        model = entry.pop("model", None)
        if not isinstance(model, str) or model not in readers:
            asked = "names no model" if model is None else f"is for model {reprlib.repr(model)}"
            raise InputError(f"The request in {where} {asked}: write one of {', '.join(readers)} as model.")
        request = readers[model].read(entry, where)
        if request.id in seen:
            raise InputError(
                f"Request '{request.id}' ({where}) has the same id as an earlier request: ids must be unique."
            )
        seen.add(request.id)
        requests.setdefault(model, []).append(request)
    if not requests:
        raise InputError(f"'{source}' has no requests: write one JSON object per line.")
    return requests


def _made_up(model: PlannedModel, rows: Sequence[RequestLengths], seed: int) -> list[Request]:
    spec = model.schedule.model.spec
    drawn = [replace(r, id=f"{model.name}/{r.id}") for r in random_requests(rows, spec.vocab, seed)]
    for request in drawn:
        check_request(request, spec, skippable=False)
    return drawn


@dataclass(frozen=True)
class _Reader:
    """Reads one model's requests."""

    model: PlannedModel
    encode: Encode | None
    check: Callable[[Request], None]

    @staticmethod
    def of(model: PlannedModel) -> "_Reader":
        directory = Path(str(model.directory))
        tokenizer = load_tokenizer(directory)
        encoding = partial(encode, tokenizer) if tokenizer else None
        return _Reader(model, encoding, grammar_check(directory, model.schedule.model.spec))

    def read(self, entry: dict[str, object], where: str) -> Request:
        request = request_of(entry, where, self.encode)
        check_request(request, self.model.schedule.model.spec, skippable=False)
        self.check(request)
        return request
