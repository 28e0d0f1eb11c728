"""What the Triton kernels share. Imported only where one is launched: importing Triton takes a while."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _probe():  # type: ignore[no-untyped-def]
    pass


INTERPRETED = isinstance(_probe, InterpretedFunction)
"""Whether kernels run in Triton's interpreter, on the processor: TRITON_INTERPRET was 1 when Triton was imported."""

_H100_MULTIPROCESSORS, _H100_SHARED_BYTES = 132, 227 * 1024
"""What is assumed where kernels are interpreted, or compiled for a GPU that isn't there."""

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def operand(dtype: torch.dtype) -> Any:
    """The Triton dtype in which tiles of `dtype` are multiplied: itself; float32 in the interpreter, which stores
    bfloat16 as integers."""
    return tl.float32 if INTERPRETED else _DTYPES[dtype]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    if device.type != "cuda":
        return _H100_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use."""
    if device.type != "cuda":
        return _H100_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
