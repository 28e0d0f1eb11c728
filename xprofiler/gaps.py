"""Grids with gaps: a Table over a rectangle of which only parts were measured."""

import itertools
from collections.abc import Mapping

import numpy as np

from xcore.arrays import Array
from xcore.specs.profile import Table


def gridded(points: tuple[tuple[float, ...], ...], measured: Mapping[tuple[float, ...], float]) -> Array:
    """Return the measured seconds on the grid, NaN where nothing was measured; points off the grid are left out."""
    values = np.array([measured.get(at, np.nan) for at in itertools.product(*points)], dtype=np.float64)
    return values.reshape([len(p) for p in points])


def bridge(points: tuple[tuple[float, ...], ...], values: Array) -> Array:
    """Fill every NaN that lies between measured neighbours along an axis, linearly.

    The axis is the one whose two neighbours are nearest. This is repeated for points that the fills bracket. Points
    without neighbours on both sides stay NaN.
    """
    values = values.copy()
    while True:
        best, width = np.full(values.shape, np.nan), np.full(values.shape, np.inf)
        for axis, at in enumerate(points):
            filled, span = _along(np.asarray(at), np.moveaxis(values, axis, -1))
            filled, span = np.moveaxis(filled, -1, axis), np.moveaxis(span, -1, axis)
            nearer = span < width
            best[nearer], width[nearer] = filled[nearer], span[nearer]
        gaps = np.isnan(values) & np.isfinite(best)
        if not gaps.any():
            return values
        values[gaps] = best[gaps]


def _along(at: Array, values: Array) -> tuple[Array, Array]:
    """Interpolate linearly between the measured values of each line [..., n].

    Return also how many steps apart the two neighbours are.
    """
    n = len(at)
    known = np.isfinite(values)
    place = np.arange(n)
    below = np.maximum.accumulate(np.where(known, place, -1), axis=-1)
    above = np.minimum.accumulate(np.where(known, place, n)[..., ::-1], axis=-1)[..., ::-1]
    between = (below >= 0) & (above < n) & ~known
    low, high = np.clip(below, 0, n - 1), np.clip(above, 0, n - 1)
    share = (at - at[low]) / np.where(between, at[high] - at[low], 1.0)
    left, right = np.take_along_axis(values, low, -1), np.take_along_axis(values, high, -1)
    return (
        np.where(between, left + share * (right - left), np.nan),
        np.where(between, (high - low).astype(np.float64), np.inf),
    )


def table(axes: tuple[str, ...], points: tuple[tuple[float, ...], ...], values: Array, beyond: Array) -> Table:
    """Return the Table of `values`; its NaNs are replaced by the values of `beyond` and listed as filled."""
    gaps = np.isnan(values)
    filled = np.where(gaps, beyond, values).ravel()
    return Table(axes, points, tuple(filled.tolist()), filled=tuple(np.flatnonzero(gaps).tolist()) or None)
