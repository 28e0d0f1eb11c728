"""Shares of the data sheets' figures that kernels reach in the tables of the package aiconfigurator-core 0.12.0.

Medians over three engines' medians, of the newest tables: matrix products of at least 4096 in every size (16 bits, 8
bits, NVFP4), memory bandwidth of at most 16 rows by at least 0.25 GB of weights, and TensorRT-LLM's attention over
prompts of 8,192 tokens and more (16 and 8 bits). Products in 8 and 4 bits include the quantisation of their input. They
are those of `xcore/specs/device_sheets.py`, whose comment says which of its shares are without the quantisation.

    python -m benchmarks.device_shares
"""

from pathlib import Path

import numpy as np

from xcore.arrays import Array
from xcore.specs.device_sheets import SHEETS, DeviceSheet
from xprofiler.aiconfigurator import systems_folder

SYSTEMS = {
    "a100_sxm": "A100-80GB",
    "h100_sxm": "H100-SXM",
    "h200_sxm": "H200-SXM",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTXPRO6000-Server",
    "b200_sxm": "B200",
    "b300_sxm": "B300-SXM",
    "gb200": "GB200",
    "gb300": "GB300",
}
ENGINES = ("vllm", "trtllm", "sglang")
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "fp4", "sq": "int8"}
"""The tables' dtypes of products, and ours."""
LARGE, FEW_ROWS, MANY_BYTES, LONG = 4096, 16, 0.25e9, 8192


def table(system: str, family: str, engine: str, name: str) -> dict[str, Array]:
    """Return the columns of an engine's newest table; none if there is no such table."""
    import pyarrow.parquet as pq

    folder = (systems_folder() or Path()) / "data" / system / family / engine
    files = sorted(folder.glob(f"*/{name}_perf.parquet"), key=lambda p: [int(n) for n in p.parent.name.split(".")[:2]])
    if not files:
        return {}
    rows = pq.read_table(files[-1])
    return {column: rows[column].to_numpy() for column in rows.column_names}


def product_shares(columns: dict[str, Array], sheet: DeviceSheet) -> dict[str, float]:
    """Return by dtype the median share of the peak rate that large products reach, and `bandwidth`."""
    shares = {}
    for kind, dtype in DTYPES.items():
        rows = columns["gemm_dtype"] == kind
        m, n, k = (columns[name][rows].astype(float) for name in "mnk")
        seconds = columns["latency"][rows] * 1e-3
        large, narrow = np.minimum(np.minimum(m, n), k) >= LARGE, (m <= FEW_ROWS) & (2 * n * k >= MANY_BYTES)
        if large.any() and dtype in sheet.tflops:
            shares[dtype] = float(np.median((2 * m * n * k / seconds)[large])) / sheet.device.flops_s[dtype]
        if kind == "bfloat16":
            shares["bandwidth"] = float(np.median((2 * n * k / seconds)[narrow])) / sheet.device.bandwidth_bytes_s
    return shares


def attention_share(columns: dict[str, Array], sheet: DeviceSheet, kind: str) -> float:
    """Return the median share of the 16-bit peak that attention over long prompts reaches; NaN without such rows."""
    rows = (columns["isl"] >= LONG) & (columns["kv_cache_dtype"] == kind) & (columns["head_dim"] == 128)
    for name, value in (("attn_dtype", kind), ("window_size", 0)):
        if name in columns:
            rows &= columns[name] == value
    batch, length, heads = (columns[name][rows].astype(float) for name in ("batch_size", "isl", "num_heads"))
    rates = 2.0 * batch * length**2 * heads * 128 / (columns["latency"][rows] * 1e-3)
    return float(np.median(rates)) / sheet.device.flops_s["fp16"] if len(rates) else float("nan")


def main() -> None:
    """Print each system's shares."""
    if systems_folder() is None:
        raise SystemExit("The package aiconfigurator-core is not here: pip install 'exegpt[gpu-data]'.")
    columns = ("bandwidth", *DTYPES.values())
    print(f"    {'':20}" + "".join(f"{name:>10}" for name in (*columns, "attention", "in 8 bits")))
    for system, kind in SYSTEMS.items():
        sheet = SHEETS[kind]
        tables = [rows for engine in ENGINES if (rows := table(system, "gemm", engine, "gemm"))]
        by_engine = [product_shares(rows, sheet) for rows in tables]
        shares = [[each[name] for each in by_engine if name in each] for name in columns]
        prompts = table(system, "attention", "trtllm", "context_attention")
        attention = [attention_share(prompts, sheet, dtype) for dtype in ("bfloat16", "fp8")]
        medians = [*(float(np.median(values)) if values else float("nan") for values in shares), *attention]
        print(f"    {kind:20}" + "".join(f"{share:10.2f}" for share in medians))


if __name__ == "__main__":
    main()
