"""What the Triton kernels share. Imported only where one is launched: importing Triton takes a while."""

import functools
from dataclasses import dataclass
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

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def operand(dtype: torch.dtype) -> Any:
    """The Triton dtype in which tiles of `dtype` are multiplied: itself; float32 in the interpreter, which stores
    bfloat16 as integers."""
    return tl.float32 if INTERPRETED else _DTYPES[dtype]


@dataclass(frozen=True)
class Architecture:
    """What a kernel's tile and grid are chosen by."""

    capability: int
    """Compute capability: 90 for 9.0"""
    multiprocessors: int
    shared_bytes: int
    """Shared memory that one program may use."""


H100 = Architecture(90, 132, 227 * 1024)
"""What is assumed where kernels are interpreted."""


@functools.cache
def architecture(device: torch.device) -> Architecture:
    """The architecture of a GPU."""
    if device.type != "cuda":
        return H100
    properties: Any = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Architecture(10 * properties.major + properties.minor, properties.multi_processor_count, shared_bytes)
