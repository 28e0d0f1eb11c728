"""Every kernel's path on the CPU in float32: right, and as fast as what PyTorch brings?

Each on the demo model's shapes, its tensors in memory, beside PyTorch's operators, torch.compile, SDPA and
FlexAttention, and the machine's limit. On a GPU `python -m benchmarks.gpu` does the same.

    python -m benchmarks.kernels
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass

import torch

from benchmarks.kernels.case import CPU_SIZES, Sizes
from benchmarks.kernels.cases import all_cases
from benchmarks.kernels.check import check
from benchmarks.kernels.timing import Clock, Roofline, Timed, cpu_seconds, measure_roofline, time_case
from xcore.console import output

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One kernel on one shape."""

    case: str
    shape: str
    right: bool
    timed: Timed

    @property
    def ratio(self) -> float | None:
        """The quickest peer's time over ours; None without peers."""
        others = [seconds for seconds in self.timed.peers.values() if isinstance(seconds, float)]
        return min(others) / self.timed.seconds if others else None


def run(sizes: Sizes, roofline: Roofline, only: str = "", clock: Clock = cpu_seconds) -> list[Row]:
    """Check and time every case whose name has `only` in it."""
    rows = []
    for case, twin in zip(*(all_cases(sizes, torch.float32, CPU) for _ in range(2)), strict=True):
        if only in case.name:
            rows.append(Row(case.name, case.shape, check(case).passed, time_case(case, roofline, clock, twin)))
            output.note(f"{case.name}, {case.shape}")
    return rows


def show(rows: list[Row], roofline: Roofline) -> None:
    """Print the table."""
    lines = [
        [
            row.case,
            row.shape,
            "yes" if row.right else "NO",
            output.seconds(row.timed.seconds),
            output.share(row.timed.share),
            ", ".join(f"{name} {_time(time)}" for name, time in row.timed.peers.items()),
            "–" if row.ratio is None else f"{row.ratio:.2f}",
        ]
        for row in rows
    ]
    title = f"{roofline.rate / 1e9:.0f} GFLOP/s, {roofline.bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads"
    output.table(["kernel", "shape", "right", "time", "of the limit", "peers", "best peer / ours"], lines, title)


def _time(seconds: float | str) -> str:
    return seconds if isinstance(seconds, str) else output.seconds(seconds)


def main() -> int:
    """Print the table; 1 where a kernel isn't right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="the kernels whose names have this in them")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    roofline = measure_roofline(torch.float32, CPU)
    with torch.inference_mode():
        rows = run(CPU_SIZES, roofline, args.only)
    if args.json:
        print(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=2))
    else:
        show(rows, roofline)
    return int(not all(row.right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
