"""Attention tables for any number of heads, derived from measured ones.

KV heads are independent: 32 heads of one sequence are the same work as 8 heads of four. So heads that were not measured
become more sequences of fewer heads. A ratio of query heads to KV heads that was not measured is interpolated
between its neighbours.
"""

import math
from collections.abc import Mapping

import numpy as np

from xcore.errors import InputError
from xcore.specs.profile import Table


def table_for(measured: Mapping[tuple[int, int], Table], heads: int, kv_heads: int) -> Table:
    """Return the table [batch, length] for these numbers of heads and KV heads, from tables over one common grid.

    Raises:
        InputError: The table can't be derived from any measured table.
    """
    for fold in (d for d in range(1, kv_heads + 1) if math.gcd(heads, kv_heads) % d == 0):
        h, kv = heads // fold, kv_heads // fold
        if (h, kv) in measured:
            return _unfolded(measured[h, kv], fold)
        around = [other for other, k in measured if k == kv and other != kv]
        below, above = [o for o in around if o < h], [o for o in around if o > h]
        if h != kv and below and above:
            low, high = max(below), min(above)
            return _unfolded(_mixed(measured[low, kv], measured[high, kv], (h - low) / (high - low)), fold)
    known = ", ".join(f"{h}/{kv}" for h, kv in sorted(measured))
    raise InputError(
        f"No measured attention covers {heads} heads and {kv_heads} KV heads: the measured ones are {known}."
    )


def _unfolded(table: Table, fold: int) -> Table:
    """Return the table of `fold` times the heads, for a `fold`-th of the sequences.

    The grid keeps one point at or below one sequence.
    """
    if fold == 1:
        return table
    batches, lengths = table.points
    first = max(i for i, b in enumerate(batches) if b <= fold)
    values = np.array(table.values).reshape(len(batches), -1)[first:]
    skipped = first * len(lengths)
    return Table(
        table.axes,
        (tuple(b / fold for b in batches[first:]), lengths),
        tuple(values.ravel().tolist()),
        filled=tuple(i - skipped for i in table.filled or () if i >= skipped) or None,
    )


def _mixed(below: Table, above: Table, share: float) -> Table:
    values = (1 - share) * np.array(below.values) + share * np.array(above.values)
    filled = sorted(set(below.filled or ()) | set(above.filled or ()))
    return Table(below.axes, below.points, tuple(values.tolist()), filled=tuple(filled) or None)
