"""`njit` for kernels whose machine code is kept on disk, or compiled anew in each process if that fails."""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def njit(*arguments: Any, **options: Any) -> Any:
    """Compile as `numba.njit` does, with the same arguments, but continue without a cache if it can't be used.

    Such a cache is in a folder without write permission, on a full disk, or in an incomplete file. It is reported once
    on standard error.
    """
    # Without this option, a function takes over its first caller's, and may then assume that there are no NaNs.
    # A function that is called gets no code of its own, which can differ from its copy in a kernel in a sum's order: a
    # process that compiles a kernel would call the one, and a process that loads it from disk the other.
    called = not arguments or callable(arguments[0])
    options = {"fastmath": False, "forceinline": called, **options}
    if len(arguments) == 1 and callable(arguments[0]):
        return numba.njit(arguments[0], **options)

    def compiled(function: Callable[P, R]) -> Any:
        try:
            return numba.njit(*arguments, **options)(function)
        except Exception:  # many types: numba's own, the system's, pickle's
            if not options.get("cache"):
                raise
        kernel = numba.njit(*arguments, **options | {"cache": False})(function)  # raises the kernel's own errors again
        _tell()
        return kernel

    return compiled


@functools.cache
def _tell() -> None:
    """Report once per process that no cache is used."""
    print(
        "The cache of compiled kernels can't be used, so every start compiles them again: set NUMBA_CACHE_DIR to a "
        "writable folder.",
        file=sys.stderr,
    )
