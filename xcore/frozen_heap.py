"""A frozen heap: objects that exist before some work are left out of garbage collections during it.

A full collection scans every object: a process with torch has 300,000, which takes 0.1 to 0.3 s. Without freezing, one
falls into each second or two of an engine's iterations, which last milliseconds. Collections during the import of torch
and numba find nothing and take a fifth of its time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave the objects that exist now out of garbage collections until the end of the block."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def imports() -> Iterator[None]:
    """Collect no garbage in the block, which imports modules, and leave what they hold out of later collections."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
