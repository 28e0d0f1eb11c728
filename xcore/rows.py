"""Rows of CSV, JSONL and Parquet files: each reader returns the columns' names and then the rows."""

import csv
import itertools
import math
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcore.document import MAX_LINE, check_file, parse_json, read_lines
from xcore.errors import InputError

Row = tuple[int, dict[str, Any]]
"""Line (or row) number in the file, and the row's values by column."""

_FIRST_NS, _LAST_NS = -62_135_596_800 * 10**9, 253_402_300_800 * 10**9
"""The years 1 to 9999, in nanoseconds since 1970."""


@dataclass(frozen=True)
class Moment:
    """A moment in a certain unit: a date, or a duration since an unknown start."""

    nanoseconds: int
    zone_s: float | None = 0.0
    """Seconds that a date's time zone is ahead of UTC; None: the date has no zone, and is read as UTC."""

    def __repr__(self) -> str:
        """Return the moment for messages."""
        return f"{self.nanoseconds:,} ns"


@dataclass(frozen=True)
class RowsFile:
    """A file of rows."""

    names: Sequence[str]
    """Names of the columns; in JSONL those of the first row."""
    rows: Callable[[Sequence[str]], Iterator[Row]]
    """Function that yields the rows once, with at least these columns if they exist."""


@dataclass(frozen=True)
class CsvRow:
    """A row of a CSV file, whose values are texts until `number` or `whole` reads them."""

    where: str
    """The file and the row, as messages begin."""
    values: dict[str, str]

    def __getitem__(self, column: str) -> str:
        """Return a value; InputError if the row has none."""
        if column not in self.values:
            raise InputError(f"{self.where} has no value in column '{column}'.")
        return self.values[column]

    def number(self, column: str, empty: float | None = None) -> float:
        """Return a finite number; `empty` if there is no value and `empty` isn't None."""
        text = self.values.get(column, "") if empty is not None else self[column]
        if not text and empty is not None:
            return empty
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InputError(f"{self.where}, column '{column}': {reprlib.repr(text)} must be a number.")
        return number

    def whole(self, column: str) -> int:
        """Return a whole number."""
        number = self.number(column)
        if not number.is_integer():
            raise InputError(f"{self.where}, column '{column}': {self[column]} must be a whole number.")
        return int(number)


def csv_rows(path: Path, *columns: str, what: str = "CSV file") -> list[CsvRow]:
    """Read the rows of a CSV file; InputError if it lacks one of these columns, or has no rows."""
    table = csv_table(path, what)
    missing = [column for column in columns if column not in table.names]
    if missing:
        raise InputError(f"'{path}' has no column {', '.join(map(repr, missing))}.")
    rows = [CsvRow(f"'{path}', row {number}", row) for number, row in table.rows(columns)]
    if not rows:
        raise InputError(f"'{path}' has no rows.")
    return rows


def csv_table(path: Path, what: str = "trace file") -> RowsFile:
    """Open a CSV file; its header shows the separator: a comma, a semicolon or a tab."""
    lines = _without_zeros(path, what)
    head = next(lines, "")
    csv.field_size_limit(MAX_LINE)  # 128 KiB by default, which prompts exceed
    between = max(",;\t", key=head.count)
    reader = csv.reader(itertools.chain([head] if head else [], lines), delimiter=between, strict=True)
    rows = _csv_rows(reader, path)
    _, names = next(rows, (0, []))
    _check_apart(names, path)

    def values() -> Iterator[Row]:
        for number, row in rows:
            if any(row[len(names) :]):
                raise InputError(
                    f"'{path}', row {number}: it has more values than the header's {len(names)} columns: "
                    "correct the row."
                )
            yield number, dict(zip(names, row, strict=False))

    return RowsFile(names, lambda _: values())


def _without_zeros(path: Path, what: str) -> Iterator[str]:
    for number, line in enumerate(read_lines(path, what, newline=""), 1):
        if "\0" in line:  # as in UTF-16 without a mark
            raise InputError(f"'{path}', row {number}: it has a zero byte: save the file in UTF-8.")
        yield line


