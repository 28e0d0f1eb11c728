"""Requests from JSONL files, standard input or traces: all are read and checked before any work begins."""

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from xcore.columns import has_column
from xcore.document import parse_json, read_lines
from xcore.errors import InputError, TooLong
from xcore.requests.request import Request, Result
from xcore.specs.model import ModelSpec
from xcore.specs.workload import RequestLengths
from xcore.traces.labels import Labels
from xcore.traces.trace import AFTER, LABELS, Note, form_of, labels_of, read_labels, read_trace, silent

Encode = Callable[[str], Sequence[int]]
"""A function from text to token ids."""

_MOST = float(np.finfo(np.float32).max)  # the dtype of sampling; a whole number in JSON has no limit
_LEAST = 1e-4
"""Least divisor of logits; a smaller one makes them overflow."""
LATEST_S = 30 * 24 * 3600
"""Latest arrival in seconds; a later one is probably a date, for which the run would wait for decades."""
_CHOICE: dict[str, tuple[type[float], Callable[[Any], bool], str]] = {
    "temperature": (
        float,
        lambda value: not value or _LEAST <= value <= _MOST,
        f"0 (greedy), or at least {_LEAST}",
    ),
    "top_k": (int, lambda value: 0 <= value < 2**31, "a whole number of at least 0 (0: all tokens)"),
    "top_p": (float, lambda value: 0 < value <= 1, "a number above 0 and at most 1 (1: all tokens)"),
    "repetition_penalty": (
        float,
        lambda value: _LEAST <= value <= _MOST,
        (f"a number of at least {_LEAST} (1: no penalty)"),
    ),
    "seed": (int, lambda value: -(2**63) <= value < 2**63, "a whole number of 64 bits"),
    "frequency_penalty": (float, lambda value: -2 <= value <= 2, "a number from -2 to 2 (0: no penalty)"),
    "presence_penalty": (float, lambda value: -2 <= value <= 2, "a number from -2 to 2 (0: no penalty)"),
    "min_p": (float, lambda value: 0 <= value <= 1, "a number from 0 (all tokens) to 1"),
    "logprobs": (int, lambda value: 0 <= value <= 20, "a whole number from 0 to 20"),
    "min_tokens": (int, lambda value: 0 <= value < 2**31, "a whole number of at least 0"),
}
"""Keys of sampling and of reports: each key's type, its allowed values, and their description."""
_MOST_BIAS = 100.0
_MOST_DIGITS = 10
"""Most digits of a token id in text."""
_PLAIN = ("id", "prompt", "prompt_ids", "max_tokens", "ignore_eos", "arrival_s")
_KEYS = (*_PLAIN, *_CHOICE, "logit_bias", "stop_token_ids", "grammar", "prompt_logprobs", *LABELS)


@dataclass(frozen=True)
class Rejected:
    """A request that can't be run: its result, and the reason."""

    result: Result
    reason: str


def random_requests(lengths: Iterable[RequestLengths], vocab: int, seed: int) -> list[Request]:
    """Draw random prompts with these lengths; outputs have exactly their lengths, ids are the rows' indices."""
    rng = np.random.default_rng(seed)
    return [
        Request(str(i), tuple(rng.integers(0, vocab, size=row.input).tolist()), row.output, True, row.arrival_s)
        for i, row in enumerate(lengths)
    ]


