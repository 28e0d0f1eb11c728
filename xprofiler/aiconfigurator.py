"""The aiconfigurator source: reads the Parquet files with operator tables in its package, without running its code.

They are `data/SYSTEM/FAMILY/ENGINE/VERSION/NAME_perf.parquet` under the package's systems folder; the newest version of
each table is used. Latencies are in milliseconds.
"""

import importlib.util
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.rows import reading_parquet
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.engine_spec import NO_ENGINE, EngineSpec
from xcore.specs.model import BYTES, ModelSpec, usual_kv_dtype
from xcore.specs.profile import Profile, Table
from xprofiler.gaps import bridge, gridded, table
from xprofiler.heads import table_for
from xprofiler.kernel_tables import TABLES
from xprofiler.operators import Operators, compose
from xprofiler.products import Products

SYSTEMS = {tables.system: tables.device for tables in TABLES}
"""The package's systems → our device kinds."""
ENGINES = ("vllm", "trtllm", "sglang")
_PACKAGE = "aiconfigurator_core"
_GEMM_DTYPES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8"}  # 16-bit formats have one rate
_MS = 1e-3
_ELEMENT_BYTES = 2  # messages are counted in 16-bit elements: in bytes, no link would come near its data sheet


def systems_folder() -> Path | None:
    """Return the installed package's folder of tables; None if it isn't installed."""
    package = importlib.util.find_spec(_PACKAGE)
    places = package.submodule_search_locations if package else None
    return Path(next(iter(places))) / "systems" if places else None


def aiconfigurator_profile(
    model: ModelSpec,
    system: str,
    engine: str = "vllm",
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    folder: Path | None = None,
    overhead_s: float = 0.0,
    serving: EngineSpec = NO_ENGINE,
) -> Profile:
    """Return a model's Profile on `system` from the tables measured with `engine`'s kernels.

    `folder` is the systems folder, by default that of the installed package. `overhead_s` is the engine's own time per
    iteration, which the tables don't hold. Alternatively, `serving` is the engine whose overheads are added, except for
    its clock, since measured kernels ran at their own clock.

    Raises:
        InputError: The tables don't hold a system, engine, dtype or shape; the message lists what they hold.
    """
    if engine not in ENGINES:
        raise InputError(f"There are no tables of engine '{engine}': use one of {', '.join(ENGINES)}.")
    if system not in SYSTEMS:
        raise InputError(f"There is no system '{system}': the systems are {', '.join(SYSTEMS)}.")
    if dtype not in _GEMM_DTYPES:
        raise InputError(f"The tables hold no matrix products in {dtype}: use one of {', '.join(_GEMM_DTYPES)}.")
    cluster = parse_cluster(f"1x8x{SYSTEMS[system]}")
    kv_dtype = kv_dtype or usual_kv_dtype(dtype)
    tables = _Tables(_find(folder) / "data" / system, engine)
    return compose(
        model,
        _operators(model, tables, cluster, dtype, kv_dtype),
        dtype,
        cluster,
        overhead_s,
        {
            "origin": "operator tables of aiconfigurator",
            "system": system,
            "engine": engine,
            "kv_dtype": kv_dtype,
            **{f"{name}_version": version for name, version in tables.versions.items()},
            "products": "their share of full speed is interpolated between measured shapes, and constant beyond 65536"
            + (
                "; the kernel that quantises their input is not included"
                if (engine, dtype) == ("trtllm", "fp8")
                else ""
            ),
            "pieces": "attention of a chunk: the whole prompt's, times the chunk's share of token pairs",
            "send": "half the time of a two-device all-gather; between nodes: the data sheet of the device kind",
            "filled": "attention of more tokens than were measured grows with the work, and is listed as filled",
            "not_in_source": "the engine's own time per iteration; sampling; norms, rotary embedding and activation, "
            "which take their bytes at the bandwidth that products reach, but at least as long as the least product"
            + ("; products in fp16, which take as long as in bf16" if dtype == "fp16" else ""),
        },
        serving,
    )


