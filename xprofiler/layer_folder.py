"""The layers source: a folder of one engine's layer timings, as LLM serving simulators publish them.

`attention.csv` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us) times one attention kernel for a chunk of a
prompt together with decoding sequences. `dense.csv` (layer, tokens, time_us) times the other layers by tokens.
`per_sequence.csv` (layer, sequences, time_us) times the layers that process one row per sequence. Times are in
microseconds, for one device.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np

from xcore.arrays import Array
from xcore.document import read_yaml
from xcore.errors import InputError
from xcore.rows import CsvRow, csv_rows
from xcore.specs.model import ModelSpec
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xprofiler.gaps import bridge, gridded, table
from xprofiler.operators import refuse_beyond_dense

_IN_LAYER = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm", "gate_up_proj", "act_fn", "down_proj")
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_US = 1e-6


def layers_profile(model: ModelSpec, folder: Path, dtype: str | None = None, overhead_s: float = 0.0) -> Profile:
    """Return the Profile that a folder of layer timings describes, for one device.

    `overhead_s` is the engine's own time per iteration, which such a folder doesn't hold.

    Raises:
        InputError: A file, column or layer is missing, or `meta.yaml` names another model.
    """
    refuse_beyond_dense(model)
    meta = _meta(folder)
    _check_model(model, meta, folder)
    dtype = dtype or str(meta.get("variant", ""))
    if not dtype:
        raise InputError(f"'{folder}' has no meta.yaml with a dtype: pass --dtype.")
    dense = _by_layer(folder / "dense.csv", "tokens", (*_IN_LAYER, "embedding", "final_layernorm"))
    rows = _by_layer(folder / "per_sequence.csv", "sequences", ("lm_head", "sampler"))
    nothing = Table(("bytes",), ((1.0,),), (0.0,))
    known = ("hardware", "gpu", "model", "vllm_version", "cuda_version", "profiled_at")
    return Profile(
        version=Profile.VERSION,
        source="operators",
        model=model.fingerprint,
        layers=model.layers_fingerprint,
        dtype=dtype,
        device=str(meta.get("hardware", "unknown")),
        degrees=(
            DegreeTables(
                tp=1,
                decoder=_layer(dense, _attention(folder / "attention.csv")),
                embedding=_sum("tokens", [dense["embedding"]]),
                head=_sum("rows", [rows["lm_head"], rows["sampler"], dense["final_layernorm"]]),
            ),
        ),
        overhead=Table(("batch",), ((1.0,),), (overhead_s,)),
        send=nothing,  # one device sends nothing
        send_between_nodes=nothing,
        provenance={
            "origin": f"layer timings of '{folder.name}'",
            **{key: str(meta[key]) for key in known if key in meta},
            "not_in_source": "the engine's own time per iteration; tensor parallelism; links",
            "overhead_s": f"{overhead_s:.4g}",
        },
    )


def _meta(folder: Path) -> dict[str, object]:
    """Return the contents of `meta.yaml` in the folder or its parent; empty if there is none."""
    for path in (folder / "meta.yaml", folder.parent / "meta.yaml"):
        if path.is_file():
            meta = read_yaml(path, "meta") or {}
            if not isinstance(meta, dict):
                raise InputError(f"'{path}' does not hold keys with values.")
            return meta
    return {}


def _check_model(model: ModelSpec, meta: dict[str, object], folder: Path) -> None:
    from xcore.specs.builtin_models import builtin_model

    named = meta.get("model")
    if named is None:
        return
    try:
        measured = builtin_model(str(named))
    except InputError:  # a model that isn't built in can't be compared
        return
    if measured.layers_fingerprint != model.layers_fingerprint:
        raise InputError(f"'{folder}' has layers of {named}, not of '{model.name}': pass --model {named}.")


def _read(path: Path, columns: tuple[str, ...]) -> list[CsvRow]:
    if not path.is_file():
        raise InputError(f"There is no file '{path}', which a folder of layers must have: add it.")
    return csv_rows(path, *columns, "time_us")


def _by_layer(path: Path, axis: str, needed: tuple[str, ...]) -> dict[str, dict[float, float]]:
    """Return seconds by layer and number of tokens or sequences."""
    seconds: dict[str, dict[float, float]] = defaultdict(dict)
    for row in _read(path, ("layer", axis)):
        seconds[row["layer"]][row.number(axis)] = row.number("time_us") * _US
    for layer in needed:
        if layer not in seconds:
            raise InputError(f"'{path}' has no layer '{layer}': its layers are {', '.join(sorted(seconds))}.")
    return dict(seconds)


def _sum(axis: str, parts: list[dict[float, float]]) -> Table:
    """Return the sum of several layers' times at the points of the first.

    The times of the other layers are interpolated linearly.
    """
    at = tuple(sorted(parts[0]))
    total = sum(np.interp(at, sorted(p), [p[x] for x in sorted(p)]) for p in parts)
    return Table((axis,), (at,), tuple(np.asarray(total).tolist()))


def _layer(dense: dict[str, dict[float, float]], mixed: Table) -> LayerTables:
    """Return the tables of one layer.

    Attention of prompts alone and of decoding alone are slices of the shared table.
    """
    chunks, pasts, decodes, contexts = mixed.points
    seconds = np.array(mixed.values).reshape([len(p) for p in mixed.points])
    alone = seconds[:, :, 0, 0]  # no decoding: the context doesn't matter

    def slice_of(axes: tuple[str, str], points: tuple[tuple[float, ...], ...], values: Array) -> Table:
        return Table(axes, points, tuple(values.ravel().tolist()))

    return LayerTables(
        rest=_sum("tokens", [dense[name] for name in _IN_LAYER]),
        # One prompt per kernel was measured: several take one after the other.
        encode_attention=slice_of(
            ("batch", "length"), ((1.0, 2.0), chunks[1:]), np.stack([alone[1:, 0], 2 * alone[1:, 0]])
        ),
        chunk_attention=slice_of(("chunk", "past"), (chunks[1:], pasts), alone[1:]),
        decode_attention=slice_of(("batch", "context"), (decodes[1:], contexts), seconds[0, 0, 1:]),
        mixed_attention=mixed,
    )


def _attention(path: Path) -> Table:
    """Return the shared kernel's table over [chunk, past, decodes, context].

    Without a prompt the past has no effect, and without decoding the context has none: these planes repeat the measured
    value. Gaps between two measured grids are filled linearly. Prompts with more decoding sequences than were measured
    together are outside all measurements. Such points are listed as filled: their time grows with the decoding
    sequences as without a prompt.
    """
    measured = {tuple(r.number(c) for c in _ATTENTION): r.number("time_us") * _US for r in _read(path, _ATTENTION)}
    points = tuple(tuple(sorted({at[axis] for at in measured} | {0.0})) for axis in range(3))
    contexts = tuple(sorted({at[3] for at in measured if at[2] > 0}))
    points = (*points, contexts)
    values = gridded(points, measured)
    values[0] = values[0, 0]
    values[:, :, 0, :] = gridded((*points[:3], (0.0,)), measured)[:, :, 0, :]
    values[0, :, 0, :] = 0.0
    values = bridge(points, values)
    beyond = values.copy()
    for n in range(1, len(points[2])):
        growth = values[0, 0, n] - values[0, 0, n - 1]
        beyond[:, :, n] = np.where(np.isnan(beyond[:, :, n]), beyond[:, :, n - 1] + growth, beyond[:, :, n])
    if np.isnan(beyond).any():
        raise InputError(
            f"'{path}' has too few rows with only chunks or with only decoding to fill its grid: add measurements."
        )
    return table(("chunk", "past", "decodes", "context"), points, values, beyond)
