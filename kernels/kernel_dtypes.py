"""Kernels that numba compiles once for float32 tensors, and once for bfloat16 ones, each on first use."""

import functools
from collections.abc import Callable
from typing import ParamSpec, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from exegpt.kernels.numba_jit import njit

P = ParamSpec("P")
_AS_THEY_ARE = (int, float, np.ndarray)
"""Arguments that numba takes as they are. Weights are arrays already: to make one takes a microsecond."""


class Kernel(Protocol):
    """A kernel of tensors, arrays and numbers."""

    def __call__(self, first: torch.Tensor, *others: "torch.Tensor | Values | float") -> None:
        """Compute the kernel."""


class _Compiled(Protocol):
    """A kernel of arrays and numbers, for one dtype."""

    def __call__(self, *arguments: object) -> None: ...


Values = NDArray[np.uint16] | NDArray[np.float32]
"""Bfloat16 numbers, or floats."""


def array_of(x: torch.Tensor) -> Values:
    """Return a tensor's memory as an array, of bfloat16 as uint16: see `bfloat16.py`."""
    array: Values = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
    return array


def njit_by_dtype(signature: str, **options: bool) -> Callable[[Callable[P, None]], Kernel]:
    """Compile a kernel that takes tensors and numbers, in parallel loops; the machine code is kept on disk.

    `signature` is numba's, so that no layout of an argument compiles the kernel again. `real` in it stands for the
    dtype of the first tensor. `options` are further ones of `numba.njit`.
    """

    def decorate(function: Callable[P, None]) -> Kernel:
        @functools.cache
        def compiled(real: str) -> _Compiled:
            options_ = {"parallel": True, "error_model": "numpy", **options}
            kernel: _Compiled = njit([signature.replace("real", real)], cache=True, **options_)(function)
            return kernel

        @functools.wraps(function)
        def run(first: torch.Tensor, *others: torch.Tensor | Values | float) -> None:
            if first.dtype == torch.bfloat16:
                arrays = [x if isinstance(x, _AS_THEY_ARE) else array_of(x) for x in others]
                compiled("uint16")(array_of(first), *arrays)
            else:  # these microseconds count in small batches
                arrays = [x if isinstance(x, _AS_THEY_ARE) else x.numpy() for x in others]
                compiled("float32")(first.numpy(), *arrays)

        return run

    return decorate