def _find(folder: Path | None) -> Path:
    systems = folder or systems_folder()
    if systems is None:
        raise InputError(
            "The package aiconfigurator is not installed: `pip install exegpt[gpu-data]`, or name its systems folder."
        )
    if not (systems / "data").is_dir():
        raise InputError(f"'{systems}' is not a systems folder of aiconfigurator: it has no folder 'data'.")
    return systems


@dataclass
class _Tables:
    """One system's tables."""

    folder: Path
    engine: str
    versions: dict[str, str] = field(default_factory=dict)
    """The version of each table that has been read."""

    def columns(self, family: str, name: str, engine: str | None = None, **only: object) -> dict[str, Array]:
        """Return the columns of a table's rows that have these values.

        Raises:
            InputError: There is no such table or row.
        """
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        engine = engine or self.engine
        files = sorted(
            (self.folder / family / engine).glob(f"*/{name}_perf.parquet"), key=lambda p: _order(p.parent.name)
        )
        if not files:
            raise InputError(f"System '{self.folder.name}' has no table '{name}' of {engine}: pass another --engine.")
        self.versions[name] = files[-1].parent.name
        with reading_parquet(files[-1]):
            rows = pq.read_table(files[-1])
        for column, value in only.items():
            if column in rows.column_names:
                left = rows.filter(pc.equal(rows[column], value))
                if not left.num_rows:
                    known = ", ".join(sorted(map(str, set(rows[column].to_pylist()))))
                    raise InputError(
                        f"System '{self.folder.name}' has no {column} {value} in table '{name}' of {engine}: use "
                        f"one of {known}."
                    )
                rows = left
        return {column: rows[column].to_numpy() for column in rows.column_names}


def _order(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]


def _operators(model: ModelSpec, tables: _Tables, cluster: ClusterSpec, dtype: str, kv_dtype: str) -> Operators:
    device = cluster.device

    def products(kind: str, flops: str) -> Products:
        rows = tables.columns("gemm", "gemm", gemm_dtype=kind)
        m, n, k = (rows[c].astype(np.float64) for c in "mnk")
        rates = (device.flops_s[flops], device.bandwidth_bytes_s, BYTES[flops])
        return Products.of(m, n, k, rows["latency"] * _MS, *rates)

    half = products("bfloat16", "bf16")
    measured = half if dtype != "fp8" else products(_GEMM_DTYPES[dtype], dtype)
    # An 8-bit product was measured with a kernel that quantises its input first. With TensorRT-LLM's static scales the
    # norm or activation before does that: what the least 8-bit product takes beyond the least 16-bit one is left out.
    quantising = max(measured.floor_s - half.floor_s, 0.0) if tables.engine == "trtllm" else 0.0
    attention = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8"}.get(kv_dtype, kv_dtype)
    encode = _attention(tables, "context", model.head_size, attention)
    decode = _attention(tables, "generation", model.head_size, attention)
    reduce = _collective(tables.columns("comm", "custom_allreduce"))
    gather = _collective(tables.columns("comm", "nccl", engine="nccl", op_name="all_gather", nccl_dtype="half"))
    return Operators(
        rows=measured.rows,
        product=lambda n, k: measured.seconds(n, k) - quantising,
        head_product=lambda n, k: np.interp(measured.rows, half.rows, half.seconds(n, k)),
        moved=lambda size: half.floor_s + size / half.reached_bytes_s,
        encode_attention=lambda heads, kv_heads: table_for(encode, heads, kv_heads),
        decode_attention=lambda heads, kv_heads: table_for(decode, heads, kv_heads),
        all_reduce=lambda size, tp: _seconds(reduce, size, tp),
        all_gather=lambda size, tp: _seconds(gather, size, tp),
        degrees=(1, *sorted(reduce.keys() & gather.keys())),
        send=_halved(gather[2]),
    )


