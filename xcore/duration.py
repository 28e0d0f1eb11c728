"""Durations as people write them: `5s`, `250ms`, `2m`, `inf`."""

import math
import re

from xcore.errors import InputError
from xcore.quantity import figure_text

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h)")


def parse_duration(text: str) -> float | None:
    """Parse a positive duration into seconds; None for `inf` (unbounded). Raises InputError for anything else."""
    if text.strip().lower() == "inf":
        return None
    match = _FORM.fullmatch(text.strip().lower())
    if not match:
        raise InputError(f"'{text}' is not a duration: write a number and a unit, like 5s, 250ms, 2m, or inf.")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds < math.inf:
        raise InputError(f"'{text}' is not a usable duration: it must be greater than zero (inf means no bound).")
    return seconds


def parse_delay(text: str, option: str, most_s: float = 60.0) -> float:
    """Return the seconds in `text`, zero included. Raises InputError for all but a duration of up to `most_s`."""
    match = _FORM.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else math.inf
    if seconds > most_s:
        raise InputError(f"{option} {text} is not a delay: write a number and a unit, between 0ms and {most_s:.0f}s.")
    return seconds


def format_duration(seconds: float | None) -> str:
    """Return `seconds` in the form that `parse_duration` reads, to three digits."""
    if seconds is None:
        return "inf"
    unit = "ms" if seconds < 1 else "s" if seconds < 120 else "m"
    return f"{figure_text(seconds / _SECONDS[unit]).replace(',', '')}{unit}"


def duration_text(seconds: float, digits: int = 3) -> str:
    """Return a time for sentences and tables, to `digits` digits: `137 s`, `9.63 s`, `87.4 ms`, `8 µs`."""
    if float(f"{seconds:.{digits}g}") >= 1:
        return f"{figure_text(seconds, digits)} s"
    if 0 < seconds < 1e-4:
        return f"{figure_text(seconds * 1e6, digits)} µs"
    return f"{figure_text(seconds * 1e3, digits)} ms"


def rounded_up(seconds: float, digits: int = 3) -> float:
    """Return the least time of `digits` digits that isn't below `seconds`: as text, a bound that can be met."""
    step = 10.0 ** (math.floor(math.log10(seconds)) + 1 - digits)
    return math.ceil(seconds / step * (1 - 1e-12)) * step


def beyond_text(seconds: float, limit_s: float) -> str:
    """Return a time and the limit that it exceeds: `12.1 s, over 12 s`.

    Both have four digits, or as many as distinguish them.
    """
    texts = ("", "")
    for digits in range(4, 17):
        texts = (duration_text(seconds, digits), duration_text(limit_s, digits))
        if texts[0] != texts[1]:
            break
    return ", over ".join(texts)