def _csv_rows(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the values of each row that isn't empty."""
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(f"'{path}', row {reader.line_num}: it is not CSV ({error}): correct the row.") from None
        if row is None:
            return
        if row:
            yield reader.line_num, row


def jsonl_table(path: Path) -> RowsFile:
    """Open a file with a JSON object in each line."""
    rows = _jsonl_rows(path)
    first = next(rows, None)
    if first is None:
        return RowsFile((), lambda _: iter(()))
    return RowsFile(list(first[1]), lambda _: itertools.chain([first], rows))


def _jsonl_rows(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path, "trace file"), 1):
        if not line.strip():
            continue
        row = parse_json(line, f"'{path}', row {number},")
        if not isinstance(row, dict):
            raise InputError(f"'{path}', row {number}: {line.strip()[:60]!r} is not a JSON object.")
        yield number, row


def parquet_table(path: Path) -> RowsFile:
    """Open a Parquet file; only the needed columns are read."""
    from pyarrow import parquet

    check_file(path, "trace file")
    with reading_parquet(path):
        names = parquet.read_schema(path).names
    _check_apart(names, path)
    return RowsFile(names, lambda needed: _parquet_rows(path, [name for name in needed if name in names]))


def _parquet_rows(path: Path, names: list[str]) -> Iterator[Row]:
    from pyarrow import parquet

    number = 0
    with reading_parquet(path):
        file = parquet.ParquetFile(path)
        batches = file.iter_batches(columns=names)
    while True:
        with reading_parquet(path, f" after row {number:,}"):
            batch = next(batches, None)
        if batch is None:
            file.close()
            return
        columns = [_column(batch.column(name), name, number, path) for name in names]
        for values in zip(*columns, strict=True):
            number += 1
            yield number, dict(zip(names, values, strict=True))


@contextmanager
def reading_parquet(path: Path, where: str = "") -> Iterator[None]:
    """Turn pyarrow's exceptions for a file into an InputError, with the place up to which it was read."""
    import pyarrow

    try:
        yield
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        why = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise InputError(f"'{path}' is not a readable Parquet file{where}: {why}.") from None


def _column(column: Any, name: str, before: int, path: Path) -> Sequence[object]:
    """Return the values of a part of a column, after `before` rows.

    Dates and durations become moments, since Python's own types often can't hold them.
    """
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    timed = types.is_timestamp(kind) or types.is_duration(kind)
    if not (timed or types.is_date(kind)):
        return [_value(column, place, name, before, path) for place in range(len(column))]
    unit_ns = _UNITS[kind.unit] if timed else _UNITS["day" if types.is_date32(kind) else "ms"]
    numbers = column.view("int32" if types.is_date32(kind) else "int64").to_pylist()
    moments = [None if number is None else Moment(number * unit_ns) for number in numbers]
    for place, moment in enumerate(moments, before + 1):
        if moment and not _FIRST_NS <= moment.nanoseconds < _LAST_NS:
            raise InputError(f"'{path}', row {place}, column '{name}': its date is not in the years 1 to 9999.")
    return moments


_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1, "day": 86_400 * 10**9}
"""Nanoseconds per unit of Arrow's times."""


def _value(column: Any, place: int, name: str, before: int, path: Path) -> object:
    try:
        return column[place].as_py()
    except Exception as error:  # many types, by the column's type: text that is no UTF-8, a time zone, an overflow
        why = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise InputError(
            f"'{path}', row {before + place + 1}, column '{name}': its value of type {column.type} can't be read "
            f"({why}): write it as a number."
        ) from None


def _check_apart(names: Sequence[str], path: Path) -> None:
    for name in names:
        if name and names.count(name) > 1:
            raise InputError(
                f"'{path}' has {names.count(name)} columns '{name}': keep one of them, or rename the others."
            )
