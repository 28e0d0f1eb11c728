"""The unit of a trace's arrivals: by the name of their column, or else by the numbers themselves."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from xcore.duration import duration_text
from xcore.errors import InputError
from xcore.quantity import figure_text

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86_400.0}
"""Units of `--columns arrival=NAME:UNIT` and of column names, in seconds."""
DATE = "date"
"""The unit of dates that are written as numbers: 20231116, 20231116181546, or a spreadsheet's days (45246.5)."""

_WORDS = {
    "s": ("sec", "secs", "second", "seconds"),
    "ms": ("msec", "msecs", "millis", "millisec", "millisecs", "millisecond", "milliseconds"),
    "us": ("usec", "usecs", "micros", "microsec", "microsecs", "microsecond", "microseconds"),
    "ns": ("nsec", "nsecs", "nanos", "nanosec", "nanosecs", "nanosecond", "nanoseconds"),
    "min": ("mins", "minute", "minutes"),
    "h": ("hr", "hrs", "hour", "hours"),
    "d": ("days",),
}
_UNIT_OF = {word: unit for unit, words in _WORDS.items() for word in words}
_IN_WORDS = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
    "min": "minutes",
    "h": "hours",
    "d": "days",
}
_CLOCKS = ("s", "ms", "us", "ns")
"""Units that numbers without a unit can have."""

_FIRST_S, _LAST_S = 946_684_800.0, 4_102_444_800.0
"""The years 2000 to 2100, in seconds since 1970."""
_SHEET_DAYS = (36_526.0, 73_051.0)
"""The same years in the days of spreadsheets."""
_QUICKEST_S, _SLOWEST_S, _LONGEST_S = 1e-3, 3600.0, 400 * 86_400.0
"""Plausible mean gaps are from a thousand requests per second to one per hour; the third is the longest total time."""
_SLOWEST_FRACTION_S, _SLOWEST_OF_FEW_S, _FEW = 10.0, 60.0, 10
"""Largest mean gaps at which numbers with fractions count as seconds; the second is for few, typed by hand.

Clocks in smaller units mostly count in whole ones.
"""
_CLOCK_WORDS = {"utc", "gmt", "epoch", "unix", "since", "start"}
"""Words behind a unit in a column's name."""


@dataclass(frozen=True)
class ArrivalUnit:
    """A unit of numeric arrivals, and the reason for it."""

    name: str
    why: str


def words_of(name: str) -> list[str]:
    """Return the words of a column's name in lower case: `arrivalTimeMs` has arrival, time and ms."""
    parts = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", re.sub("[µμ]", "u", name))  # both letters mu
    return [part.lower() for part in parts]


def split_unit(name: str) -> tuple[str, str | None]:
    """Split a column's name into its letters without the unit, and the unit.

    `arrival_time_ms` becomes (`arrivaltime`, `ms`).
    """
    words = words_of(name)
    unit = next((_UNIT_OF[word] for word in words if word in _UNIT_OF), None)
    before = [word for word in words if word not in _CLOCK_WORDS]
    if unit is None and len(before) > 1 and before[-1] in UNITS:
        unit = before[-1]
        words = before
    if unit:
        words = [word for word in words if word not in (unit, "in") and word not in _UNIT_OF]
    letters = re.sub("[^a-z]", "", "".join(words))
    glued = None if unit else re.fullmatch("(.*(?:arrival|time|timestamp|arrivedat|ts))([mun]s)", letters)
    return (glued[1], glued[2]) if glued else (letters, unit)


def unit_of(moments: Sequence[float], column: str, names: Collection[str], path: object) -> ArrivalUnit:
    """Return the unit of numeric arrivals in a column of a trace.

    `names` are the trace's columns, which may identify a known kind of trace.

    Raises:
        InputError: Several units are plausible; the message names all of them.
    """
    by_name = split_unit(column)[1]
    if by_name:
        return ArrivalUnit(by_name, "as the column's name says")
    low, high = min(moments), max(moments)
    epoch = next((unit for unit in _CLOCKS if _FIRST_S <= low * UNITS[unit] <= high * UNITS[unit] < _LAST_S), None)
    if epoch:
        return ArrivalUnit(epoch, f"because its numbers are then dates from {_year(low * UNITS[epoch])}")
    dates = all(number_date(at) is not None for at in moments)
    if dates and any(word.startswith(DATE) for word in words_of(column)):
        return ArrivalUnit(DATE, "as the column's name says")
    whole = all(float(at).is_integer() for at in moments)
    kind = _known_kind(column, names, whole)
    if low == high:
        return kind or ArrivalUnit("s", "because the unit makes no difference")
    gap = (high - low) / (len(moments) - 1)
    plausible = [unit for unit in _CLOCKS if _is_plausible(gap * UNITS[unit], high - low, high, UNITS[unit])]
    if kind and kind.name in plausible:
        return kind
    plausible += [kind.name] if kind else []
    why = "because no other unit gives a plausible rate"
    longest = _SLOWEST_FRACTION_S if len(moments) > _FEW else _SLOWEST_OF_FEW_S
    if len(plausible) > 1 and "s" in plausible and not whole and gap <= longest:
        plausible, why = ["s"], "because its numbers have fractions, which are rare in clocks with smaller units"
    if dates and _are_plausible(moments):
        plausible.append(DATE)
    if len(plausible) == 1:
        return ArrivalUnit(plausible[0], why)
    if not plausible and gap <= _QUICKEST_S:
        return ArrivalUnit("s", "because each other unit gives a higher rate")
    raise _doubt(moments, column, plausible or list(_CLOCKS), path)


