"""Traces: the lengths, and where known the arrivals, of real requests, from CSV, JSONL or Parquet files."""

import csv
import itertools
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from exegpt.columns import Columns, find_columns, unit_of
from exegpt.document import check_file, parse_json, read_lines
from exegpt.errors import InputError
from exegpt.quantity import figure_text
from exegpt.workload import MAX_TOKENS, TASKS, RequestLengths, Workload, task

MAX_ROWS = 5_000_000
MAX_SECONDS = 1e9
"""From the first arrival to the last."""
SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")

Row = tuple[int, dict[str, Any]]
"""Line (or row) number in the file, and the row's values by column."""


@dataclass(frozen=True)
class Date:
    """A moment by its date."""

    seconds: float
    """Since 1970."""


Note = Callable[[str], None]
"""Takes a sentence about what was read."""


def silent(_: str) -> None:
    """Drop a note."""


def parse_rate(text: str) -> float:
    """Requests per second in `5/s` or `90/m`; InputError for another form or a rate of zero."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*/\s*(s|m)", text.strip())
    if not match or not 0 < float(match[1]) < math.inf:
        raise InputError(
            f"'{text}' is not a rate of arrival: write a positive number per second or minute, like 5/s or 300/m."
        )
    return float(match[1]) / (1 if match[2] == "s" else 60)


def parse_workload(
    text: str, columns: dict[str, str] | None = None, rate: float | None = None, note: Note = silent
) -> Workload:
    """A workload from a task of the paper, fixed lengths (`2048/256`) or a trace file; `rate` in requests/s, `note` as
    in `read_trace`.
    """
    fixed = re.fullmatch(r"(\d{1,99})/(\d{1,99})", text)
    if text in TASKS:
        workload = task(text)
    elif fixed:
        if not 1 <= int(fixed[1]) <= MAX_TOKENS or not 1 <= int(fixed[2]) <= MAX_TOKENS:
            raise InputError(f"The lengths '{text}' are not usable: both must be between 1 and {MAX_TOKENS:,} tokens.")
        workload = Workload.fixed(int(fixed[1]), int(fixed[2]))
    elif Path(text).suffix in SUFFIXES:
        workload = Workload.from_requests(Path(text).name, read_trace(text, columns, note))
    elif turned := re.fullmatch(r"(\d{1,9})\s*[^\w./]*x?\s*(\d{1,9})", text):
        raise InputError(f"'{text}' is not a workload: fixed lengths are written {turned[1]}/{turned[2]}.")
    else:
        raise InputError(
            f"'{text}' is not a workload: write a task ({', '.join(TASKS)}), fixed lengths like 2048/256, or the path "
            f"of a trace ({', '.join(SUFFIXES)})."
        )
    return workload if rate is None else replace(workload, arrival_rate=rate)


def with_poisson_arrivals(requests: Sequence[RequestLengths], rate: float, seed: int) -> tuple[RequestLengths, ...]:
    """The same requests, arriving at random at `rate` per second; the first one at 0."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=len(requests))
    arrivals = np.cumsum(gaps) - gaps[:1]
    return tuple(replace(r, arrival_s=float(a)) for r, a in zip(requests, arrivals, strict=True))


def read_trace(path: str | Path, columns: dict[str, str] | None = None, note: Note = silent) -> list[RequestLengths]:
    """The requests of a trace in its order, arrivals made relative to the earliest; those of no output, which failed,
    are left out.

    `note` gets a sentence for each column that looks as if it mattered and isn't read. InputError names the file and,
    where one is at fault, the column, the row and the value.
    """
    return _read(_rows(path), columns, Path(path), note)[1]


def read_model_trace(
    path: str | Path, models: Iterable[str], columns: dict[str, str] | None = None, note: Note = silent
) -> dict[str, list[RequestLengths]]:
    """The requests of each of several models in a trace with a column `model`; otherwise like `read_trace`. InputError
    names a row of another model.
    """
    names, of_rows = sorted(models), []

    def rows() -> Iterator[Row]:
        for number, row in _rows(path):
            if "model" not in row:
                raise InputError(f"'{path}' has no column 'model': name each row's in it, out of {', '.join(names)}.")
            if row["model"] not in names:
                where = f"'{path}', row {number}, column 'model': {reprlib.repr(row['model'])}"
                raise InputError(f"{where} is none of the models: write one of {', '.join(names)}.")
            of_rows.append(row["model"])
            yield number, row

    served, requests = _read(rows(), columns, Path(path), note)
    of_models: dict[str, list[RequestLengths]] = {}
    for place, request in zip(served, requests, strict=True):
        of_models.setdefault(of_rows[place], []).append(request)
    return of_models


def _read(
    rows: Iterable[Row], columns: dict[str, str] | None, path: Path, note: Note
) -> tuple[list[int], list[RequestLengths]]:
    """The places of the rows with an output, and their requests."""
    lengths, moments, names = _lengths(rows, columns or {}, path)
    served = [i for i, (_, output) in enumerate(lengths) if output]
    if not names or not served:
        raise InputError(f"'{path}' has no requests: a trace needs at least one row with an output.")
    for text in names.notes:
        note(text)
    if len(served) < len(lengths):
        note(f"'{path}': {len(lengths) - len(served):,} of {len(lengths):,} rows have no output and are left out")
        lengths = [lengths[i] for i in served]
        moments = [moments[i] for i in served] if moments else []
    if not moments:
        return served, [RequestLengths(*pair) for pair in lengths]
    seconds = _seconds(moments, names, path)
    first, last = min(seconds), max(seconds)
    if last - first > MAX_SECONDS:
        raise InputError(
            f"'{path}', column '{names.arrival}': its arrivals are up to {figure_text(last - first)} seconds apart, at "
            f"most {MAX_SECONDS:,.0f} are allowed: correct them, or take a part."
        )
    return served, [RequestLengths(*pair, arrival_s=at - first) for pair, at in zip(lengths, seconds, strict=True)]


