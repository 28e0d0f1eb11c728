"""Numbers as text: three significant digits, thousands separators, never an exponent."""

import math

NOTHING = "–"
"""Text for a missing number."""
_CAP = 10.0
"""Relative errors beyond this are printed as `> 10x`."""


def figure_text(value: float | None, digits: int = 3) -> str:
    """Return a figure to `digits` significant digits: `1,660`, `24.3`, `0.0517`.

    Whole numbers below a thousand keep all their digits. None is a dash; `inf` and `nan` keep their names.
    """
    if value is None:
        return NOTHING
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = float(f"{value:.{digits}g}")
    places = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:,.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text


def percent_text(share: float | None, digits: int = 3) -> str:
    """Return a share in percent: `98.5%`, `14.3%`."""
    return NOTHING if share is None else f"{figure_text(100 * share, digits)}%"


def signed_percent(share: float | None) -> str:
    """Return a relative error in percent, to a tenth: `-3.2%`; beyond tenfold only `> 10x`."""
    if share is None:
        return NOTHING
    return f"> {_CAP:.0f}x" if abs(share) > _CAP else f"{share:+.1%}"


def more_text(ratio: float) -> str:
    """Return how much more something is: `11% more`, from the double on `3.4 times as much`."""
    return f"{ratio - 1:.0%} more" if ratio < 2 else f"{figure_text(ratio, 2)} times as much"


def counted(count: int, spec: str) -> str:
    """Return a count with its noun: `1 device`, `1,024 devices`."""
    return f"{count:,} {spec}{'' if count == 1 else 's'}"


def count_text(count: float) -> str:
    """Return a large count in words: `8.03 billion`, `56.3 million`, `2,345`."""
    for scale, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= scale:
            return f"{figure_text(count / scale)} {word}"
    return f"{count:,.0f}"
