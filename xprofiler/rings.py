"""Collectives over PCIe: NCCL's rings, whose devices share switches and host bridges.

In a ring of n devices every step sends an n-th of the data to the next device: n - 1 steps gather it on all devices,
and twice as many sum it. NCCL has two protocols. With flags next to the data (LL), a step begins at once, and half of
the bytes sent are flags. Without flags (Simple), all bytes are data, and a step takes longer to begin. The quicker
protocol is used.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """A ring's protocol."""

    first_s: float
    """Seconds of a collective in addition to its steps."""
    step_s: float
    data_share: float
    """Share of the sent bytes that are data."""


# Fitted by `python -m benchmarks.pcie_all_reduce --fit` to every fifth row, by hash, of NCCL's all-reduces on two
# boards.
PROTOCOLS = (Protocol(2.92e-6, 1.52e-6, 0.51), Protocol(8.36e-6, 4.07e-6, 1.0))


def ring_all_reduce_s(
    size_bytes: float, devices: int, bandwidth_bytes_s: float, protocols: tuple[Protocol, ...] = PROTOCOLS
) -> float:
    """Return the seconds until each of `devices` has the sum of their arrays of `size_bytes`."""
    return _ring_s(2 * (devices - 1), size_bytes / devices, bandwidth_bytes_s, protocols)


def ring_all_gather_s(size_bytes: float, devices: int, bandwidth_bytes_s: float) -> float:
    """Return the seconds until each of `devices` has all of `size_bytes`, to which each contributes equally."""
    return _ring_s(devices - 1, size_bytes / devices, bandwidth_bytes_s, PROTOCOLS)


def _ring_s(steps: int, step_bytes: float, bandwidth_bytes_s: float, protocols: tuple[Protocol, ...]) -> float:
    wire = steps * step_bytes / bandwidth_bytes_s
    return min(each.first_s + steps * each.step_s + wire / each.data_share for each in protocols)