def read_labels(path: str | Path, columns: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """What a trace says of whose its requests are, in the order of `read_trace`: of each `client` and `application`, a
    text, and `deadline_s`, seconds after its arrival, as far as it has them. InputError for a deadline that is none.
    """
    rows = list(_rows(path))
    lengths, _, _ = _lengths(rows, columns or {}, Path(path))
    labels = []
    for (number, row), (_, output) in zip(rows, lengths, strict=True):
        own: dict[str, Any] = {n: str(row[n]) for n in ("client", "application") if row.get(n) not in (None, "")}
        if row.get("deadline_s") not in (None, ""):
            own["deadline_s"] = _deadline(row["deadline_s"], f"'{path}', row {number}, column 'deadline_s'")
        if output:
            labels.append(own)
    return labels


def _rows(path: str | Path) -> Iterator[Row]:
    path = Path(path)
    if path.is_dir():
        check_file(path, "trace file")
    if path.suffix not in SUFFIXES:
        raise InputError(f"'{path}' is not a trace: its name must end in {', '.join(SUFFIXES)}.")
    return _READERS[path.suffix](path)


def _deadline(value: Any, where: str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InputError(f"{where}: {value!r} is not a deadline, which is seconds after the arrival, at least 0.")
    return seconds


def _lengths(
    rows: Iterable[Row], asked: dict[str, str], path: Path
) -> tuple[list[tuple[int, int]], list[float | Date], Columns | None]:
    """(input, output) of every row, their arrivals as they stand there where a column has them, and the columns."""
    lengths: list[tuple[int, int]] = []
    moments: list[float | Date] = []
    names = None
    for count, (number, row) in enumerate(rows):
        if count == MAX_ROWS:
            raise InputError(f"'{path}' has more than {MAX_ROWS:,} rows: use a part of it.")
        names = names or find_columns([name for name in row if name is not None], asked, path)
        where = f"'{path}', row {number}, column"
        input = _length(row.get(names.input), f"{where} '{names.input}'", 1)
        lengths.append((input, _length(row.get(names.output), f"{where} '{names.output}'", 0)))
        if names.arrival:
            moments.append(_moment(row.get(names.arrival), f"{where} '{names.arrival}'"))
    return lengths, moments, names


def _seconds(moments: list[float | Date], columns: Columns, path: Path) -> list[float]:
    """Arrivals in seconds: dates since 1970, numbers by their unit; InputError where both come."""
    numbers = [at for at in moments if not isinstance(at, Date)]
    if 0 < len(numbers) < len(moments):
        raise InputError(
            f"'{path}', column '{columns.arrival}': {len(numbers):,} arrivals are numbers, like {numbers[0]:g}, and "
            f"{len(moments) - len(numbers):,} are dates: write all in one way."
        )
    unit_s = columns.unit_s or (unit_of(numbers, columns.arrival or "", path) if numbers else 1.0)
    return [at.seconds if isinstance(at, Date) else at * unit_s for at in moments]


def _length(value: Any, where: str, least: int) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if value is None:
        raise InputError(f"{where}: there is no value: a length is a whole number between 1 and {MAX_TOKENS:,}.")
    if isinstance(value, bool) or not number.is_integer() or not least <= number <= MAX_TOKENS:
        raise InputError(
            f"{where}: {reprlib.repr(value)} is not a length: it must be a whole number between 1 and {MAX_TOKENS:,}."
        )
    return int(number)


def _moment(value: Any, where: str) -> float | Date:
    """A number in the column's own unit, or a date."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
        date = _date(value)
        if math.isfinite(date):
            return Date(date)
    if not math.isfinite(number):
        raise InputError(f"{where}: {reprlib.repr(value)} is not an arrival: it must be a number or a date.")
    return number


def _date(value: Any) -> float:
    if not isinstance(value, datetime):
        text = re.sub(r"(\.\d{6})\d+", r"\1", str(value).strip())  # Python keeps microseconds, and 3.10 knows no Z
        try:
            value = datetime.fromisoformat(re.sub("[Zz]$", "+00:00", text))
        except ValueError:
            return math.nan
    moment: datetime = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
    return moment.timestamp()


def _csv_rows(path: Path) -> Iterator[Row]:
    try:
        lines = read_lines(path, "trace file", newline="")
        head = next(lines, "")
        between = max(",;\t", key=head.count)
        reader = csv.DictReader(itertools.chain([head] if head else [], lines), delimiter=between)
        names = reader.fieldnames or ()
        for name in names:
            if name and names.count(name) > 1:
                raise InputError(f"'{path}' has {names.count(name)} columns '{name}': leave one, or name them apart.")
        for row in reader:
            if any(row.get(None) or ()):
                raise InputError(
                    f"'{path}', row {reader.line_num}: it has more values than the header's {len(names)} columns: "
                    "correct the row."
                )
            yield reader.line_num, row
    except csv.Error as error:
        raise InputError(f"'{path}' is not a CSV file: {error}.") from None


def _jsonl_rows(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path, "trace file"), 1):
        if not line.strip():
            continue
        row = parse_json(line, f"'{path}', row {number},")
        if not isinstance(row, dict):
            raise InputError(f"'{path}', row {number}: {line.strip()[:60]!r} is not a JSON object.")
        yield number, row


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    check_file(path, "trace file")
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"'{path}' is not a readable Parquet file: {str(error).splitlines()[0].rstrip('.')}."
        ) from None


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
}
"""What reads a file of rows, by the end of its name."""
