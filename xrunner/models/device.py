"""The device of a model's tensors, the CPU or a GPU, and its memory."""

import ctypes
import functools
import os
import sys
from pathlib import Path

import torch

from xcore.errors import InputError

CPU = torch.device("cpu")

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""`mallopt`'s parameters (glibc's malloc.h)."""


@functools.cache
def keep_memory() -> None:
    """Keep memory that an iteration frees for the next one, on systems with glibc; called after weights are loaded.

    By default, glibc returns every activation to the kernel, which clears and maps it again page by page. That takes 4
    to 10 % of a prefill of some thousand tokens, and a third of one of 19,000. `free_memory` returns what is kept.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_MMAP_MAX, 0)  # mappings of their own, for 32 MiB and more, would be returned at once
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc; None elsewhere."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if libc is not None and hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def find_device(name: str | None = None, local: int = 0) -> torch.device:
    """Return the device of the rank `local` of a node.

    `cpu` is the CPU; `cuda` is GPU number `local` modulo the node's GPUs, which becomes the current device.
    None: a GPU if there is one, else the CPU.

    Raises:
        InputError: The name is unknown, or there is no GPU.
    """
    if name not in (None, "cpu", "cuda"):
        raise InputError(f"There is no device '{name}': use cpu or cuda.")
    count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if count:
        return made_current(torch.device("cuda", local % count))
    if name == "cuda":
        built = "" if torch.version.cuda else f", and torch {torch.__version__} is built without CUDA"
        raise InputError(f"--device cuda needs a GPU, and torch sees none here{built}: use --device cpu.")
    return CPU


def made_current(device: torch.device) -> torch.device:
    """Return the device with its number, and make a GPU the current device of this thread.

    Its Triton kernels, streams, events and graphs need this. A GPU without a number is the current one.
    """
    if device.type != "cuda":
        return device
    if device.index is not None:
        torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


def identity(device: torch.device) -> str:
    """Return a name that is unique on its machine; device numbers aren't, if ranks see different GPUs."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device; on the CPU without swapping."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # include the memory that torch caches
        return torch.cuda.mem_get_info(device)[0]
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)  # include the memory that `keep_memory` keeps
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
