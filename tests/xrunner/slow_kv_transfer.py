"""A cell whose batches all arrive late on the decoding side: how many have yet to join it at most. Run as the ranks of
a job.
"""

import itertools
import sys
from pathlib import Path

from xrunner.comm import kv_transfer
from xrunner.core.encoding_lane import EncodingLane

from .cells import run_cells

LATE = 40
"""Looks before what has come is seen."""

if __name__ == "__main__":
    arrived, run, looks, waited = kv_transfer.KVReceiving.arrived, EncodingLane.run, itertools.count(), [0]

    def late(self):
        return arrived(self) if next(looks) % LATE == 0 else []

    def counted(self, step, now):
        run(self, step, now)
        waited.append(len(self._batches))

    kv_transfer.KVReceiving.arrived, EncodingLane.run = late, counted
    run_cells(Path(sys.argv[1]))
    if len(waited) > 1:
        (Path(sys.argv[1]) / "waited.txt").write_text(str(max(waited)))
