"""Traces: the lengths, and where known the arrivals, of real requests, from CSV, JSONL or Parquet files."""

import csv
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from exegpt.document import check_file, parse_json, read_lines
from exegpt.errors import InputError
from exegpt.workload import MAX_TOKENS, TASKS, RequestLengths, Workload, task

COLUMNS: dict[str, tuple[str, ...]] = {
    "input": ("input", "input_tokens", "input_toks", "prompt_tokens", "ContextTokens", "num_prefill_tokens"),
    "output": ("output", "output_tokens", "output_toks", "GeneratedTokens", "num_decode_tokens"),
    "arrival": ("arrival_s", "arrival_time", "TIMESTAMP"),
}
"""What a trace must or may hold, and the column names it is known by."""

MAX_ROWS = 5_000_000
SUFFIXES = (".csv", ".jsonl", ".parquet")

Row = tuple[int, dict[str, Any]]
"""Line (or row) number in the file, and the row's values by column."""


def parse_columns(text: str) -> dict[str, str]:
    """`input=en_tokens,output=de_tokens` as a dict; InputError for another form."""
    columns = {}
    for part in text.split(","):
        key, _, column = part.partition("=")
        if key.strip() not in COLUMNS or not column.strip():
            raise InputError(
                f"'{part}' is not a column: write input=NAME,output=NAME and, where there is one, arrival=NAME."
            )
        columns[key.strip()] = column.strip()
    return columns


def parse_rate(text: str) -> float:
    """Requests per second in `5/s` or `90/m`; InputError for another form or a rate of zero."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*/\s*(s|m)", text.strip())
    if not match or not 0 < float(match[1]) < math.inf:
        raise InputError(f"'{text}' is not a rate of arrival: write a positive number per second or minute, like 5/s.")
    return float(match[1]) / (1 if match[2] == "s" else 60)


def parse_workload(text: str, columns: dict[str, str] | None = None, rate: float | None = None) -> Workload:
    """A workload from a task of the paper, fixed lengths (`2048/256`) or a trace file; `rate` in requests/s."""
    fixed = re.fullmatch(r"(\d{1,99})/(\d{1,99})", text)
    if text in TASKS:
        workload = task(text)
    elif fixed:
        if not 1 <= int(fixed[1]) <= MAX_TOKENS or not 1 <= int(fixed[2]) <= MAX_TOKENS:
            raise InputError(f"The lengths '{text}' are not usable: both must be between 1 and {MAX_TOKENS:,} tokens.")
        workload = Workload.fixed(int(fixed[1]), int(fixed[2]))
    elif Path(text).suffix in SUFFIXES:
        workload = Workload.from_requests(Path(text).name, read_trace(text, columns))
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


def read_trace(path: str | Path, columns: dict[str, str] | None = None) -> list[RequestLengths]:
    """The requests of a trace in its order, arrivals made relative to the earliest.

    InputError names the file and, where one is at fault, the column, the row and the value.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise InputError(f"'{path}' is not a trace: its name must end in {', '.join(SUFFIXES)}.")
    rows = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}[path.suffix](path)
    requests = list(_requests(rows, columns or {}, path))
    if not requests:
        raise InputError(f"'{path}' has no requests: a trace needs at least one row.")
    first = min(r.arrival_s for r in requests)
    return [replace(r, arrival_s=r.arrival_s - first) for r in requests] if first else requests


def _requests(rows: Iterable[Row], columns: dict[str, str], path: Path) -> Iterator[RequestLengths]:
    names: dict[str, str] = {}
    for count, (number, row) in enumerate(rows):
        if count == MAX_ROWS:
            raise InputError(f"'{path}' has more than {MAX_ROWS:,} rows: use a part of it.")
        if not names:
            names = _column_names(row, columns, path)
        where = f"'{path}', row {number}"
        yield RequestLengths(
            input=_length(row.get(names["input"]), f"{where}, column '{names['input']}'"),
            output=_length(row.get(names["output"]), f"{where}, column '{names['output']}'"),
            arrival_s=_moment(row.get(names["arrival"]), f"{where}, column '{names['arrival']}'")
            if "arrival" in names
            else 0.0,
        )


def _column_names(row: dict[str, Any], asked: dict[str, str], path: Path) -> dict[str, str]:
    """Which column of the file holds the input, the output and the arrival."""
    names = {}
    for key, known in COLUMNS.items():
        candidates = (asked[key],) if key in asked else known
        found = next((name for name in candidates if name in row), None)
        if found:
            names[key] = found
        elif key in asked or key != "arrival":
            raise InputError(
                f"'{path}' has no {key} column {' or '.join(map(repr, candidates))}, only "
                f"{', '.join(map(repr, row)) or 'none'}: name it with --columns {key}=NAME."
            )
    return names


def _length(value: Any, where: str) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not number.is_integer() or not 1 <= number <= MAX_TOKENS:
        raise InputError(
            f"{where}: {reprlib.repr(value)} is not a length: it must be a whole number between 1 and {MAX_TOKENS:,}."
        )
    return int(number)


def _moment(value: Any, where: str) -> float:
    """Seconds since some fixed moment."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = _date(value)
    if not math.isfinite(seconds):
        raise InputError(f"{where}: {reprlib.repr(value)} is not an arrival: it must be seconds or a date.")
    return seconds


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
        reader = csv.DictReader(read_lines(path, "trace file", newline=""))
        yield from ((reader.line_num, row) for row in reader)
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