def read_requests(
    source: str,
    model: ModelSpec,
    encode: Encode | None,
    *,
    seed: int = 0,
    columns: dict[str, str] | None = None,
    skip_invalid: bool = False,
    note: Note = silent,
    check: Callable[[Request], object] = lambda request: None,
    fit: Callable[[Sequence[RequestLengths]], Sequence[RequestLengths]] = tuple,
) -> tuple[list[Request], list[Rejected]]:
    """Read requests for `model` from a JSONL file, a trace (lengths alone) or standard input (`-`).

    Args:
        source: Path, or `-`.
        model: Model that runs the requests.
        encode: The model's tokenizer; None if it has none.
        seed: Seed of a trace's random prompts.
        columns: A trace's columns by name.
        skip_invalid: Return wrong requests separately instead of raising InputError.
        note: As in `xcore.traces.trace.read_trace`.
        check: Raises InputError for another reason why a request can't be run: a grammar (`Grammars.check`).
        fit: Changes a trace's lengths.

    Raises:
        InputError: Names the first request that is wrong.
    """
    entries: Iterable[tuple[str, str | Request]]
    if is_trace(source, columns):
        rows = read_trace(source, columns, note)
        if any(row.identity for row in rows):
            note(f"shared prefixes of the prompts in '{source}' are not used: the prompts are drawn at random")
        fitted = fit(rows)
        labels = labels_of(read_labels(source, columns), rows, fitted, model.longest_request)
        if any(own.after_s is not None for own in labels):
            raise InputError(
                f"'{source}' has a column {AFTER}, which only `exegpt simulate` follows: give each request its arrival."
            )
        drawn = random_requests(fitted, model.vocab, seed)
        drawn = [_labelled(request, own) for request, own in zip(drawn, labels, strict=True)]
        entries = ((f"row {i}", request) for i, request in enumerate(drawn, 1))
    elif columns:
        named = ",".join(f"{column}={name}" for column, name in columns.items())
        raise InputError(
            f"--columns {named} names columns of a trace, but '{source}' is not a trace: leave --columns out."
        )
    else:
        entries = request_lines(source)
    requests: list[Request] = []
    failed: list[tuple[str, str | None, int, str]] = []
    seen: set[str] = set()
    for where, entry in entries:
        try:
            request = entry if isinstance(entry, Request) else _parse(entry, where, encode)
            if request.id in seen:
                raise InputError(
                    f"Request '{request.id}' ({where}) has the same id as an earlier request: ids must be unique."
                )
            check_request(request, model)
            check(request)
        except InputError as error:
            if not skip_invalid:
                raise
            request_id = _own_id(entry, where)
            tokens = len(entry.prompt_ids) if isinstance(entry, Request) else 0
            failed.append((where, None if request_id in seen else request_id, tokens, str(error)))
            seen |= {request_id} if request_id else set()
            continue
        seen.add(request.id)
        requests.append(request)
    if not requests and not failed:
        where = "Standard input" if source == "-" else f"'{source}'"
        raise InputError(f"{where} has no requests: write one JSON object per line.")
    return requests, [
        Rejected(Result(own or _unused(where, seen), tokens, (), "error", 0.0, None, None, 0.0), reason)
        for where, own, tokens, reason in failed
    ]


def _labelled(request: Request, own: Labels) -> Request:
    return replace(
        request,
        client=own.client,
        application=own.application,
        run=own.run,
        unit=own.unit,
        deadline_s=own.deadline_s,
    )


def check_request(request: Request, model: ModelSpec, skippable: bool = True) -> None:
    """Raise InputError, naming the id, unless `model` can run this request.

    `skippable`: its command has --skip-invalid.
    """
    name = f"Request '{request.id}'"
    if not request.prompt_ids:
        raise InputError(f"{name} has an empty prompt: it needs at least one token.")
    if request.max_tokens < 1:
        raise InputError(f"{name} has max_tokens = {request.max_tokens}: it must be at least 1.")
    if len(request.output_ids) >= request.max_tokens:
        raise InputError(
            f"{name} already has {len(request.output_ids)} output tokens, but max_tokens = {request.max_tokens}: "
            "raise max_tokens."
        )
    outside = next((i for i in (*request.prompt_ids, *request.output_ids) if not 0 <= i < model.vocab), None)
    if outside is not None:
        raise InputError(
            f"{name} has the token id {outside}, but the model's vocabulary is 0 to {model.vocab - 1}: correct the "
            "token id."
        )
    _check_choice(request, model.vocab)
    if request.prompt_logprobs and model.encoder_layers:
        raise InputError(
            f"{name} asks for prompt_logprobs, but an encoder-decoder has none for prompts: remove prompt_logprobs."
        )
    tokens = len(request.prompt_ids) + request.max_tokens
    if model.longest_request is not None and tokens > model.longest_request:
        parts = f"{len(request.prompt_ids):,} for the prompt and {request.max_tokens:,} for the output"
        skipped = ", or skip it with --skip-invalid" if skippable else ""
        raise TooLong(
            f"{name} needs {tokens:,} tokens ({parts}), but the model's context is {model.longest_request:,}: "
            f"shorten it{skipped}."
        )