def _attention(tables: _Tables, phase: str, head_size: int, kv_dtype: str) -> dict[tuple[int, int], Table]:
    """Return tables over one common grid by (heads, KV heads), of the kernel with which most rows were measured.

    If a table has 8-bit attention as well as 8-bit keys and values, the 8-bit attention is what the engine uses.
    """
    name = f"{phase}_attention"
    rows = tables.columns("attention", name, head_dim=head_size, window_size=0, kv_cache_dtype=kv_dtype)
    kept = np.ones(len(rows["latency"]), dtype=bool)
    if kv_dtype == "fp8" and "fp8" in rows["attn_dtype"]:
        kept &= rows["attn_dtype"] == "fp8"
    kept &= rows["kernel_source"] == Counter(rows["kernel_source"][kept]).most_common(1)[0][0]
    length = rows["isl"] + rows["step"]  # a decoding row's step is what is cached before its token
    cells: dict[tuple[int, int], dict[tuple[float, ...], float]] = defaultdict(dict)
    key = (rows["num_heads"], rows["num_key_value_heads"], rows["batch_size"], length, rows["latency"])
    for heads, kv_heads, batch, tokens, latency in zip(*(column[kept].tolist() for column in key), strict=True):
        cells[heads, kv_heads][float(batch), float(tokens)] = latency * _MS
    points = tuple(tuple(map(float, np.unique(column[kept]))) for column in (rows["batch_size"], length))
    power = 2.0 if phase == "context" else 1.0
    axes = ("batch", "length" if phase == "context" else "context")
    return {heads: _completed(axes, points, measured, power) for heads, measured in cells.items()}


def _completed(
    axes: tuple[str, str],
    points: tuple[tuple[float, ...], ...],
    measured: dict[tuple[float, ...], float],
    power: float,
) -> Table:
    """Return the table, filled beyond the largest batches and lengths that were measured together.

    There, time grows with the work: in proportion to the batch, and with the length to the power `power`.
    """
    values = bridge(points, gridded(points, measured))
    beyond = values.copy()
    batches, lengths = (np.array(p) for p in points)
    for j in range(1, len(lengths)):
        grown = beyond[0, j - 1] * (lengths[j] / lengths[j - 1]) ** power
        beyond[0, j] = grown if np.isnan(beyond[0, j]) else beyond[0, j]
    for i in range(1, len(batches)):
        grown = beyond[i - 1] * (batches[i] / batches[i - 1])
        beyond[i] = np.where(np.isnan(beyond[i]), grown, beyond[i])
    return table(axes, points, values, beyond)


def _collective(rows: dict[str, Array]) -> dict[int, Table]:
    """Return tables of seconds by message bytes, one per number of devices.

    If both kinds were measured, kernels launched from a graph are used.
    """
    kept = np.ones(len(rows["latency"]), dtype=bool)
    sources = {str(s) for s in rows["kernel_source"]}
    graphs = {s for s in sources if s.endswith("_graph")}
    if graphs:
        kept &= np.isin(rows["kernel_source"].astype(str), sorted(graphs))
    tables = {}
    for devices in np.unique(rows["num_gpus"][kept]):
        measured = kept & (rows["num_gpus"] == devices)
        best: dict[float, float] = {}
        for size, latency in zip(
            rows["message_size"][measured].tolist(), rows["latency"][measured].tolist(), strict=True
        ):
            bytes_ = float(size) * _ELEMENT_BYTES
            best[bytes_] = min(latency * _MS, best.get(bytes_, np.inf))
        sizes = tuple(sorted(best))
        tables[int(devices)] = Table(("bytes",), (sizes,), tuple(best[s] for s in sizes))
    return tables


def _seconds(tables: dict[int, Table], size: Array, tp: int) -> Array:
    """Return the seconds of a collective over `tp` devices.

    A message smaller than all measured ones takes as long as the smallest.
    """
    if tp == 1:
        return np.zeros_like(size)
    return np.asarray(tables[tp](np.maximum(size, tables[tp].points[0][0])))


def _halved(gather: Table) -> Table:
    """Return the point-to-point table from an all-gather of two devices, each of which sends half of the message."""
    return Table(("bytes",), (tuple(b / 2 for b in gather.points[0]),), gather.values)
