"""Grouped products of experts: what a data sheet gives, beside the kernels that aiconfigurator measured.

The constants of `xprofiler/roofline_experts.py` come from a fifth of vLLM's rows, chosen by a hash of their shapes; the
errors are those of the other rows, and of SGLang's kernels and of the H200, which nothing is fitted to. Nothing is
measured here and no GPU is needed.

    python -m benchmarks.grouped_products
"""

import zlib
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from xcore.arrays import Array, Flags
from xcore.specs.cluster import parse_cluster
from xcore.specs.device_spec import DeviceSpec
from xcore.specs.experts import Experts
from xcore.specs.model import BYTES
from xprofiler.aiconfigurator import SYSTEMS, systems_folder
from xprofiler.roofline_device import arithmetic
from xprofiler.roofline_experts import GroupedProducts, grouped_products

FITTED = ("a100_sxm", "h100_sxm", "b200_sxm")
SYSTEMS_SHOWN = (*FITTED, "h200_sxm")
ENGINES = ("vllm", "sglang")
DTYPES = {
    "bfloat16": "bf16",
    "fp8_block": "fp8",
    "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4",
    "nvfp4": "nvfp4",
}
"""The tables' names → our dtypes of weights."""
MOST = 4000
"""Rows of a group that are looked at, drawn with a seed."""
FIRST = (2e-5, 0.4, 0.5)


@dataclass(frozen=True)
class Rows:
    """Rows of one device, engine and dtype; arrays [rows]."""

    tokens: Array
    work: Array
    """FLOPs."""
    weights: Array
    """Bytes of the weights that are read."""
    values: Array
    """Bytes of the rows between the products."""
    seconds: Array
    fitted: Flags

    def predicted(self, reached: GroupedProducts, device: DeviceSpec, dtype: str) -> Array:
        """The formula of `ExpertsRoofline.grouped`."""
        rate = reached.flops_share * device.flops_s[arithmetic(device, dtype)]
        moved = (self.weights + self.values) / (reached.bandwidth_share * device.bandwidth_bytes_s)
        predicted: Array = reached.start_s + np.hypot(self.work / rate, moved)
        return predicted


def read(system: str, engine: str) -> dict[str, Rows]:
    """The newest table's rows of whole experts with uneven loads, by the table's dtype."""
    from pyarrow import parquet

    folder = systems_folder()
    files = sorted((folder / "data" / system / "moe" / engine).glob("*/moe_perf.parquet")) if folder else []
    if not files:
        return {}
    groups: dict[str, list[list[float]]] = defaultdict(list)
    for row in parquet.read_table(files[-1]).to_pylist():
        if row["moe_dtype"] in DTYPES and row["moe_ep_size"] == 1 and row["distribution"] != "balanced":
            groups[row["moe_dtype"]].append(_figures(row))
    return {dtype: _columns(rows) for dtype, rows in groups.items()}


def _figures(row: dict[str, str | int | float]) -> list[float]:
    tokens, hidden = int(row["num_tokens"]), int(row["hidden_size"])
    width = int(row["inter_size"]) // int(row["moe_tp_size"])
    skew = float(str(row["distribution"]).rpartition("_")[2])
    experts = Experts(int(row["num_experts"]), int(row["topk"]), width, 1, skew=skew)
    rows, matrices = tokens * experts.per_token, 3 * hidden * width
    place = zlib.crc32(repr((tokens, hidden, width, experts.per_token, experts.count, skew)).encode()) % 5
    read = experts.distinct(tokens) * matrices * BYTES[DTYPES[str(row["moe_dtype"])]]
    values = rows * (4 * hidden + 3 * width) * 2
    return [tokens, 2.0 * rows * matrices, read, values, 1e-3 * float(row["latency"]), place == 0]


def _columns(rows: list[list[float]]) -> Rows:
    table = np.array(rows)
    chosen = np.random.default_rng(0).permutation(len(table))[:MOST]
    tokens, work, weights, values, seconds, fitted = table[chosen].T
    return Rows(tokens, work, weights, values, seconds, fitted.astype(bool))


def fit(rows: Rows, device: DeviceSpec, dtype: str) -> GroupedProducts:
    """The constants with the least errors of the logarithms over a fifth of the rows."""

    def errors(parameters: Array) -> Array:
        predicted = rows.predicted(GroupedProducts(*np.exp(parameters)), device, dtype)
        return np.log(predicted / rows.seconds)[rows.fitted]

    solution = least_squares(errors, np.log(FIRST), loss="soft_l1")
    return GroupedProducts(*(float(value) for value in np.exp(solution.x)))


def main() -> None:
    """Print the constants, and the errors of the product's on the rows that they were not fitted to."""
    print("start, share of the peak rate, share of the bandwidth: fitted | the product's, and its errors elsewhere")
    for system in SYSTEMS_SHOWN:
        device = parse_cluster(f"1x{SYSTEMS[system]}").device
        for engine in ENGINES:
            for name, rows in read(system, engine).items():
                dtype = DTYPES[name]
                own, fitted = grouped_products(device, dtype), fit(rows, device, dtype)
                others = ~rows.fitted if (system in FITTED and engine == "vllm") else np.ones_like(rows.fitted)
                error = (rows.predicted(own, device, dtype) / rows.seconds - 1)[others]
                texts = [
                    f"{g.start_s * 1e6:3.0f} us {g.flops_share:.2f} {g.bandwidth_share:.2f}" for g in (fitted, own)
                ]
                print(
                    f"{system:9} {engine:6} {name:17} {texts[0]} | {texts[1]}: {others.sum():5} rows, median error "
                    f"{np.median(np.abs(error)):5.1%}, 90 % below {np.quantile(np.abs(error), 0.9):4.0%}, "
                    f"bias {np.median(error):+5.1%}"
                )


if __name__ == "__main__":
    main()
