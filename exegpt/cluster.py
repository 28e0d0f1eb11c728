"""ClusterSpec: nodes × devices, what one device can do, and the links within and between nodes."""

import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exegpt.errors import InputError
from exegpt.noun import Noun


@dataclass(frozen=True)
class DeviceSpec(Noun):
    """One device: its memory, and the rates its data sheet promises."""

    kind: str
    memory_bytes: float
    bandwidth_bytes_s: float
    """Peak memory bandwidth."""
    flops_s: dict[str, float]
    """Peak dense rate of matrix products by dtype; a dtype that is missing is one the device doesn't compute in."""
    flops_fraction: float = 0.67
    """Share of `flops_s` that large matrix products reach."""
    bandwidth_fraction: float = 0.86
    """Share of `bandwidth_bytes_s` that streaming reads reach."""


@dataclass(frozen=True)
class LinkSpec(Noun):
    """A link between two devices, as its user sees it."""

    bandwidth_bytes_s: float
    latency_s: float = 10e-6


@dataclass(frozen=True)
class ClusterSpec(Noun):
    """`nodes` machines with `devices_per_node` equal devices each."""

    name: str
    nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra: LinkSpec
    """Between devices of one node (what an all-reduce achieves)."""
    inter: LinkSpec
    """Between nodes."""
    memory_fraction: float = field(default=0.9)
    """Share of a device's memory that may be used."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise InputError(
                f"Cluster '{self.name}' has {self.nodes} nodes of {self.devices_per_node} devices: both must "
                "be at least 1."
            )
        if not 0 < self.memory_fraction <= 1:
            raise InputError(f"The memory fraction {self.memory_fraction} is not usable: it must be in (0, 1].")

    @property
    def devices(self) -> int:
        """How many devices there are in all (N)."""
        return self.nodes * self.devices_per_node

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are this machine's processor."""
        return self.device.kind == "cpu"


_T = 1e12
_PCIE4 = LinkSpec(19e9, 15e-6)
_NVLINK3 = LinkSpec(230e9, 8e-6)
_NVLINK4 = LinkSpec(360e9, 8e-6)
_NVLINK5 = LinkSpec(700e9, 8e-6)
_IB100 = LinkSpec(11e9, 10e-6)
_IB200x8 = LinkSpec(180e9, 10e-6)
_IB400x8 = LinkSpec(350e9, 10e-6)


def _gpu(kind: str, gib: float, tb_s: float, half: float, fp32: float, fp8: float | None = None) -> DeviceSpec:
    flops = {"fp16": half * _T, "bf16": half * _T, "fp32": fp32 * _T}
    if fp8:
        flops["fp8"] = fp8 * _T
    return DeviceSpec(kind, gib * 2**30, tb_s * 1e12, flops)


# Data sheets of the maker: memory, bandwidth, dense tensor-core rates, float32 outside tensor cores.
_KINDS: dict[str, tuple[DeviceSpec, LinkSpec, LinkSpec]] = {
    spec.kind: (spec, intra, inter)
    for spec, intra, inter in [
        (_gpu("A40", 48, 0.696, 149.7, 37.4), _PCIE4, _IB100),
        (_gpu("A100-40GB", 40, 1.555, 312, 19.5), _NVLINK3, _IB200x8),
        (_gpu("A100-80GB", 80, 2.039, 312, 19.5), _NVLINK3, _IB200x8),
        (_gpu("A800-80GB", 80, 2.039, 312, 19.5), LinkSpec(150e9, 8e-6), _IB200x8),
        (_gpu("H100-SXM", 80, 3.35, 989, 67, 1979), _NVLINK4, _IB400x8),
        (_gpu("H200-SXM", 141, 4.8, 989, 67, 1979), _NVLINK4, _IB400x8),
        (_gpu("L40S", 48, 0.864, 362, 91.6, 733), _PCIE4, _IB100),
        (_gpu("B200", 180, 8.0, 2250, 75, 4500), _NVLINK5, _IB400x8),
        (_gpu("RTX4090", 24, 1.008, 165.2, 82.6, 330.3), _PCIE4, _IB100),
        (_gpu("RTXPRO6000", 96, 1.792, 503.8, 125, 1007.6), LinkSpec(40e9, 15e-6), _IB100),
    ]
}

KINDS = tuple(_KINDS)
"""Device kinds that are built in."""


def device_kind(kind: str) -> DeviceSpec:
    """The built-in device of this kind; an unknown one is refused with the list, never guessed."""
    for name, (spec, _, _) in _KINDS.items():
        if name.lower() == kind.lower():
            return spec
    raise InputError(
        f"There is no device kind '{kind}': the kinds are {', '.join(KINDS)}; describe another one in a YAML file."
    )


def local_cluster() -> ClusterSpec:
    """This machine's processor as one device. Its rates are zero: they are measured when they are asked for."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    device = DeviceSpec("cpu", memory, 0.0, {}, 1.0, 1.0)
    link = LinkSpec(10e9, 1e-6)
    return ClusterSpec(f"local ({platform.machine()})", 1, 1, device, link, link, memory_fraction=0.5)


_FORM = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z0-9-]+)")


def parse_cluster(text: str, memory_fraction: float | None = None) -> ClusterSpec:
    """A cluster from `local`, `4xA40`, `2x8xA100-80GB` or a YAML file."""
    if text == "local":
        cluster = local_cluster()
    elif text.endswith((".yaml", ".yml")):
        cluster = _from_yaml(Path(text))
    elif match := _FORM.fullmatch(text):
        device = device_kind(match[3])
        _, intra, inter = _KINDS[device.kind]
        cluster = ClusterSpec(text, int(match[1] or 1), int(match[2]), device, intra, inter)
    else:
        raise InputError(
            f"'{text}' is not a cluster: write local, DEVICESxKIND (4xA40), NODESxDEVICESxKIND (2x8xA100-80GB), "
            "or a YAML file."
        )
    if memory_fraction is None:
        return cluster
    return ClusterSpec(
        cluster.name,
        cluster.nodes,
        cluster.devices_per_node,
        cluster.device,
        cluster.intra,
        cluster.inter,
        memory_fraction,
    )


def _from_yaml(path: Path) -> ClusterSpec:
    import yaml

    from exegpt.document import from_dict

    if not path.is_file():
        raise InputError(f"There is no cluster file '{path}'.")
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"'{path}' is not valid YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(data, dict):
        raise InputError(f"'{path}' does not describe a cluster: it needs nodes, devices_per_node, and kind or device.")
    known = _KINDS[device_kind(str(data.pop("kind"))).kind] if "kind" in data else None
    if known:
        data = {"device": known[0], "intra": known[1], "inter": known[2]} | data
    elif isinstance(data.get("device"), dict):
        data["device"] = {"kind": path.stem} | data["device"]
    return from_dict(ClusterSpec, {"name": path.stem} | data, f"'{path}'")
