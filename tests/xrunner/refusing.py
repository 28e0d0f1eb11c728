"""A run by graphs that hold sums of two ranks, then one that all ranks refuse, whose error is kept, and with its
traceback the graphs; the engine isn't closed. Run as the ranks of a job.
"""

import atexit
import sys
from pathlib import Path

from xcore.specs.model import ModelSpec
from xrunner.comm.ranks import Agreed, job
from xrunner.core.engine import Engine

from .cells import requests, schedule
from .ways import leave_log, use

if __name__ == "__main__":
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    use("direct")
    with job() as ranks:
        atexit.register(leave_log, folder, ranks.rank)  # called after what is registered later
        engine = Engine.load(model, schedule(ModelSpec.from_directory(model), "orca", (2,)), ranks)
        engine.run(requests([(5, 4)]) if ranks.rank == 0 else [])
        try:
            engine.run(requests([(5, 10_000)]) if ranks.rank == 0 else [])
        except Agreed as error:
            kept = error
