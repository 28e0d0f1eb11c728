"""The common part of the Triton kernels. It is imported only to launch one: importing Triton takes a while."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _probe():  # type: ignore[no-untyped-def]
    pass


INTERPRETED = isinstance(_probe, InterpretedFunction)
"""Whether kernels run in Triton's interpreter, on the CPU: TRITON_INTERPRET was 1 when Triton was imported."""

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def operand(dtype: torch.dtype) -> Any:
    """Return the Triton dtype in which tiles of `dtype` are multiplied.

    It is `dtype` itself, but float32 in the interpreter, which stores bfloat16 as integers.
    """
    return tl.float32 if INTERPRETED else _DTYPES[dtype]
