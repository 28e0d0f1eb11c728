"""The Vidur source: operator timings as that simulator's profiler writes them, in CSV files (milliseconds).

A folder and its sub-folders hold files of four kinds, distinguished by their columns: the layer's operators by tokens
and tensor-parallel degree (mlp), attention by batch and cache size, all-reduces and send/receives by bytes.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.rows import CsvRow, csv_rows, csv_table
from xcore.specs.model import ModelSpec
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xprofiler.gaps import bridge, gridded, table
from xprofiler.operators import refuse_beyond_dense

_IN_LAYER = (
    *("input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "add"),
    *("post_attention_layernorm", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add"),
)
_KINDS = {  # an operator that only this kind of file times → the kind
    "mlp_up_proj": "mlp",
    "attn_decode": "attention",
    "all_reduce": "all_reduce",
    "send_recv": "send_recv",
}
_MS = 1e-3


@dataclass
class _Files:
    """The rows of a folder by kind."""

    folder: Path
    rows: dict[str, list[CsvRow]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for path in sorted(self.folder.rglob("*.csv")):
            names = csv_table(path, "CSV file").names
            kinds = [k for op, k in _KINDS.items() if _column(op) in names]
            if kinds:
                self.rows[kinds[0]].extend(csv_rows(path))

    def of(self, kind: str, shape: dict[str, int], model: str) -> list[CsvRow]:
        """Return the rows of this kind and shape.

        Raises:
            InputError: There are none; the message lists the known shapes.
        """
        rows = self.rows[kind]
        if not rows:
            raise InputError(f"'{self.folder}' has no {kind} file of Vidur.")
        matching = [row for row in rows if all(row.whole(key) == value for key, value in shape.items())]
        if not matching:
            known = {", ".join(f"{key} {row[key]}" for key in shape) for row in rows}
            raise InputError(f"The {kind} files in '{self.folder}' do not fit '{model}': they have {'; '.join(known)}.")
        return matching


def vidur_profile(model: ModelSpec, folder: Path, dtype: str = "fp16", overhead_s: float = 0.0) -> Profile:
    """Return the Profile that Vidur's CSV files describe, at the tensor-parallel degrees that all of them hold.

    `overhead_s` is the engine's own time per iteration, which the files don't hold.

    Raises:
        InputError: The files don't hold this model's shapes.
    """
    refuse_beyond_dense(model)
    files = _Files(folder)
    mlp_shape = {
        "n_head": model.heads,
        "n_kv_head": model.kv_heads,
        "n_embd": model.hidden,
        "n_expanded_embd": model.ffn,
    }
    mlp = _by_degree(files.of("mlp", mlp_shape, model.name))
    heads = {"n_q_head": model.heads, "n_kv_head": model.kv_heads, "n_embd": model.hidden}
    attention = _by_degree(files.of("attention", heads, model.name))
    reduce = {1: None} | {
        tp: _by_bytes(rows, "all_reduce")
        for tp in sorted(mlp.keys() & attention.keys() - {1})
        if (rows := _workers(files.rows["all_reduce"], tp, tp))
    }
    degrees = sorted(mlp.keys() & attention.keys() & reduce.keys())
    if not degrees:
        raise InputError(
            f"The files in '{folder}' have no tensor-parallel degree in common: mlp has {sorted(mlp)}, attention "
            f"{sorted(attention)}, and all_reduce {sorted(reduce)}."
        )
    nothing = Table(("bytes",), ((1.0,),), (0.0,))
    within, between = (_workers(files.rows["send_recv"], 2, n) for n in (2, 1))
    missing = [name for name, rows in (("within a node", within), ("between nodes", between)) if not rows]
    return Profile(
        version=Profile.VERSION,
        source="operators",
        model=model.fingerprint,
        layers=model.layers_fingerprint,
        dtype=dtype,
        device="unknown",
        degrees=tuple(_degree(model, tp, mlp[tp], attention[tp], reduce[tp]) for tp in degrees),
        overhead=Table(("batch",), ((1.0,),), (overhead_s,)),
        send=_by_bytes(within, "send_recv") if within else nothing,
        send_between_nodes=_by_bytes(between, "send_recv") if between else nothing,
        provenance={
            "origin": f"Vidur's CSV files in '{folder.name}'",
            "head": "the time of the feed-forward's first product, in proportion to its size",
            "prompts": "one prompt per kernel was measured: the times of several prompts add up",
            "filled": "chunks after more cached tokens than were measured take time in proportion to the token pairs",
            "not_in_source": "the device's name; the engine's own time per iteration; sampling"
            + "".join(f"; links {name} (taken as free)" for name in missing),
            "overhead_s": f"{overhead_s:.4g}",
        },
    )


def _column(operator: str) -> str:
    return f"time_stats.{operator}.median"


def _by_degree(rows: list[CsvRow]) -> dict[int, list[CsvRow]]:
    by_degree: dict[int, list[CsvRow]] = defaultdict(list)
    for row in rows:
        by_degree[row.whole("num_tensor_parallel_workers")].append(row)
    return by_degree


def _workers(rows: list[CsvRow], workers: int, on_node: int) -> list[CsvRow]:
    """Return the collectives of `workers` workers, `on_node` of them on one node."""
    return [r for r in rows if (r.whole("num_workers"), r.whole("devices_per_node")) == (workers, on_node)]


def _times(
    rows: list[CsvRow], key: Callable[[CsvRow], tuple[float, ...]], *operators: str
) -> dict[tuple[float, ...], float]:
    """Return the sum of the operators' seconds, by key: the median of the rows that share a key.

    An empty cell takes no time.
    """
    seconds: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for row in rows:
        seconds[key(row)].append(sum(row.number(_column(op), empty=0.0) for op in operators) * _MS)
    return {at: median(values) for at, values in sorted(seconds.items())}


def _by_bytes(rows: list[CsvRow], operator: str) -> Table:
    times = _times(rows, lambda row: (row.number("size"),), operator)
    return Table(("bytes",), (tuple(at for (at,) in times),), tuple(times.values()))


def _degree(
    model: ModelSpec, tp: int, mlp: list[CsvRow], attention: list[CsvRow], reduce: Table | None
) -> DegreeTables:
    def by_tokens(*operators: str) -> tuple[Array, Array]:
        times = _times(mlp, lambda row: (row.number("num_tokens"),), *operators)
        return np.array([at for (at,) in times]), np.array(list(times.values()))

    tokens, rest = by_tokens(*_IN_LAYER)
    _, embedding = by_tokens("emb")
    _, up = by_tokens("mlp_up_proj")
    if reduce is not None:
        sizes = np.maximum(2 * tokens * model.hidden, reduce.points[0][0])
        rest = rest + 2 * reduce(sizes)
        embedding = embedding + reduce(sizes)
    (n, k), _ = model.ffn_matrices(tp)
    chunk_table = _chunks([row for row in attention if row["is_prefill"] == "True"])
    chunks, alone = chunk_table.points[0], np.array(chunk_table.values).reshape(len(chunk_table.points[0]), -1)[:, 0]
    return DegreeTables(
        tp=tp,
        decoder=LayerTables(
            rest=_over("tokens", tokens, rest),
            encode_attention=Table(
                ("batch", "length"), ((1.0, 2.0), chunks), tuple(np.concatenate([alone, 2 * alone]).tolist())
            ),
            chunk_attention=chunk_table,
            decode_attention=_decoding([row for row in attention if row["is_prefill"] == "False"]),
        ),
        embedding=_over("tokens", tokens, embedding),
        head=_over("rows", tokens, up * (model.vocab // tp * model.hidden) / (n * k)),
    )


def _over(axis: str, at: Array, seconds: Array) -> Table:
    return Table((axis,), (tuple(at.tolist()),), tuple(seconds.tolist()))


def _chunks(rows: list[CsvRow]) -> Table:
    """Return the table over [chunk, past].

    Beyond the points measured together, time grows with the pairs of tokens.
    """
    ops = ("attn_prefill", "attn_input_reshape", "attn_output_reshape")
    times = _times(rows, lambda row: (row.number("prefill_chunk_size"), row.number("kv_cache_size")), *ops)
    points = tuple(tuple(sorted({at[axis] for at in times})) for axis in (0, 1))
    values = bridge(points, gridded(points, times))
    beyond = values.copy()
    chunk = np.array(points[0])
    for j in range(1, len(points[1])):
        pairs = [2 * points[1][i] + chunk + 1 for i in (j - 1, j)]
        beyond[:, j] = np.where(np.isnan(beyond[:, j]), beyond[:, j - 1] * pairs[1] / pairs[0], beyond[:, j])
    return table(("chunk", "past"), points, values, beyond)


def _decoding(rows: list[CsvRow]) -> Table:
    """Return the table over [batch, context]; a row's cache doesn't hold its new token yet."""
    ops = ("attn_decode", "attn_input_reshape", "attn_output_reshape")
    times = _times(rows, lambda row: (row.number("batch_size"), row.number("kv_cache_size") + 1), *ops)
    points = tuple(tuple(sorted({at[axis] for at in times})) for axis in (0, 1))
    values = bridge(points, gridded(points, times))
    beyond = values.copy()
    for i in range(1, len(points[0])):
        grown = beyond[i - 1] * points[0][i] / points[0][i - 1]
        beyond[i] = np.where(np.isnan(beyond[i]), grown, beyond[i])
    return table(("batch", "context"), points, values, beyond)
