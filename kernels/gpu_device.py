"""Which kernels take a tensor, and the architecture that determines a GPU's tiles."""

import functools
from dataclasses import dataclass

import torch


def on_gpu(x: torch.Tensor) -> bool:
    """Return whether the Triton kernels take this tensor.

    Call it as `gpu_device.on_gpu`, so that all callers ask at one place.
    """
    return x.device.type == "cuda"


@dataclass(frozen=True)
class Architecture:
    """The properties of a GPU that determine a kernel's tile and grid."""

    capability: int
    """Compute capability: 90 for 9.0."""
    multiprocessors: int
    shared_bytes: int
    """Shared memory that one program may use."""


H100 = Architecture(90, 132, 227 * 1024)
"""The assumed architecture if kernels are interpreted."""


@functools.cache
def architecture(device: torch.device) -> Architecture:
    """Return the architecture of a GPU."""
    if device.type != "cuda":
        return H100
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Architecture(10 * properties.major + properties.minor, properties.multi_processor_count, shared_bytes)
