"""ClusterSpec: nodes × devices, what one device can do, and the links within and between nodes."""

import os
import platform
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.device_names import device_kind, kinds_named
from xcore.specs.device_sheets import KINDS, SHEETS
from xcore.specs.device_spec import MAX_DEVICES, DeviceSpec, LinkSpec


@dataclass(frozen=True)
class ClusterSpec(Spec):
    """`nodes` machines with `devices_per_node` equal devices each."""

    name: str
    nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra: LinkSpec
    """Link between devices of one node (as an all-reduce reaches it)."""
    inter: LinkSpec
    """Link between nodes."""
    memory_fraction: float = field(default=0.9)
    """Share of a device's memory that may be used."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise InputError(
                f"Cluster '{self.name}' has {self.nodes} nodes of {self.devices_per_node} devices: both must "
                "be at least 1."
            )
        if self.devices > MAX_DEVICES:
            raise InputError(f"Cluster '{self.name}' has {self.devices:,} devices: the maximum is {MAX_DEVICES:,}.")
        if not 0 < self.memory_fraction <= 1:
            raise InputError(f"The memory fraction {self.memory_fraction} is not usable: it must be in (0, 1].")

    @property
    def devices(self) -> int:
        """Return the number of devices (N)."""
        return self.nodes * self.devices_per_node

    def with_memory(self, factor: float) -> "ClusterSpec":
        """Return the cluster with `factor` times the memory per device."""
        device = self.device
        visible = device.visible_bytes and factor * device.visible_bytes
        more = replace(device, memory_bytes=factor * device.memory_bytes, visible_bytes=visible)
        return replace(self, device=more)

    @property
    def is_cpu(self) -> bool:
        """Return whether the devices are this machine's CPU."""
        return self.device.kind == "cpu"


def is_stock(cluster: ClusterSpec) -> bool:
    """Return whether a cluster's device and the links within its nodes are the built-in ones of its kind.

    Memory is ignored, and so are rates that the cluster lacks: files of earlier versions have other ones, on which the
    times of kernels don't depend.
    """
    sheet, device = SHEETS.get(cluster.device.kind), cluster.device
    if sheet is None or cluster.intra != sheet.intra:
        return False
    known = sheet.device
    same = replace(
        known,
        memory_bytes=device.memory_bytes,
        visible_bytes=device.visible_bytes,
        flops_s={dtype: rate for dtype, rate in known.flops_s.items() if dtype in device.flops_s},
        flops_fractions={d: share for d, share in known.flops_fractions.items() if d in device.flops_fractions},
    )
    return same == device


def local_cluster() -> ClusterSpec:
    """Return this machine's CPU as one device. Its rates are zero: they are measured on first use."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    device = DeviceSpec("cpu", memory, 0.0, {}, 1.0, 1.0, attention_fraction=1.0)
    link = LinkSpec(10e9, 1e-6)
    return ClusterSpec(f"local ({platform.machine()})", 1, 1, device, link, link, memory_fraction=0.5)


_TIMES = r"\s*[xX×*]\s*"
_FORM = re.compile(rf"(?:(\d{{1,99}}){_TIMES})?(\d{{1,99}}){_TIMES}([A-Za-z][A-Za-z0-9_ -]*|\d{{4}})")


def is_cluster_file(text: str) -> bool:
    """Return whether a text names a cluster's YAML file, in letters of either case."""
    return text.lower().endswith((".yaml", ".yml"))


def parse_cluster(text: str, memory_fraction: float | None = None) -> ClusterSpec:
    """Parse a cluster from `local`, `4xA40`, `2x8xA100-80GB` or a YAML file; its name has the kind's own spelling."""
    if text == "local":
        cluster = local_cluster()
    elif is_cluster_file(text):
        cluster = _from_yaml(Path(text))
    elif match := _FORM.fullmatch(text):
        device = device_kind(match[3])
        sheet = SHEETS[device.kind]
        name = f"{f'{int(match[1])}x' if match[1] else ''}{int(match[2])}x{device.kind}"
        cluster = ClusterSpec(name, int(match[1] or 1), int(match[2]), device, sheet.intra, sheet.inter)
    else:
        raise InputError(_no_cluster(text))
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


def _no_cluster(text: str) -> str:
    """Return why `text` is no cluster, with a suggestion if it names a kind or has its parts in reverse order."""
    turned = re.fullmatch(rf"([A-Za-z][A-Za-z0-9_ -]*?)(?:{_TIMES}|:)(\d{{1,9}})", text)
    kind, count = (turned[1], turned[2]) if turned else (text, "1")
    if meant := kinds_named(kind):
        return f"'{text}' is not a cluster: write DEVICESxKIND, {' or '.join(f'{count}x{name}' for name in meant)}."
    return (
        f"'{text}' is not a cluster: write local, DEVICESxKIND (4xA40), NODESxDEVICESxKIND (2x8xA100-80GB), or a YAML "
        "file."
    )


def _from_yaml(path: Path) -> ClusterSpec:
    """Read a cluster from a file; missing keys are those of its `kind`. InputError lists all problems."""
    from xcore.document import read_yaml, to_dict, validated

    data = read_yaml(path, "cluster")
    if not isinstance(data, dict):
        raise InputError(f"'{path}' does not describe a cluster: it needs nodes, devices_per_node, and kind or device.")
    problems, like = [], None
    if "kind" in data:
        try:
            like = device_kind(str(data.pop("kind"))).kind
        except InputError as error:
            problems.append(str(error).rstrip("."))
    elif "device" not in data:
        problems.append("it needs either the kind of its devices, or device, intra and inter")
    elif isinstance(data["device"], dict):
        data["device"] = {"kind": path.stem} | data["device"]
    if like or problems:  # if the kind is wrong, any kind serves to check the rest
        sheet = SHEETS[like or KINDS[0]]
        for key, spec in {"device": sheet.device, "intra": sheet.intra, "inter": sheet.inter}.items():
            section = data.get(key, {})
            if key == "device" and isinstance(section, dict) and "memory_bytes" in section:
                section = {"visible_bytes": None} | section  # the kind's value belongs to another memory
            if key == "intra" and isinstance(section, dict) and "bandwidth_bytes_s" in section:
                section = {"ring_bytes_s": ()} | section  # the kind's rings belong to another link
            data[key] = to_dict(spec) | section if isinstance(section, dict) else section
    if data.get("nodes") == 1 and "intra" in data:  # no message crosses the missing link
        data.setdefault("inter", data["intra"])
    if data.get("devices_per_node") == 1 and "inter" in data:
        data.setdefault("intra", data["inter"])
    cluster, wrong = validated(ClusterSpec, {"name": path.stem} | data, also=("kind",))
    if cluster is None or problems:
        lacking = any(text.endswith("is missing") and text.startswith("int") for text in wrong)
        way = [f"`exegpt show 8x{KINDS[0]} --yaml` prints a complete file"] if lacking else []
        raise InputError(f"'{path}': {'; '.join([*problems, *wrong, *way])}.")
    return cluster
