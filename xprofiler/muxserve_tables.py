"""MuxServe's cost tables: milliseconds of complete iterations of a model, as its repository publishes them (JSON).

They are by GPUs, share of their multiprocessors in per cent, batch and length.
A cell of -1 didn't fit its memory. Some cells are outliers of several times their neighbours (the specification names
them), and a batch's decoding was averaged over shorter contexts. No cell may cost more than one with more work on no
more devices, so each gets the least of those (its lower envelope).
"""

from pathlib import Path
from typing import Any

import numpy as np

from xcore.arrays import Array
from xcore.document import parse_json, read_text
from xcore.errors import InputError
from xcore.specs.iteration_profile import IterationProfile, IterationTables
from xcore.specs.profile import Table

DEVICE = "A100-80GB"
MOST_BYTES = 64 * 2**20


def muxserve_profiles(path: Path) -> dict[str, IterationProfile]:
    """Return every model's iteration profile by MuxServe's name.

    Raises:
        InputError: The file isn't one of MuxServe's tables.
    """
    models = parse_json(read_text(path, "cost table", MOST_BYTES), f"'{path}'")
    try:
        return {name: _profile(name, degrees) for name, degrees in models.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"'{path}' is not a cost table of MuxServe: {error}.") from None


def _profile(name: str, degrees: dict[str, Any]) -> IterationProfile:
    tables: list[IterationTables] = []
    for tp in sorted(degrees, key=int):
        shares = sorted(degrees[tp], key=int)
        cells = [degrees[tp][share] for share in shares]
        batches = sorted({int(batch) for of_share in cells for batch in of_share})
        lengths = sorted({int(length) for of_share in cells for row in of_share.values() for length in row})
        prefill, decode = (_enveloped(cells, batches, lengths, phase) for phase in ("prefill", "decoding"))
        for share, of_prefill, of_decode in zip(shares, prefill, decode, strict=True):
            both = [_table(values, batches, lengths) for values in (of_prefill, of_decode)]
            tables.append(IterationTables(int(tp), int(share) / 100, *both))
    provenance: dict[str, object] = {
        "source": "MuxServe's cost tables",
        "cleaned": "lower envelope over work and share",
    }
    return IterationProfile(IterationProfile.VERSION, name, DEVICE, tuple(tables), provenance)


def _enveloped(cells: list[dict[str, Any]], batches: list[int], lengths: list[int], phase: str) -> Array:
    """Return [shares, batches, lengths] in seconds; infinite where no cell with at least as much work exists."""
    seconds = np.full((len(cells), len(batches), len(lengths)), np.inf)
    for s, of_share in enumerate(cells):
        for b, batch in enumerate(batches):
            for i, length in enumerate(lengths):
                measured = of_share.get(str(batch), {}).get(str(length), {}).get(phase, -1)
                seconds[s, b, i] = measured / 1e3 if measured > 0 else np.inf
    for axis in (1, 2):  # more work takes no less time
        seconds = np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis), axis)
    return np.minimum.accumulate(seconds, 0)  # nor does a smaller share


def _table(seconds: Array, batches: list[int], lengths: list[int]) -> Table:
    """Return the table of the largest rectangle of measured cells that begins with the smallest batch and length."""
    known = np.isfinite(seconds)
    if not known[0, 0]:
        raise ValueError(f"there is no measurement with batch {batches[0]} and length {lengths[0]}")
    columns = [int(np.cumprod(known[: rows + 1].all(axis=0)).sum()) for rows in range(len(batches))]
    rows = max(range(len(batches)), key=lambda row: (row + 1) * columns[row])
    values = seconds[: rows + 1, : columns[rows]]
    points = tuple(map(float, batches[: rows + 1])), tuple(map(float, lengths[: columns[rows]]))
    return Table(("batch", "length"), points, tuple(values.ravel().tolist()))
