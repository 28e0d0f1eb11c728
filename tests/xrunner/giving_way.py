"""Cells in which running requests give way by swap, the last in the list the least. Run as the ranks of a job."""

import sys
from pathlib import Path

from xcore.batching import Hints, Preemption
from xcore.orders import make_order

from .cells import run_cells

if __name__ == "__main__":
    order = make_order("learned")
    run_cells(
        Path(sys.argv[1]),
        order,
        hints=lambda request: Hints(score=float(request.id)),
        preemption=Preemption(host_blocks=1000),
    )
