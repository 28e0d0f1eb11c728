"""Traces: the lengths and, if known, the arrivals of real requests, from CSV, JSONL or Parquet files."""

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from xcore.columns import Columns, find_columns
from xcore.document import check_file
from xcore.errors import InputError
from xcore.quantity import figure_text
from xcore.rows import Moment, RowsFile, csv_table, jsonl_table, parquet_table
from xcore.specs.workload import MAX_TOKENS, TASKS, RequestLengths, Workload, task
from xcore.traces.arrival_unit import ArrivalUnit, in_seconds, rate_text, unit_of, unit_text
from xcore.traces.drawn_lengths import FORMS, synthetic_workload
from xcore.traces.labels import Labels
from xcore.traces.prompt_identity import PromptIdentity
from xcore.traces.trace_identity import blocks_note, identity_of

MAX_ROWS = 5_000_000
MAX_SECONDS = 1e9
"""Longest time from the first arrival to the last."""
SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
LABELS = ("client", "application", "run", "unit", "deadline_s")
"""Names of columns, and keys of requests, that say where a request comes from and when it is due."""
AFTER = "after_s"
"""Column of seconds from the end of a run's previous request to this one's arrival."""

Taken = TypeVar("Taken")
Note = Callable[[str], None]
"""A function that takes a sentence about what was read."""


def silent(_: str) -> None:
    """Drop a note."""


def parse_rate(text: str) -> float:
    """Parse a rate, `5/s` or `90/m`, into requests per second; InputError for another form or a rate of zero."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*/\s*(s|m)", text.strip())
    if not match or not 0 < float(match[1]) < math.inf:
        raise InputError(
            f"'{text}' is not an arrival rate: write a positive number per second or minute, like 5/s or 300/m."
        )
    return float(match[1]) / (1 if match[2] == "s" else 60)


def parse_workload(
    text: str, columns: dict[str, str] | None = None, rate: float | None = None, note: Note = silent
) -> Workload:
    """Parse a task of the paper, lengths (fixed as in `2048/256`, or drawn) or a trace file into a workload.

    `rate` is in requests/s; see `read_trace` for `note`.
    """
    fixed = re.fullmatch(r"(\d{1,99})/(\d{1,99})", text)
    if text in TASKS:
        workload = task(text)
    elif fixed:
        if not 1 <= int(fixed[1]) <= MAX_TOKENS or not 1 <= int(fixed[2]) <= MAX_TOKENS:
            raise InputError(f"The lengths '{text}' are not usable: both must be from 1 to {MAX_TOKENS:,} tokens.")
        workload = Workload.fixed(int(fixed[1]), int(fixed[2]))
    elif form_of(text):
        workload = Workload.from_requests(Path(text).name, read_trace(text, columns, note))
    elif drawn := synthetic_workload(text):
        workload = drawn
    elif turned := re.fullmatch(r"(\d{1,9})\s*[^\w./]*x?\s*(\d{1,9})", text):
        raise InputError(f"'{text}' is not a workload: write fixed lengths as {turned[1]}/{turned[2]}.")
    else:
        raise InputError(
            f"'{text}' is not a workload: write a task ({', '.join(TASKS)}), lengths ({FORMS}), or the "
            f"path of a trace ({', '.join(SUFFIXES)}; decompress .gz files first)."
        )
    return workload if rate is None else replace(workload, arrival_rate=rate)


def with_poisson_arrivals(requests: Sequence[RequestLengths], rate: float, seed: int) -> tuple[RequestLengths, ...]:
    """Give requests random arrivals at `rate` per second; the first one arrives at 0."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=len(requests))
    arrivals = np.cumsum(gaps) - gaps[:1]
    return tuple(replace(r, arrival_s=float(a)) for r, a in zip(requests, arrivals, strict=True))


def read_trace(path: str | Path, columns: dict[str, str] | None = None, note: Note = silent) -> list[RequestLengths]:
    """Read the requests of a trace in its order; arrivals are relative to the earliest.

    Requests without output, which failed, are left out. `note` gets a sentence for each column that seems to matter and
    isn't read.

    Raises:
        InputError: Names the file and, if one of them is wrong, the column, the row and the value.
    """
    return [request for _, request in _read(Path(path), columns, note, (), _no_more)]


def read_model_trace(
    path: str | Path, models: Iterable[str], columns: dict[str, str] | None = None, note: Note = silent
) -> dict[str, list[RequestLengths]]:
    """Read the requests of several models from a trace with a column `model`; otherwise like `read_trace`.

    Raises:
        InputError: Also names a row of another model.
    """
    names = sorted(models)

    def model_of(row: dict[str, object], where: str) -> str:
        if "model" not in row:
            raise InputError(
                f"'{path}' has no column 'model': add one that names the model of each row, one of {', '.join(names)}."
            )
        if row["model"] not in names:
            value = reprlib.repr(row["model"])
            raise InputError(
                f"{where}, column 'model': {value} is not one of the models: write one of {', '.join(names)}."
            )
        return str(row["model"])

    of_models: dict[str, list[RequestLengths]] = {}
    for model, request in _read(Path(path), columns, note, ("model",), model_of):
        of_models.setdefault(model, []).append(request)
    return of_models


