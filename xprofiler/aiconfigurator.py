"""The aiconfigurator source: reads the Parquet files with operator tables in its package, without running its code.

They are `data/SYSTEM/FAMILY/ENGINE/VERSION/NAME_perf.parquet` under the package's systems folder; the newest version of
each table that has a model's shapes is used. Latencies are in milliseconds.
"""

import functools
import importlib.util
from pathlib import Path

import numpy as np

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.engine_spec import NO_ENGINE, EngineSpec
from xcore.specs.model import BYTES, ModelSpec, usual_kv_dtype
from xcore.specs.profile import Profile, Table
from xprofiler.attention_tables import absorption_table, attention_tables, latent_tables
from xprofiler.expert_tables import ExpertTables
from xprofiler.heads import table_for
from xprofiler.kernel_tables import TABLES
from xprofiler.operator_tables import MS, OperatorTables
from xprofiler.operators import Operators, compose
from xprofiler.products import Products
from xprofiler.roofline_device import arithmetic

SYSTEMS = {tables.system: tables.device for tables in TABLES}
"""The package's systems → our device kinds."""
ENGINES = ("vllm", "trtllm", "sglang")
_PACKAGE = "aiconfigurator_core"
_HALF = "bfloat16"
_PRODUCTS = {
    "bf16": _HALF,
    "fp16": _HALF,  # 16-bit formats have one rate
    "fp8": "fp8",
    "int8": "sq",
    "w8a16": "int8_wo",
    "int4": "int4_wo",
    "nvfp4": "nvfp4",
}
"""Dtype of the weights → the tables' name of matrix products."""
_BLOCKS, _SAME_KERNEL = "fp8_block", "sglang"
"""The kind of 8-bit products beside experts, whose checkpoints have a scale for each block; and whose tables help."""
_HOST_TIME = 5.0
"""Products of which none is shorter than so many of the shortest 16-bit one were measured with the host's time."""
_STATIC_SCALES = ("trtllm", "fp8")
"""The engine and the kind of products whose input another kernel quantises."""
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
    if model.dense_dtype(dtype) not in _PRODUCTS:
        raise InputError(f"The tables hold no matrix products in {dtype}: use one of {', '.join(_PRODUCTS)}.")
    cluster = parse_cluster(f"1x8x{SYSTEMS[system]}")
    kv_dtype = kv_dtype or usual_kv_dtype(dtype)
    tables = OperatorTables(_find(folder) / "data" / system, engine)
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


