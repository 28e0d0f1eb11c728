"""DeviceSpec and LinkSpec: the memory and the rates of one device, and the links between devices."""

import math
from dataclasses import dataclass, field

from xcore.errors import InputError
from xcore.spec import Spec

MAX_DEVICES = 100_000
"""Most devices of a cluster; more are probably a mistake."""


def _check(what: str, value: float, least: float = 1.0, most: float = 1e24) -> None:
    """Raise InputError unless the value is a number from `least` to `most`."""
    if not least <= value <= most:
        above = "" if most == 1e24 else f" and at most {most:g}"
        raise InputError(f"The {what} is {value}: it must be a number of at least {least:g}{above}.")


def _check_share(what: str, value: float) -> None:
    """Raise InputError unless the value is a share above 0."""
    if not 0 < value <= 1:
        raise InputError(f"The {what} is {value}: it must be above 0 and at most 1.")


@dataclass(frozen=True)
class DeviceSpec(Spec):
    """One device: its memory, and the rates of its data sheet."""

    kind: str
    memory_bytes: float
    bandwidth_bytes_s: float
    """Peak memory bandwidth."""
    flops_s: dict[str, float]
    """Peak dense rate of matrix products by dtype; the device doesn't compute in a missing dtype."""
    flops_fraction: float = 0.67
    """Share of `flops_s` that large matrix products reach."""
    bandwidth_fraction: float = 0.86
    """Share of `bandwidth_bytes_s` that streaming reads reach."""
    flops_fractions: dict[str, float] = field(default_factory=dict)
    """`flops_fraction` of the dtypes whose share differs."""
    attention_fraction: float = 0.46
    """Share of the 16-bit peak that attention over prompts reaches."""
    attention_fractions: dict[str, float] = field(default_factory=lambda: {"fp8": 0.75})
    """`attention_fraction` of the dtypes of queries, keys and values whose share differs; also of the 16-bit peak."""
    visible_bytes: float | None = None
    """The part of the memory that CUDA or HIP reports, of which engines take a share; None: all of it."""

    def __post_init__(self) -> None:
        _check(f"memory_bytes of device '{self.kind}'", self.memory_bytes)
        if self.visible_bytes is not None:
            _check(f"visible_bytes of device '{self.kind}'", self.visible_bytes)
        for name, rate in {"bandwidth_bytes_s": self.bandwidth_bytes_s, **self.flops_s}.items():
            _check(f"{name} of device '{self.kind}'", rate, least=0.0)  # 0: not measured yet
        fractions = {f"flops_fractions of {dtype}": share for dtype, share in self.flops_fractions.items()}
        fractions |= {f"attention_fractions of {dtype}": share for dtype, share in self.attention_fractions.items()}
        fractions |= {"flops_fraction": self.flops_fraction, "bandwidth_fraction": self.bandwidth_fraction}
        fractions |= {"attention_fraction": self.attention_fraction}
        for name, share in fractions.items():
            _check_share(f"{name} of device '{self.kind}'", share)

    @property
    def shown_bytes(self) -> float:
        """Return the bytes of the device's memory that software sees."""
        return min(self.visible_bytes or self.memory_bytes, self.memory_bytes)

    def reached_flops_s(self, dtype: str) -> float:
        """Return the rate that large matrix products in `dtype` reach; 0 if the device doesn't compute in it."""
        return self.flops_s.get(dtype, 0.0) * self.flops_fractions.get(dtype, self.flops_fraction)


@dataclass(frozen=True)
class LinkSpec(Spec):
    """A link between two devices, with the rates that its user sees."""

    bandwidth_bytes_s: float
    latency_s: float = 10e-6
    ring_bytes_s: tuple[tuple[int, float], ...] = ()
    """Numbers of devices, and the bandwidth of each device in a collective of so many.

    Over PCIe, devices share switches and host bridges. In a full mesh, each pair has a link. Empty: groups of any size
    reach `bandwidth_bytes_s`, as over NVLink with switches.
    """

    def __post_init__(self) -> None:
        _check("bandwidth_bytes_s of a link", self.bandwidth_bytes_s)
        _check("latency_s of a link", self.latency_s, least=0.0, most=60.0)
        for devices, reached in self.ring_bytes_s:
            _check("number of devices in ring_bytes_s of a link", devices, least=2, most=MAX_DEVICES)
            _check(f"bandwidth of {devices} devices in ring_bytes_s of a link", reached)

    def reached_bytes_s(self, devices: int) -> float:
        """Return the bandwidth that each of a group of devices reaches in a collective."""
        return at_degree(self.ring_bytes_s, devices) if self.ring_bytes_s else self.bandwidth_bytes_s


def at_degree(values: tuple[tuple[int, float], ...], degree: int) -> float:
    """Return the value at a number of devices: linear over the logarithm, the nearest one beyond the table."""
    ordered = sorted(values)
    below, first = max((at for at in ordered if at[0] <= degree), default=ordered[0])
    above, last = min((at for at in ordered if at[0] >= degree), default=ordered[-1])
    if above <= below:  # at one of the numbers, or beyond them
        return first
    return first + (last - first) * math.log(degree / below) / math.log(above / below)
