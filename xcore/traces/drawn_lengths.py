"""Workloads of drawn lengths: `lognormal(1024,0.8)/normal(256,64)`, `2048±512/256`."""

import math
import re

import numpy as np

from xcore.arrays import Array, Integers
from xcore.errors import InputError
from xcore.specs.workload import MAX_TOKENS, LengthDistribution, Workload

_NUMBER = r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*"
_TWO = rf"\({_NUMBER},{_NUMBER}\)"
_KINDS = {
    "fixed": re.compile(_NUMBER),
    "around": re.compile(rf"{_NUMBER}(?:±|\+-|\+/-){_NUMBER}"),
    "uniform": re.compile(rf"uniform{_TWO}"),
    "normal": re.compile(rf"normal{_TWO}"),
    "lognormal": re.compile(rf"lognormal{_TWO}"),
}
_TAIL = 1e-6
"""Share of the longest lengths that is cut off."""
_POINTS = 512
"""Most lengths of a distribution; neighbours beyond are joined at their mean."""
FORMS = "2048/256, 2048±512/256, uniform(1,512)/64 or lognormal(1024,0.8)/normal(256,64)"


def synthetic_workload(text: str) -> Workload | None:
    """Return the workload of two drawn lengths, of the input and of the output; None for other text.

    `N±D` and `uniform(A,B)` have each length alike often, `normal(MEAN,SD)` and `lognormal(MEDIAN,SIGMA)` are cut at 1
    and at the longest in a million.

    Raises:
        InputError: A parameter is not usable.
    """
    parts = re.split(r"(?<!\+)/", text)
    if len(parts) != 2:
        return None
    matches = [_match(part) for part in parts]
    if any(match is None for match in matches):
        return None
    input, output = (_distribution(*match, text) for match in matches if match)
    return Workload(text, input, output, output.quantile(0.99))


def _match(text: str) -> tuple[str, float, float] | None:
    for kind, pattern in _KINDS.items():
        if match := pattern.fullmatch(text.strip()):
            numbers = [float(number) for number in match.groups()]
            return kind, numbers[0], numbers[-1]
    return None


def _distribution(kind: str, first: float, second: float, text: str) -> LengthDistribution:
    if kind in ("fixed", "around", "uniform"):
        half = second if kind == "around" else 0.0
        low, high = (first, second) if kind == "uniform" else (first - half, first + half)
        if low != int(low) or high != int(high) or not 1 <= low <= high <= MAX_TOKENS:
            raise InputError(
                f"The lengths '{text}' are not usable: they go from {low:g} to {high:g}, but must be whole numbers "
                f"from 1 to {MAX_TOKENS:,}."
            )
        lengths = np.arange(int(low), int(high) + 1, dtype=np.int64)
        return _joined(lengths, np.ones(len(lengths)))
    if first <= 0 or second <= 0:
        raise InputError(f"The lengths '{text}' are not usable: the parameters of {kind} must be above 0.")
    return _cut(kind, first, second, text)


def _cut(kind: str, first: float, second: float, text: str) -> LengthDistribution:
    """Return a continuous distribution in whole tokens: P(s) is its weight in (s − 1, s]."""
    from scipy.special import ndtr, ndtri

    def standard(lengths: Array) -> Array:
        with np.errstate(divide="ignore"):
            z: Array = (np.log(lengths / first) if kind == "lognormal" else lengths - first) / second
        return z

    far = float(ndtri(1 - _TAIL)) * second
    longest = first * math.exp(min(far, 100.0)) if kind == "lognormal" else first + far
    if longest > MAX_TOKENS:
        raise InputError(f"The lengths '{text}' are not usable: one in a million is longer than {MAX_TOKENS:,} tokens.")
    edges = np.arange(0, math.ceil(longest) + 1, dtype=np.float64)
    weights = np.diff(ndtr(standard(edges)))
    if weights.sum() <= 0:
        raise InputError(f"The lengths '{text}' are not usable: none is at least 1.")
    return _joined(np.arange(1, len(edges), dtype=np.int64), weights)


def _joined(lengths: Integers, weights: Array) -> LengthDistribution:
    """Return the distribution of these lengths with at most `_POINTS` of them, near the same mean."""
    keep = weights > 0
    lengths, weights = lengths[keep], weights[keep]
    if len(lengths) > _POINTS:
        place = np.log(lengths / lengths[0]) / math.log(lengths[-1] / lengths[0])
        part = np.minimum((place * _POINTS).astype(int), _POINTS - 1)
        totals = np.bincount(part, weights=weights)
        means = np.bincount(part, weights=weights * lengths)[totals > 0] / totals[totals > 0]
        lengths = np.rint(means).astype(np.int64)
        weights = totals[totals > 0].astype(np.float64)
    unique, inverse = np.unique(lengths, return_inverse=True)
    p = np.bincount(inverse, weights=weights)
    return LengthDistribution(tuple(int(n) for n in unique), tuple((p / p.sum()).tolist()))