def _operators(model: ModelSpec, tables: OperatorTables, cluster: ClusterSpec, dtype: str, kv_dtype: str) -> Operators:
    dense = model.dense_dtype(dtype)
    half = _products(tables, cluster, "bf16", _HALF, tables.engine)
    if half is None:
        raise InputError(f"System '{tables.folder.name}' has too few products in {_HALF}: pass another --engine.")
    measured, kind = half, _HALF
    if _PRODUCTS[dense] != _HALF:
        blocks = dense == "fp8" and model.experts is not None
        measured, kind = _quantised_products(tables, cluster, dense, half, blocks)
    # An 8-bit product was measured with a kernel that quantises its input first. With TensorRT-LLM's static scales the
    # norm or activation before does that: what the least 8-bit product takes beyond the least 16-bit one is left out.
    static = (tables.engine, kind) == _STATIC_SCALES
    quantising = max(measured.floor_s - half.floor_s, 0.0) if static else 0.0
    reduce = _collective(tables.columns("comm", "custom_allreduce"))
    gather, scatter = (
        _collective(tables.columns("comm", "nccl", {"op_name": name, "nccl_dtype": "half"}, "nccl"))
        for name in ("all_gather", "reduce_scatter")
    )

    @functools.cache
    def attention(window: int) -> tuple[dict[tuple[int, int], Table], ...]:
        return tuple(
            attention_tables(tables, phase, model.head_size, kv_dtype, window) for phase in ("context", "generation")
        )

    for window in () if model.latent else (0, *((model.windows.size,) if model.windows else ())):
        attention(window)

    def of_heads(heads: int, kv_heads: int, window: int) -> tuple[Table, Table]:
        if model.latent:
            return latent_tables(tables, model.latent, heads, kv_dtype)
        prompts, decoding = (table_for(of_phase, heads, kv_heads) for of_phase in attention(window))
        return prompts, decoding

    if model.latent:
        of_heads(model.heads, 1, 0)  # so that the provenance has its version

    def exchange(size: Array, devices: int) -> Array:
        return _seconds(gather, size, devices) + _seconds(scatter, size, devices)

    return Operators(
        rows=measured.rows,
        product=lambda n, k: measured.seconds(n, k) - quantising,
        head_product=lambda n, k: np.interp(measured.rows, half.rows, half.seconds(n, k)),
        moved=lambda size: half.floor_s + size / half.reached_bytes_s,
        attention=of_heads,
        absorption=lambda heads: absorption_table(tables, heads, dense),
        all_reduce=lambda size, tp: _seconds(reduce, size, tp),
        all_gather=lambda size, tp: _seconds(gather, size, tp),
        exchange=exchange,
        degrees=(1, *sorted(reduce.keys() & gather.keys())),
        send=_halved(gather[2]),
        experts=ExpertTables.of(model, model.experts, tables, cluster, dtype) if model.experts else None,
        facts={"products_dtype": kind},
    )


def _products(tables: OperatorTables, cluster: ClusterSpec, dtype: str, kind: str, engine: str) -> Products | None:
    """Return the matrix products of one kind, and None if it was not measured at all common shapes."""
    rows = tables.find("gemm", "gemm", {"gemm_dtype": kind}, engine)
    if rows is None:
        return None
    device = cluster.device
    m, n, k = (rows[c].astype(np.float64) for c in "mnk")
    widths, index = np.unique(n, return_inverse=True)
    depths = np.array([len(np.unique(k[index == i])) for i in range(len(widths))])
    kept = (depths > depths.max() / 2)[index]  # a few narrow products were measured at single depths
    rates = (device.flops_s[arithmetic(device, dtype)], device.bandwidth_bytes_s, BYTES[dtype])
    products = Products.of(m[kept], n[kept], k[kept], rows["latency"][kept] * MS, *rates)
    return products if np.isfinite(products.ratio).all() else None


def _quantised_products(
    tables: OperatorTables, cluster: ClusterSpec, dtype: str, half: Products, blocks: bool
) -> tuple[Products, str]:
    """Return the matrix products with weights of fewer than 16 bits, and the tables' name of their kind.

    With `blocks`, a block of the weights shares a scale. vLLM's products of that kind were measured with the host's
    time, which a graph hides: those of SGLang, which runs the same kernel (DeepGEMM), take their place.

    Raises:
        InputError: The tables don't hold enough of them.
    """
    kind = _PRODUCTS[dtype]
    candidates = [(_BLOCKS, tables.engine), (_BLOCKS, _SAME_KERNEL)] if blocks else []
    for of, engine in candidates:
        products = _products(tables, cluster, dtype, of, engine)
        if products is not None and products.floor_s < _HOST_TIME * half.floor_s:
            return products, of if engine == tables.engine else f"{of} of {engine}"
    products = _products(tables, cluster, dtype, kind, tables.engine)
    if products is not None:
        return products, kind
    tables.columns("gemm", "gemm", {"gemm_dtype": kind})  # refuses a dtype that the table lacks
    raise InputError(
        f"System '{tables.folder.name}' has too few products in {kind} in the tables of {tables.engine}: pass another "
        "--engine or --dtype, or leave --profile out to use the data sheet."
    )


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
            best[bytes_] = min(latency * MS, best.get(bytes_, np.inf))
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