def read_labels(path: str | Path, columns: dict[str, str] | None = None, sessions: bool = False) -> list[Labels]:
    """Read the labels of each request of a trace, in the order of `read_trace`.

    With `sessions`, `after_s` may be after another previous request than its run's.

    Raises:
        InputError: A deadline is not valid, or a request has `after_s` but no run.
    """
    take = _labels_of if sessions else _labels_of_runs
    return [own for own, _ in _read(Path(path), columns, silent, (*LABELS, AFTER), take)]


def labels_of(
    labels: Sequence[Labels], rows: Sequence[RequestLengths], fitted: Sequence[RequestLengths], longest: int | None
) -> list[Labels]:
    """Return the labels of the rows that fit a model's longest request; of all rows if none was left out.

    Args:
        labels: As `read_labels` reads them.
        rows: As `read_trace` reads them.
        fitted: The rows that were kept, or all of them with other lengths.
        longest: `ModelSpec.longest_request`.
    """
    whole = len(fitted) == len(rows)
    return [own for own, row in zip(labels, rows, strict=True) if whole or row.fits(longest)]


def _labels_of(row: dict[str, Any], where: str) -> Labels:
    texts = {name: str(row[name]) for name in LABELS[:-1] if row.get(name) not in (None, "")}
    deadline_s, after_s = (_label_seconds(row.get(name), name, where) for name in ("deadline_s", AFTER))
    return Labels(**texts, deadline_s=deadline_s, after_s=after_s)


def _labels_of_runs(row: dict[str, Any], where: str) -> Labels:
    own = _labels_of(row, where)
    if own.after_s is not None and own.run is None:
        raise InputError(f"{where} has {AFTER} = {own.after_s:g}, but no run: name the run that it belongs to.")
    return own


def form_of(path: str | Path) -> str | None:
    """Return the format of a trace by the end of its name, in lower case, like `.csv`; None for another file."""
    suffix = Path(path).suffix.lower()
    return suffix if suffix in SUFFIXES else None


def _no_more(row: dict[str, object], where: str) -> None:
    """Ignore the remaining columns of a row."""


def _read(
    path: Path,
    asked: dict[str, str] | None,
    note: Note,
    others: Sequence[str],
    take: Callable[[dict[str, Any], str], Taken],
) -> list[tuple[Taken, RequestLengths]]:
    """Read the requests of the rows with an output, each with what `take` returns for its row and place."""
    table = _open(path)
    empty = InputError(f"'{path}' has no requests: a trace needs at least one row with an output.")
    if not table.names:
        raise empty
    names = find_columns(table.names, asked or {}, path)
    lengths: list[tuple[int, int, PromptIdentity | None]] = []
    moments: list[float | Moment] = []
    taken: list[Taken] = []
    count, known = 0, set(table.names)
    for count, (number, row) in enumerate(table.rows((*names.read, *others)), 1):
        if count > MAX_ROWS:
            raise InputError(f"'{path}' has more than {MAX_ROWS:,} rows: use a part of the file.")
        where = f"'{path}', row {number}"
        if not row.keys() <= known:  # in JSONL
            known |= row.keys()
            if late := sorted(set(find_columns([*table.names, *row], asked or {}, path).read) - set(names.read)):
                raise InputError(f"{where} has the key '{late[0]}', which the first row lacks: write it in all rows.")
        own = take(row, where)
        input = _length(row.get(names.input), f"{where}, column '{names.input}'", 1)
        output = _length(row.get(names.output), f"{where}, column '{names.output}'", 0)
        moment = _moment(row.get(names.arrival), f"{where}, column '{names.arrival}'") if names.arrival else None
        if output:
            lengths.append((input, output, identity_of(row, names.identity, input, where)))
            taken.append(own)
            moments += [] if moment is None else [moment]
    if not lengths:
        raise empty
    for text in names.notes:
        note(text)
    if len(lengths) < count:
        note(f"'{path}': {count - len(lengths):,} of {count:,} rows have no output and are left out")
    seconds = _seconds(moments, names, table.names, path, note) if moments else [0.0] * len(lengths)
    requests = [
        RequestLengths(input, output, at, identity)
        for (input, output, identity), at in zip(lengths, seconds, strict=True)
    ]
    if odd := blocks_note(requests):
        note(f"'{path}': {odd}")
    return list(zip(taken, requests, strict=True))


