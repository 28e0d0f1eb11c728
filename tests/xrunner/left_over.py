"""Cells after which no message may be on its way, though the notice that the encoding side is free comes late. Run as
the ranks of a job.
"""

import sys
import time
from pathlib import Path

from xrunner.comm import transport
from xrunner.rank.worker import FREE

from .cells import run_cells

if __name__ == "__main__":
    post = transport.Transport.post

    def late(self, what, *to, tag=transport.ORDER):
        if what == FREE:
            time.sleep(0.05)
        post(self, what, *to, tag=tag)

    transport.Transport.post = late
    run_cells(Path(sys.argv[1]))
