"""The layers source: folders of one engine's layer timings, as LLM serving simulators publish them.

`attention.csv` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us) times one attention kernel for a chunk of a
prompt together with decoding sequences. `dense.csv` (layer, tokens, time_us) times the other layers by tokens.
`per_sequence.csv` (layer, sequences, time_us) times the layers that process one row per sequence. For a mixture of
experts, `moe.csv` (tokens, experts, top_k, ep, time_us) times a block of experts, from the router to the sum of the
results, where each of `ep` devices has whole experts. Times are in microseconds, on one device.

Either the folder has these files, or one folder for each tensor-parallel degree does: `profile_tp1` or `tp1`.
"""

import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from xcore.arrays import Array
from xcore.document import read_yaml
from xcore.errors import InputError
from xcore.rows import CsvRow, csv_rows
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.engine_spec import NO_ENGINE
from xcore.specs.model import ModelSpec, usual_kv_dtype
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xprofiler.gaps import bridge, gridded, table
from xprofiler.roofline_device import roofline_device

_AROUND = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm")
_FEED_FORWARD = ("gate_up_proj", "act_fn", "down_proj")
_IF_THERE = ("qk_norm",)
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_META = ("meta.yaml", "profile_meta.yaml")
_DEGREE = re.compile(r"(?:.*_)?tp(\d+)")
_US = 1e-6


def layers_profile(model: ModelSpec, folder: Path, dtype: str | None = None, overhead_s: float = 0.0) -> Profile:
    """Return the Profile that folders of layer timings describe, at the tensor-parallel degrees that they have.

    `overhead_s` is the engine's own time per iteration, which such a folder doesn't hold. All-reduces and links are
    those of the device's data sheet.

    Raises:
        InputError: A file, column or layer is missing, or `meta.yaml` names another model.
    """
    _check_layers(model)
    meta = _meta(folder)
    _check_model(model, meta, folder)
    dtype = dtype or str(meta.get("variant", ""))
    if not dtype:
        raise InputError(f"'{folder}' has no meta.yaml with a dtype: pass --dtype.")
    folders, device = _degrees(folder), str(meta.get("hardware", "unknown"))
    cluster = _cluster(device, max(folders))
    send = _send(cluster) if cluster else Table(("bytes",), ((1.0,),), (0.0,))  # one device sends nothing
    known = ("hardware", "gpu", "model", "vllm_version", "cuda_version", "profiled_at")
    return Profile(
        version=Profile.VERSION,
        source="operators",
        model=model.fingerprint,
        layers=model.layers_fingerprint,
        dtype=dtype,
        device=device,
        degrees=tuple(_degree(model, folders[tp], tp, dtype, cluster) for tp in sorted(folders)),
        overhead=Table(("batch",), ((1.0,),), (overhead_s,)),
        send=send,
        send_between_nodes=send,
        provenance={
            "origin": f"layer timings of '{folder.name}'",
            **{key: str(meta[key]) for key in known if key in meta},
            "not_in_source": "the engine's own time per iteration"
            + (f"; all-reduces and links, which are those of {device}'s data sheet" if cluster else "")
            + ("" if cluster else "; tensor parallelism; links"),
            "overhead_s": f"{overhead_s:.4g}",
        },
    )


def _check_layers(model: ModelSpec) -> None:
    """Raise InputError for layers that such folders can't describe."""
    missing = [text for text in model.beyond_dense if not (model.experts and text.endswith("per token"))]
    if missing:
        raise InputError(
            f"Model '{model.name}' has {' and '.join(missing)}, which folders of layers don't describe: leave "
            "--profile out to use the roofline."
        )


def _degrees(folder: Path) -> dict[int, Path]:
    """Return the folder of each tensor-parallel degree; a folder without a degree in its name is of one device."""
    if (folder / "dense.csv").is_file():
        named = _DEGREE.fullmatch(folder.name)
        return {int(named[1]) if named else 1: folder}
    of_degrees = {
        int(named[1]): path
        for path in sorted(folder.iterdir())
        if path.is_dir() and (named := _DEGREE.fullmatch(path.name))
    }
    return of_degrees or {1: folder}


def _cluster(device: str, tp: int) -> ClusterSpec | None:
    """Return the devices that share a layer; None for one device.

    Raises:
        InputError: The device has no data sheet, so its links aren't known.
    """
    if tp == 1:
        return None
    try:
        return parse_cluster(f"{tp}x{device}")
    except InputError as error:
        raise InputError(
            f"Layers of {tp} devices need the links of '{device}', which has no data sheet: name a known kind as "
            "`hardware` in meta.yaml."
        ) from error


def _send(cluster: ClusterSpec) -> Table:
    sizes, link = (1e3, 1e6, 1e9), cluster.intra
    return Table(("bytes",), (sizes,), tuple(link.latency_s + size / link.bandwidth_bytes_s for size in sizes))