def _check_choice(request: Request, vocab: int) -> None:
    """Raise InputError, naming the id, unless a request's sampling options are possible."""
    name = f"Request '{request.id}'"
    for key, (_, holds, text) in _CHOICE.items():
        value = getattr(request, key)
        if value is not None and not holds(value):
            raise InputError(f"{name} has {key} = {value!r}: it must be {text}.")
    if request.min_tokens > request.max_tokens:
        raise InputError(f"{name} has min_tokens = {request.min_tokens}: it must be at most max_tokens.")
    if (request.logprobs or 0) > vocab:
        raise InputError(f"{name} has logprobs = {request.logprobs}, but the vocabulary has only {vocab} tokens.")
    biased = [token for token, _ in request.logit_bias]
    for key, tokens in (("logit_bias", biased), ("stop_token_ids", request.stop_token_ids)):
        outside = next((token for token in tokens if not 0 <= token < vocab), None)
        if outside is not None:
            raise InputError(f"{name} has the token id {outside} in {key}, but the vocabulary is 0 to {vocab - 1}.")
    if len(set(biased)) < len(biased):
        raise InputError(f"{name} has two logit_bias values for the same token.")
    unusable = next((bias for _, bias in request.logit_bias if not abs(bias) <= _MOST_BIAS), None)
    if unusable is not None:
        raise InputError(f"{name} has a logit_bias of {unusable!r}: it must be a number from -100 to 100.")


def is_trace(source: str, columns: dict[str, str] | None = None) -> bool:
    """Return whether a file holds lengths alone: CSV, Parquet, or JSONL whose first object has no prompt.

    That object must have a trace's column, by one of the usual names or of those in `columns`.
    """
    form = None if source == "-" else form_of(source)
    if form != ".jsonl":
        return form is not None
    for _, line in request_lines(source):
        try:
            first = parse_json(line, "it")
        except InputError:
            return False
        if not isinstance(first, dict) or {"prompt", "prompt_ids"} & first.keys():
            return False
        return has_column(first) or bool(set((columns or {}).values()) & first.keys())
    return False


def request_lines(source: str) -> Iterator[tuple[str, str]]:
    """Yield (where, text) of every line that isn't blank."""
    lines = _standard_input() if source == "-" else read_lines(Path(source), "request file")
    try:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"line {number}", line
    except UnicodeDecodeError as error:
        raise InputError(f"Standard input is not in UTF-8: {error}.") from None


def _standard_input() -> Iterable[str]:
    """Return the lines of standard input: in UTF-8 for any locale, without a byte order mark."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    return sys.stdin


def _parse(line: str, where: str, encode: Encode | None) -> Request:
    return request_of(read_entry(line, where), where, encode)


def read_entry(line: str, where: str) -> dict[str, object]:
    """Return the keys of a request in a line of JSON."""
    entry = parse_json(line, f"The request in {where}")
    if not isinstance(entry, dict):
        raise InputError(f"The request in {where} is not a JSON object: {line.strip()[:60]!r}.")
    return entry


def request_of(entry: dict[str, Any], where: str, encode: Encode | None) -> Request:
    """Build the request of these keys; InputError if they are wrong."""
    if not isinstance(entry.get("id"), str) or not entry["id"]:
        raise InputError(f"The request in {where} has no id: each request needs a unique id (a string).")
    name = f"Request '{entry['id']}'"
    unknown = next((key for key in entry if key not in _KEYS), None)
    if unknown:
        raise InputError(f"{name} has the unknown key '{unknown}': the known keys are {', '.join(_KEYS)}.")
    if "max_tokens" not in entry:
        raise InputError(f"{name} has no max_tokens: each request needs a maximum number of output tokens.")
    if not _is_int(entry["max_tokens"]):
        raise InputError(f"{name} has max_tokens = {entry['max_tokens']!r}: it must be a whole number.")
    if not isinstance(entry.get("ignore_eos", False), bool):
        raise InputError(f"{name} has ignore_eos = {entry['ignore_eos']!r}: it must be true or false.")
    arrival = entry.get("arrival_s", 0.0)
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival <= LATEST_S:
        raise InputError(
            f"{name} has arrival_s = {arrival!r}: it must be the seconds since the start of the run, from 0 to "
            f"{LATEST_S:,}."
        )
    ids = tuple(_prompt_ids(entry, name, encode))
    choice = _choice(entry, name)
    return Request(entry["id"], ids, entry["max_tokens"], entry.get("ignore_eos", False), float(arrival), **choice)


def _choice(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the sampling options that the request has."""
    choice = {}
    for key, (kind, holds, text) in _CHOICE.items():
        value = entry.get(key)
        if value is None:
            continue
        usable = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
        if not usable or not holds(value):
            raise InputError(f"{name} has {key} = {value!r}: it must be {text}.")
        choice[key] = kind(value)
    return choice | {key: read(entry[key], name) for key, read in _OTHERS.items() if entry.get(key) is not None}


