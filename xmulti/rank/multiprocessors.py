"""Shares of a GPU's multiprocessors: streams whose kernels run on some of them only, by CUDA's green contexts.

The driver splits a device into groups of a few multiprocessors (8 on Hopper). Groups of one split are disjoint, and a
context may have any of them; groups of two splits overlap. A graph captured on such a stream uses only its
multiprocessors wherever it is replayed. The contexts live as long as the process.
"""

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch


class Unavailable(Exception):
    """The reason why there are no shares, as the end of a sentence."""


def streams_on_shares(device: torch.device, shares: Sequence[float]) -> list[torch.cuda.Stream]:
    """Return a stream for each share of a device's multiprocessors, from above 0 to 1.

    Each stream has about its share. Streams are disjoint if all shares fit together.

    Raises:
        Unavailable: The device or its driver has no such shares.
    """
    if device.type != "cuda":
        raise Unavailable(f"device {device} has no multiprocessors")
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise Unavailable("it needs the package cuda-bindings (`pip install 'exegpt[gpu]'`)") from None
    index = torch.cuda.current_device() if device.index is None else device.index
    number = _asked(driver, "cuDeviceGet", index)
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _asked(driver, "cuDeviceGetDevResource", number, kind)
    found, count, _ = _asked(driver, "cuDevSmResourceSplitByCount", whole.sm.smCount, whole, 0, 1)
    streams: list[torch.cuda.Stream] = []
    for places in shared_out(shares, count):
        description = _asked(driver, "cuDevResourceGenerateDesc", [found[place] for place in places], len(places))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM, driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        context = _asked(driver, "cuGreenCtxCreate", description, number, flags[0])
        stream = _asked(driver, "cuGreenCtxStreamCreate", context, flags[1], 0)
        streams.append(torch.cuda.ExternalStream(int(stream), device))
    return streams


def shared_out(shares: Sequence[float], groups: int) -> list[list[int]]:
    """Return each share's places among `groups` groups, at least one.

    A share begins at the end of the previous share. After the last group, it continues with the first group.
    """
    places, before = [], 0.0
    for share in shares:
        begin, end = (math.floor(bound * groups + 0.5) for bound in (before, before + share))
        end = min(max(begin + 1, end), begin + groups)
        places.append([place % groups for place in range(begin, end)])
        before += share
    return places


def _asked(driver: Any, name: str, *arguments: Any) -> Any:
    """Return what a function of the driver returns.

    Raises:
        Unavailable: The driver lacks the function, or the call fails.
    """
    try:
        error, *returned = getattr(driver, name)(*arguments)
    except (AttributeError, RuntimeError) as failed:  # an old package, or an old driver
        raise Unavailable(f"this CUDA driver has no {name} ({failed})") from None
    if error != driver.CUresult.CUDA_SUCCESS:
        raise Unavailable(f"{name} returns {error.name}")
    return returned[0] if len(returned) == 1 else returned
