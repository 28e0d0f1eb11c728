"""All-reduces over PCIe beside NCCL's measured ones, on two boards of two to eight devices.

Measured: `nccl_perf` of the systems rtx_pro_6000_server and l40s in the package aiconfigurator-core 0.12.0 (messages of
512 bytes to 512 MiB). Both protocols of the rings, and the bandwidth of each board and number of devices, are fitted to
every fifth row by hash. The same package has vLLM's and TensorRT-LLM's all-reduces on two RTX PRO 6000 of an earlier,
slower board: of that the bandwidth alone is fitted. Nothing is measured here and no GPU is needed.

    python -m benchmarks.pcie_all_reduce [--fit]
"""

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from xcore.arrays import Array
from xcore.specs.cluster import parse_cluster
from xcore.specs.device_spec import LinkSpec
from xprofiler.aiconfigurator import systems_folder
from xprofiler.rings import PROTOCOLS, Protocol, ring_all_reduce_s

Boards = dict[str, tuple[tuple[int, float], ...]]

BOARDS: Boards = {
    "rtx_pro_6000_server": ((2, 37.4e9), (4, 27.0e9), (8, 21.6e9)),
    "l40s": ((2, 20.2e9), (4, 5.33e9), (8, 1.47e9)),
}
"""Systems → the bandwidth that each of so many devices reaches, fitted."""
EARLIER = (("vllm", "0.19.0"), ("trtllm", "1.3.0rc10"))
"""Engines and versions whose all-reduces were measured on the earlier board of two RTX PRO 6000."""
_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Row:
    """A measured all-reduce."""

    system: str
    devices: int
    size_bytes: int
    seconds: float

    @property
    def order(self) -> str:
        """A fixed disorder: rows are fitted or held out by their place in it."""
        return hashlib.sha256(repr((self.system, self.devices, self.size_bytes)).encode()).hexdigest()


def nccl_rows() -> list[Row]:
    """Return NCCL's all-reduces in 16 bits on both boards."""
    return [row for system in BOARDS for row in _rows(system, "nccl", "*", "nccl_perf", "nccl_dtype", "half")]


def earlier_rows() -> list[Row]:
    """Return the all-reduces of serving engines, started from graphs, on the earlier board."""
    name, dtype = "custom_allreduce_perf", ("allreduce_dtype", "bfloat16")
    return [row for engine, version in EARLIER for row in _rows("rtx_pro_6000_server", engine, version, name, *dtype)]


def _rows(system: str, engine: str, version: str, name: str, column: str, dtype: str) -> list[Row]:
    import pyarrow.parquet as pq

    folder = systems_folder() or Path()
    files = sorted((folder / "data" / system / "comm" / engine).glob(f"{version}/{name}.parquet"))
    return [
        Row(system, row["num_gpus"], _ELEMENT_BYTES * row["message_size"], row["latency"] * 1e-3)
        for row in pq.read_table(files[-1]).to_pylist()
        if row["op_name"] == "all_reduce" and row[column] == dtype and not row["kernel_source"].endswith("_eager")
    ]


def parted(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows that constants are fitted to, every fifth in the order of a hash, and the others, which count."""
    ordered = sorted(rows, key=lambda row: row.order)
    return ordered[4::5], [row for place, row in enumerate(ordered, 1) if place % 5]


def errors(rows: Sequence[Row], boards: Boards, protocols: tuple[Protocol, ...] = PROTOCOLS) -> Array:
    """Return [rows]: (predicted - measured) / measured seconds."""
    links = {system: LinkSpec(rates[0][1], ring_bytes_s=rates) for system, rates in boards.items()}
    predicted = [
        ring_all_reduce_s(row.size_bytes, row.devices, links[row.system].reached_bytes_s(row.devices), protocols)
        for row in rows
    ]
    ratios: Array = np.array(predicted) / np.array([row.seconds for row in rows])
    return ratios - 1.0


# The fit


def _unpacked(x: Array) -> tuple[Boards, tuple[Protocol, ...]]:
    """Return the boards and protocols of logarithms."""
    values = np.exp(x).tolist()
    protocols = (Protocol(values[0], values[1], values[2]), Protocol(values[3], values[4], 1.0))
    starts = [5, *np.cumsum([5 + len(BOARDS["l40s"]), len(BOARDS["l40s"])]).tolist()]
    return {
        system: tuple(zip((devices for devices, _ in rates), values[start:end], strict=True))
        for (system, rates), (start, end) in zip(BOARDS.items(), pairwise(starts), strict=True)
    }, protocols


def fit(rows: Sequence[Row]) -> tuple[Boards, tuple[Protocol, ...]]:
    """Return the constants that bring predictions nearest to these rows (soft L1 loss of the logarithms)."""
    from scipy.optimize import least_squares

    rates = [rate for board in BOARDS.values() for _, rate in board]
    first = np.log([3e-6, 1.5e-6, 0.5, 8e-6, 4e-6, *rates])

    def residuals(x: Array) -> Array:
        return np.log1p(errors(rows, *_unpacked(x)))

    return _unpacked(least_squares(residuals, first, loss="soft_l1", f_scale=0.1).x)


def fit_pair(rows: Sequence[Row], protocols: tuple[Protocol, ...]) -> float:
    """Return the bandwidth of a pair that brings predictions nearest to these rows (the same loss)."""
    from scipy.optimize import least_squares

    def residuals(x: Array) -> Array:
        return np.log1p(errors(rows, {row.system: ((2, float(np.exp(x[0]))),) for row in rows}, protocols))

    return float(np.exp(least_squares(residuals, [np.log(15e9)], loss="soft_l1", f_scale=0.1).x[0]))


# What is printed


def print_errors(title: str, rows: Sequence[Row], row_errors: Array) -> None:
    """Print medians by board, and by board and number of devices."""
    print(f"{title}\n    {'':30} {'rows':>5} {'median':>8} {'absolute':>9} {'largest':>8}")
    groups = sorted({(row.system, devices) for row in rows for devices in (0, row.devices)})
    for system, devices in groups:
        part = row_errors[[row.system == system and devices in (0, row.devices) for row in rows]]
        name = f"{system}, {devices} devices" if devices else system
        print(f"    {name:30} {len(part):5} {np.median(part):+8.1%} {np.median(abs(part)):9.1%} {abs(part).max():8.0%}")


def main() -> None:
    """Print the errors of all rows and of those that nothing was fitted to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants again, and take those")
    arguments = parser.parse_args()
    if systems_folder() is None:
        raise SystemExit("The package aiconfigurator-core is not installed: pip install 'exegpt[gpu-data]'.")
    rows = nccl_rows()
    fitted, held_out = parted(rows)
    boards, protocols = fit(fitted) if arguments.fit else (BOARDS, PROTOCOLS)
    if arguments.fit:
        print(f"fitted to {len(fitted)} rows: {protocols}\n    {boards}")
    print_errors("NCCL, the rows that nothing was fitted to", held_out, errors(held_out, boards, protocols))
    print_errors("NCCL, all rows", rows, errors(rows, boards, protocols))
    fitted, held_out = parted(earlier_rows())
    ring = parse_cluster("8xRTXPRO6000").intra.ring_bytes_s
    if arguments.fit:
        ring = ((2, fit_pair(fitted, protocols)),)
        print(f"fitted to {len(fitted)} rows: {ring}")
    row_errors = errors(held_out, {"rtx_pro_6000_server": ring}, protocols)
    print_errors("vLLM 0.19 and TensorRT-LLM 1.3.0rc10, the earlier board: rows not fitted to", held_out, row_errors)


if __name__ == "__main__":
    main()