def _seconds(
    moments: list[float | Moment], columns: Columns, names: Sequence[str], path: Path, note: Note
) -> list[float]:
    """Return arrivals in seconds since the first.

    Raises:
        InputError: Both dates and numbers occur, or the numbers' unit is in doubt.
    """
    where, numbers = f"'{path}', column '{columns.arrival}'", [at for at in moments if not isinstance(at, Moment)]
    if 0 < len(numbers) < len(moments):
        raise InputError(
            f"{where}: {len(numbers):,} arrivals are numbers, like {numbers[0]:g}, but "
            f"{len(moments) - len(numbers):,} are dates: write all arrivals in the same way."
        )
    if numbers:
        asked = ArrivalUnit(columns.unit, "as --columns says") if columns.unit else None
        unit = asked or unit_of(numbers, columns.arrival or "", names, path)
        seconds, text = in_seconds(numbers, unit.name, where), f" are {unit_text(unit.name)}, {unit.why}"
    else:
        certain = [at.nanoseconds for at in moments if isinstance(at, Moment)]
        since = min(certain)
        seconds, text = [(at - since) / 10**9 for at in certain], ""
        zones = [at.zone_s for at in moments if isinstance(at, Moment)]
        if None in zones and any(zones):
            raise InputError(
                f"{where}: {zones.count(None):,} of {len(moments):,} dates have no time zone, and others are not in "
                "UTC: write all of them with their zone, like 2023-11-16T18:15:46+01:00."
            )
    span_s = max(seconds)
    if span_s > MAX_SECONDS:
        raise InputError(
            f"{where}: its arrivals span {figure_text(span_s)} seconds, but at most {MAX_SECONDS:,.0f} are allowed: "
            "correct them, or use a part of the trace."
        )
    if span_s:
        note(f"'{path}': arrivals in column '{columns.arrival}'{text}: {rate_text(len(seconds), span_s)}")
    return seconds


def _open(path: Path) -> RowsFile:
    if path.is_dir():
        check_file(path, "trace file")
    form = form_of(path)
    if form is None:
        raise InputError(
            f"'{path}' is not a trace: its name must end in {', '.join(SUFFIXES)} (decompress .gz files first)."
        )
    return _READERS[form](path)


def _label_seconds(value: Any, name: str, where: str) -> float | None:
    if value in (None, ""):
        return None
    seconds = _number(value)
    what, since = ("deadline", "the arrival") if name == "deadline_s" else ("delay", "the run's previous request")
    if not 0 <= seconds < math.inf:
        raise InputError(
            f"{where}, column '{name}': {value!r} is not a {what}: write the seconds after {since}, at least 0."
        )
    return seconds


def _length(value: Any, where: str, least: int) -> int:
    number = _number(value)
    if value is None:
        raise InputError(f"{where}: the value is missing: write a length as a whole number from 1 to {MAX_TOKENS:,}.")
    if isinstance(value, bool) or not number.is_integer() or not least <= number <= MAX_TOKENS:
        raise InputError(
            f"{where}: {reprlib.repr(value)} is not a length: it must be a whole number from 1 to {MAX_TOKENS:,}."
        )
    return int(number)


def _moment(value: Any, where: str) -> float | Moment:
    """Return a number in the column's own unit, or a moment by its date."""
    if isinstance(value, Moment):
        return value
    number = math.nan if isinstance(value, bool) else _number(value)
    if not math.isnan(number):
        if math.isfinite(number):
            return _whole(value) or number
    elif moment := _date(value):
        return moment
    raise InputError(
        f"{where}: {reprlib.repr(value)} is not an arrival: write a number, or a date like 2023-11-16T18:15:46Z."
    )


def _whole(value: Any) -> int | None:
    """Return a whole number with all of its digits, which a float has not from 2^53; None for other numbers."""
    try:
        return int(value) if isinstance(value, int | str) else None
    except ValueError:
        return None


def _number(value: Any) -> float:
    """Return a value as a number; NaN if it isn't a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf


def _date(value: object) -> Moment | None:
    """Return the moment of a date in text; None if it isn't a date."""
    text = re.sub(r"\s*(?:[Zz]|UTC|GMT)$", "+00:00", str(value).strip())
    parts = re.fullmatch(r"(.*\d:?\d\d:?\d\d)[.,](\d+)(.*)", text)  # Python keeps only microseconds
    nanoseconds = int(f"{parts[2][:9]:0<9}") if parts else 0
    try:
        date = datetime.fromisoformat(parts[1] + parts[3] if parts else text)
        since = (date if date.tzinfo else date.replace(tzinfo=timezone.utc)) - _EPOCH
    except (ValueError, OverflowError):
        return None
    zone = date.utcoffset()
    return Moment(since // timedelta(seconds=1) * 10**9 + nanoseconds, None if zone is None else zone.total_seconds())


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


_READERS: dict[str, Callable[[Path], RowsFile]] = {
    ".csv": csv_table,
    ".tsv": csv_table,
    ".jsonl": jsonl_table,
    ".parquet": parquet_table,
}
"""The reader of each file of rows, by the end of the file's name."""
