"""Products in tiles beside oneDNN's packed ones on this CPU: `kernels/linear_cpu.py`, or `linear_amx.py` for bfloat16.

Each ratio is the time in tiles over oneDNN's: one thread's CPU time, the least of several, in turns. Several weights of
a shape take turns, so that caches don't keep them, and results are compared.

    python -m benchmarks.tiles
    python -m benchmarks.tiles --dtype bf16   # on a CPU with AMX
"""

import argparse
import time
from unittest import mock

import torch

from exegpt.kernels import linear
from exegpt.kernels.linear import PackedLinear
from xcore.console import output

SHAPES = ((1024, 512), (2816, 512), (512, 1408), (8000, 512), (3072, 2048), (16384, 2048), (2048, 8192))
"""Outputs and inputs: of the demo's model, then of models with a billion parameters and more."""
ROWS = (1, 4, 16, 64, 128, 260)
_WEIGHTS_BYTES = 2**26
"""Weights of a shape in all: more than the last cache."""


def ratio(shape: tuple[int, int], rows: int, times: int, dtype: torch.dtype) -> float:
    """Time products of one shape in both ways."""
    outputs, inputs = shape
    count = max(1, _WEIGHTS_BYTES // (dtype.itemsize * outputs * inputs))
    weights = [(torch.randn(outputs, inputs) / inputs**0.5).to(dtype) for _ in range(count)]
    ways, choice = [], "can_tile" if dtype == torch.float32 else "can_use_amx"
    for tiled in (True, False):
        with mock.patch.object(linear, choice, lambda *_, tiled=tiled: tiled):
            ways.append([PackedLinear(weight) for weight in weights])
    x = torch.randn(rows, inputs).to(dtype)
    close = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ways[0][0](x), ways[1][0](x), atol=close, rtol=close)
    seconds: list[list[float]] = [[], []]
    for _ in range(times):
        for products, own in zip(ways, seconds, strict=True):
            began = time.thread_time()
            for product in products:
                product(x)
            own.append(time.thread_time() - began)
    return min(seconds[0]) / min(seconds[1])


def main() -> None:
    """Print a table: shapes down, rows across."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=7, help="turns of each product (7)")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first so many shapes (all)")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    asked = parser.parse_args()
    if asked.times < 1:
        parser.error(f"--times {asked.times}: at least 1")
    dtype = torch.bfloat16 if asked.dtype == "bf16" else torch.float32
    if dtype == torch.bfloat16 and not linear.can_use_amx(dtype, 32):
        parser.error("--dtype bf16: this CPU has no AMX")
    torch.set_num_threads(1)
    lines = []
    with torch.inference_mode():
        for shape in SHAPES[: asked.shapes]:
            lines.append(
                [f"{shape[0]} × {shape[1]}", *(f"{ratio(shape, rows, asked.times, dtype):.2f}" for rows in ROWS)]
            )
    output.table(("outputs × inputs", *map(str, ROWS)), lines, "Time in tiles over oneDNN's, by rows")


if __name__ == "__main__":
    main()