def _logit_bias(value: object, name: str) -> tuple[tuple[int, float], ...]:
    """Return the additions to tokens' logits by their ids, which are text in JSON as in OpenAI's API."""
    if not isinstance(value, dict) or not all(
        token.isdecimal() and len(token) <= _MOST_DIGITS and _is_number(bias) for token, bias in value.items()
    ):
        raise InputError(f'{name} has a logit_bias that is not token ids with numbers, such as {{"50256": -100}}.')
    return tuple((int(token), bias) for token, bias in value.items())  # a whole number may be too large for a float


def _stop_token_ids(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(_is_int, value)):
        raise InputError(f"{name} has stop_token_ids that are not a list of whole numbers.")
    return tuple(value)


def _grammar(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} has a grammar that is not text.")
    return value


def _prompt_logprobs(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} has prompt_logprobs = {value!r}: it must be true or false.")
    return value


def _name(key: str) -> Callable[[object, str], str]:
    """Return a function that reads a key whose value is a text."""

    def read(value: object, name: str) -> str:
        if not isinstance(value, str) or not value:
            raise InputError(f"{name} has {key} = {value!r}: it must be a text.")
        return value

    return read


def _deadline(value: object, name: str) -> float:
    if not _is_number(value) or not 0 <= value <= LATEST_S:
        raise InputError(
            f"{name} has deadline_s = {value!r}: it must be the seconds after the request's arrival, from 0 to "
            f"{LATEST_S:,}."
        )
    return float(value)


_OTHERS: dict[str, Callable[[object, str], object]] = {
    "logit_bias": _logit_bias,
    "stop_token_ids": _stop_token_ids,
    "grammar": _grammar,
    "prompt_logprobs": _prompt_logprobs,
    "client": _name("client"),
    "application": _name("application"),
    "run": _name("run"),
    "unit": _name("unit"),
    "deadline_s": _deadline,
}
"""Keys whose values aren't numbers, and the functions that read them."""


def _prompt_ids(entry: dict[str, Any], name: str, encode: Encode | None) -> Sequence[int]:
    if ("prompt" in entry) == ("prompt_ids" in entry):
        raise InputError(f"{name} needs either prompt or prompt_ids, not both.")
    if "prompt" not in entry:
        if not isinstance(entry["prompt_ids"], list) or not all(map(_is_int, entry["prompt_ids"])):
            raise InputError(f"{name} has prompt_ids that are not a list of whole numbers.")
        return entry["prompt_ids"]
    if not isinstance(entry["prompt"], str):
        raise InputError(f"{name} has a prompt that is not text: {entry['prompt']!r}.")
    if encode is None:
        raise InputError(f"{name} has a text prompt, but the model has no tokenizer.json: pass prompt_ids instead.")
    try:
        return encode(entry["prompt"])
    except InputError as error:
        raise InputError(f"{name} has a text prompt, and {error}") from None


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _own_id(entry: str | Request, where: str) -> str | None:
    """Return the id of a request that can't be run; None if its id isn't usable."""
    if isinstance(entry, Request):
        return entry.id
    try:
        given = parse_json(entry, where)["id"]
    except (InputError, KeyError, TypeError):
        return None
    return given if isinstance(given, str) and given else None


def _unused(where: str, seen: set[str]) -> str:
    """Return a name for a request by its place in the source; no other request there has it."""
    while where in seen:
        where += "′"
    return where
