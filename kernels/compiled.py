"""`njit` for kernels whose machine code is kept on disk, or compiled anew in each process where that can't be done."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import numba


def njit(*arguments: Any, **options: Any) -> Any:
    """`numba.njit` with the same arguments. A cache that can't be used (a folder without write permission, a full disk,
    a torn file) is left out and named once on standard error.
    """
    if len(arguments) == 1 and callable(arguments[0]) and not options:
        return numba.njit(arguments[0])

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(*arguments, **options)(function)
        except Exception:  # of many kinds: numba's own, the system's, pickle's
            if not options.get("cache"):
                raise
        kernel = numba.njit(*arguments, **options | {"cache": False})(function)  # raises again what is the kernel's
        _tell()
        return kernel

    return compiled


@functools.cache
def _tell() -> None:
    """Say once per process that the cache is left out."""
    print(
        "The kernels' cache can't be used, so they are compiled at every start: set NUMBA_CACHE_DIR to a folder that "
        "can be written.",
        file=sys.stderr,
    )
