"""Kernels that numba compiles once for float32 tensors, and once for bfloat16 ones, each on first use."""

import functools
from collections.abc import Callable

import numpy as np
import torch

from exegpt.kernels.numba_jit import njit

_NUMBERS = (int, float)


def array_of(x: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as an array, of bfloat16 as uint16: see `bfloat16.py`."""
    array: np.ndarray = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return array


def njit_by_dtype(signature: str, **options: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile a kernel that takes tensors and numbers, in parallel loops; the machine code is kept on disk.

    `signature` is numba's, so that no layout of an argument compiles the kernel again. `real` in it stands for the
    dtype of the first tensor. `options` are further ones of `numba.njit`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.cache
        def compiled(real: str) -> Callable[..., None]:
            options_ = {"parallel": True, "error_model": "numpy", **options}
            kernel: Callable[..., None] = njit([signature.replace("real", real)], cache=True, **options_)(function)
            return kernel

        @functools.wraps(function)
        def run(first: torch.Tensor, *others: torch.Tensor | float) -> None:
            if first.dtype == torch.bfloat16:
                arrays = [x if isinstance(x, _NUMBERS) else array_of(x) for x in others]
                compiled("uint16")(array_of(first), *arrays)
            else:  # these microseconds count in small batches
                arrays = [x if isinstance(x, _NUMBERS) else x.numpy() for x in others]
                compiled("float32")(first.numpy(), *arrays)

        return run

    return decorate