def _degree(model: ModelSpec, folder: Path, tp: int, dtype: str, cluster: ClusterSpec | None) -> DegreeTables:
    dense_layers = 1.0 - model.experts.layers / model.layers if model.experts else 1.0
    needed = (*_AROUND, *(_FEED_FORWARD if dense_layers else ()), "embedding", "final_layernorm")
    dense = _by_layer(folder / "dense.csv", "tokens", needed)
    rows = _by_layer(folder / "per_sequence.csv", "sequences", ("lm_head", "sampler"))
    parts = [(1.0, dense[name]) for name in (*_AROUND, *(name for name in _IF_THERE if name in dense))]
    if dense_layers:
        parts += [(dense_layers, dense[name]) for name in _FEED_FORWARD]
    if model.experts:
        parts.append((1.0 - dense_layers, _experts(model, folder / "moe.csv", tp, dtype)))
    embedding, head = (
        _sum("tokens", [(1.0, dense["embedding"])]),
        _sum("rows", [(1.0, part) for part in (rows["lm_head"], rows["sampler"], dense["final_layernorm"])]),
    )
    rest = _sum("tokens", parts)
    if cluster and tp > 1:
        rest, embedding = (
            _reduced(part, times, model, dtype, tp, cluster) for part, times in ((rest, 2), (embedding, 1))
        )
        head = _gathered(head, model, dtype, tp, cluster)
    return DegreeTables(
        tp=tp, decoder=_layer(rest, _attention(folder / "attention.csv")), embedding=embedding, head=head
    )


def _experts(model: ModelSpec, path: Path, tp: int, dtype: str) -> dict[float, float]:
    """Return seconds of a block of experts by number of tokens."""
    experts = model.experts
    assert experts is not None, "only for a mixture of experts"
    ep = tp if model.expert_parallel(tp, dtype) else 1
    shape = {"experts": experts.count, "top_k": experts.per_token, "ep": ep}
    rows = _read(path, ("tokens", *shape))
    kept = [row for row in rows if all(row.whole(column) == value for column, value in shape.items())]
    if not kept:
        known = "; ".join(sorted({", ".join(f"{column} {row[column]}" for column in shape) for row in rows}))
        asked = ", ".join(f"{column} {value}" for column, value in shape.items())
        raise InputError(f"'{path}' has no rows with {asked}, which '{model.name}' needs: it has {known}.")
    return {row.number("tokens"): row.number("time_us") * _US for row in kept}


def _reduced(of: Table, times: int, model: ModelSpec, dtype: str, tp: int, cluster: ClusterSpec) -> Table:
    """Return a table over tokens with `times` all-reduces of hidden states."""
    device = roofline_device(cluster.device, cluster.intra, dtype, usual_kv_dtype(dtype), NO_ENGINE)
    longer = [times * device.all_reduce(n * model.hidden, tp) for n in of.points[0]]
    return Table(of.axes, of.points, tuple((np.array(of.values) + longer).tolist()))


def _gathered(head: Table, model: ModelSpec, dtype: str, tp: int, cluster: ClusterSpec) -> Table:
    """Return the head's table with the gathering of the devices' logits."""
    device = roofline_device(cluster.device, cluster.intra, dtype, usual_kv_dtype(dtype), NO_ENGINE)
    longer = [device.all_gather(n * model.vocab, tp) for n in head.points[0]]
    return Table(head.axes, head.points, tuple((np.array(head.values) + longer).tolist()))


def _meta(folder: Path) -> dict[str, object]:
    """Return the contents of `meta.yaml` in the folder or its parent; empty if there is none."""
    for path in (of / name for of in (folder, folder.parent) for name in _META):
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


def _sum(axis: str, parts: list[tuple[float, dict[float, float]]]) -> Table:
    """Return the sum of several layers' times, each with its weight, at the points of the first.

    The times of the other layers are interpolated linearly, and their last slope holds beyond.
    """
    at = tuple(sorted(parts[0][1]))
    tables = [(weight, Table((axis,), (tuple(sorted(p)),), tuple(p[x] for x in sorted(p)))) for weight, p in parts]
    total = sum(weight * np.asarray(table(np.array(at))) for weight, table in tables)
    return Table((axis,), (at,), tuple(np.broadcast_to(total, len(at)).tolist()))


def _layer(rest: Table, mixed: Table) -> LayerTables:
    """Return the tables of one layer.

    Attention of prompts alone and of decoding alone are slices of the shared table.
    """
    chunks, pasts, decodes, contexts = mixed.points
    seconds = np.array(mixed.values).reshape([len(p) for p in mixed.points])
    alone = seconds[:, :, 0, 0]  # no decoding: the context doesn't matter

    def slice_of(axes: tuple[str, str], points: tuple[tuple[float, ...], ...], values: Array) -> Table:
        return Table(axes, points, tuple(values.ravel().tolist()))

    return LayerTables(
        rest=rest,
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