def in_seconds(moments: Sequence[float], unit: str, where: str) -> list[float]:
    """Return numeric arrivals in seconds since the first; InputError for a number that is no date of the unit DATE."""
    if unit == DATE:
        dates = [number_date(at) for at in moments]
        wrong = next((at for at, date in zip(moments, dates, strict=True) if date is None), None)
        if wrong is not None:
            raise InputError(
                f"{where}: {wrong:.15g} is not a date: dates are numbers like 20231116 or a spreadsheet's day numbers."
            )
        first = min(at for at in dates if at is not None)
        return [at - first for at in dates if at is not None]
    first = min(moments)
    return [(at - first) * UNITS[unit] for at in moments]  # in this order: an epoch's digits are not lost


def number_date(number: float) -> float | None:
    """Return the seconds since 1970 of a date written as a number, in the years 2000 to 2100; None for others."""
    if _SHEET_DAYS[0] <= number < _SHEET_DAYS[1]:
        return (number - 25_569) * 86_400  # days since the end of 1899
    form = {8: "%Y%m%d", 14: "%Y%m%d%H%M%S"}.get(len(f"{number:.0f}")) if float(number).is_integer() else None
    try:
        date = datetime.strptime(f"{number:.0f}", form).replace(tzinfo=timezone.utc) if form else None
    except ValueError:
        return None
    return date.timestamp() if date and 2000 <= date.year < 2100 else None


def rate_text(count: int, span_s: float) -> str:
    """Return the rate of `count` requests over the time from the first arrival to the last, as text."""
    rate = (count - 1) / span_s
    if rate >= 0.1:
        return f"{figure_text(rate)} requests/s"
    gap_s = 1 / rate
    return f"one request every {duration_text(gap_s) if gap_s < 7200 else f'{figure_text(gap_s / 3600)} hours'}"


def unit_text(unit: str) -> str:
    """Return a unit for a sentence: `in milliseconds`."""
    return "dates" if unit == DATE else f"in {_IN_WORDS[unit]}"


def _known_kind(column: str, names: Collection[str], whole: bool) -> ArrivalUnit | None:
    """Return the unit of a known kind of trace.

    Mooncake's `timestamp` is in milliseconds. The `timestamp` of Qwen-Bailian, which also has a `chat_id`, and that of
    BurstGPT are in seconds.
    """
    if column == "timestamp" and ("hash_ids" in names or (whole and {"input_length", "output_length"} <= set(names))):
        bailian = "chat_id" in names
        return (
            ArrivalUnit("s", "as in Qwen-Bailian's traces") if bailian else ArrivalUnit("ms", "as in Mooncake's traces")
        )
    if column == "Timestamp" and {"Request tokens", "Response tokens"} <= set(names):
        return ArrivalUnit("s", "as in BurstGPT's traces")
    return None


def _is_plausible(gap_s: float, span: float, last: float, unit_s: float) -> bool:
    """Return whether requests come at a credible rate for a credible time, and no later than the year 2100."""
    quick_enough = _QUICKEST_S < gap_s <= _SLOWEST_S
    return quick_enough and span * unit_s <= _LONGEST_S and abs(last) * unit_s < _LAST_S


def _are_plausible(moments: Sequence[float]) -> bool:
    """Return whether numbers, read as dates, give a plausible rate.

    Dates of whole days don't have a time of day.
    """
    seconds = in_seconds(moments, DATE, "")
    gap_s = max(seconds) / (len(seconds) - 1)
    return moments[0] >= _SHEET_DAYS[1] or _QUICKEST_S < gap_s <= _SLOWEST_S


def _doubt(moments: Sequence[float], column: str, plausible: Sequence[str], path: object) -> InputError:
    """Return the error for numbers with several plausible units; it asks the user to choose."""
    readings = []
    for unit in plausible:
        span_s = max(in_seconds(moments, unit, ""))
        rate = rate_text(len(moments), span_s) if span_s else "requests of one day"
        readings.append(f"{rate} if they are {unit_text(unit)} (--columns arrival={column}:{unit})")
    return InputError(
        f"The unit of column '{column}' in '{path}' is not clear, because its {len(moments):,} arrivals are "
        f"{' or '.join(readings)}: choose one, or add the unit to the column's name, like {column}_ms."
    )


def _year(seconds: float) -> int:
    return datetime.fromtimestamp(seconds, timezone.utc).year
