"""Caches that hold garbage wherever no sequence has written: `fill_caches`. Run as a program, the ranks of a job of
cells with such caches.
"""

import itertools
import math
import sys
from pathlib import Path

from exegpt.kernels.kv_layout import keys_like_values
from xrunner.core.driver import Driver
from xrunner.rank.worker import Worker

from .cells import run_cells

GARBAGE = (math.nan, math.inf, 1e30)


def fill_caches(contents=GARBAGE, patch=setattr):
    """Let drivers fill each block as it is allocated, and every rank what lies behind the sequences' last tokens before
    each forward pass; an encoding side of its own, which allocates nothing, its whole cache. Each time with the next of
    the contents.
    """
    contents = itertools.cycle(contents)
    make, launch = Driver.__init__, Worker.launch

    def make_filling(driver, worker, *rest, **options):
        make(driver, worker, *rest, **options)
        pool, allocate = driver.ledger.pool, driver.ledger.pool.allocate

        def allocate_filled(count):
            blocks, value = allocate(count), next(contents)
            for tensor in worker.cache.keys + worker.cache.values:
                tensor[blocks] = value
            return blocks

        pool.allocate = allocate_filled

    def launch_filled(worker, batch, start=None):
        keys, values = worker.cache.keys, worker.cache.values
        block_size, value = values[0].shape[2], next(contents)
        if worker.place.line[0].phase == "encode":
            for tensor in keys + values:
                tensor.fill_(value)
        for part in batch.attention:
            for row, seq_len in zip(part.tables, part.contexts.tolist(), strict=True):
                block, used = row[(seq_len - 1) // block_size], (seq_len - 1) % block_size + 1
                for k, v in zip(keys, values, strict=True):
                    keys_like_values(k)[block, :, used:] = v[block, :, used:] = value
        return launch(worker, batch, start)

    patch(Driver, "__init__", make_filling)
    patch(Worker, "launch", launch_filled)


if __name__ == "__main__":
    fill_caches()
    run_cells(Path(sys.argv[1]))
