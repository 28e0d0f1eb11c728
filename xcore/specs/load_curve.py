"""Load curve: the arrival rate over a day, hour by hour."""

import itertools
from dataclasses import dataclass
from pathlib import Path

from xcore.errors import InputError
from xcore.rows import CsvRow, csv_rows

HOUR, RATE = "hour", "rate"
"""The columns of a file: the hour at which a rate begins, and requests/s."""


@dataclass(frozen=True)
class LoadHour:
    """A rate of arrival, from an hour on."""

    hour: float
    hours: float
    """How long the rate lasts."""
    rate_seq_s: float


def read_load_curve(path: Path) -> tuple[LoadHour, ...]:
    """Read a CSV file with the columns `hour` and `rate`.

    A rate lasts until the next row's hour; the last one as long as the one before, or an hour. Raises InputError for a
    bad row, with its number, and for a curve without requests.
    """
    rows = csv_rows(path, HOUR, RATE, what="load curve")
    starts = [row.number(HOUR) for row in rows]
    for row, before, start in zip(rows[1:], starts, starts[1:], strict=False):
        if start <= before:
            raise InputError(f"{row.where}, column '{HOUR}': {start:g} must be above {before:g}, the row before.")
    spans = [after - start for start, after in itertools.pairwise(starts)]
    rates = [_rate(row) for row in rows]
    if not any(rates):
        raise InputError(f"'{path}' has no requests: write a rate above 0 in a row.")
    lasting = [*spans, spans[-1] if spans else 1.0]
    return tuple(LoadHour(*hour) for hour in zip(starts, lasting, rates, strict=True))


def _rate(row: CsvRow) -> float:
    rate = row.number(RATE)
    if rate < 0:
        raise InputError(f"{row.where}, column '{RATE}': {rate:g} must be a rate in requests/s of at least 0.")
    return rate
