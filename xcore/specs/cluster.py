"""ClusterSpec: nodes × devices, what one device can do, and the links within and between nodes."""

import math
import os
import platform
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

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
    """The part of the memory that CUDA reports (cudaMemGetInfo), of which engines take a share; None: all of it."""

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
    """PCIe: numbers of devices, and the bandwidth of each device in a ring of that size.

    The devices share switches and host bridges. Empty: groups of any size reach `bandwidth_bytes_s`, as over NVLink.
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


_T = 1e12

# Bandwidth that an all-reduce reaches: bytes on the wire over time. NVLink: 2, 4 and 8 devices with messages of 64 KB
# to 256 MB in the tables of aiconfigurator 0.12.0. They are the medians of the fits to vLLM's, TensorRT-LLM's and
# NCCL's kernels (H100: 291, 267, 291 GB/s; 6, 4, 13 µs).
# PCIe: rings (`xprofiler/rings.py`), whose bandwidth depends on the board (docs/devices.md). PCIe 4: a pair of the L40S
# there; four and eight fitted to TensorRT-LLM's published L40S rows (`python -m benchmarks.published --fit-links`).
# PCIe 5: two RTX PRO 6000 of the board on which vLLM 0.19's and TensorRT-LLM 1.3.0rc10's kernels were measured
# (`python -m benchmarks.pcie_all_reduce --fit`); larger groups are assumed to reach the same.
_PCIE4 = LinkSpec(19e9, 15e-6, ((2, 20.2e9), (4, 18e9), (8, 17e9)))
_PCIE4_A40 = LinkSpec(19e9, 15e-6, ((4, 19e9), (8, 17e9)))  # 19 GB/s: given with the paper's cluster
_PCIE5 = LinkSpec(14.6e9, 18e-6, ((2, 14.6e9),))
_NVLINK3 = LinkSpec(172e9, 7e-6)
_NVLINK3_A800 = LinkSpec(115e9, 7e-6)  # 400 of the A100's 600 GB/s
_NVLINK4 = LinkSpec(293e9, 6e-6)
_NVLINK5 = LinkSpec(489e9, 10e-6)
# InfiniBand: nine tenths of the ports' rate, all ports of a node together.
_IB100 = LinkSpec(11e9, 10e-6)
_IB200x8 = LinkSpec(180e9, 10e-6)
_IB400x8 = LinkSpec(350e9, 10e-6)


# Shares of the 16-bit peak that attention over prompts reaches in 16 and 8 bits.
_HOPPER, _ADA, _BLACKWELL, _PRO = (0.54, 0.75), (0.40, 0.75), (0.50, 0.63), (0.44, 0.85)


# Memory that PyTorch and vLLM print for these devices in public logs (A40 and L40S with error correction; drivers
# differ by 0.1 to 0.3 GiB). The A800 is assumed to have the A100's.
_VISIBLE_GIB = {
    "A40": 44.4,
    "A100-40GB": 39.5,
    "A100-80GB": 79.15,
    "A800-80GB": 79.15,
    "H100-SXM": 79.19,
    "H200-SXM": 139.8,
    "L40S": 44.4,
    "B200": 178.35,
    "RTX4090": 23.5,
    "RTXPRO6000": 94.97,
}


def _gpu(
    kind: str,
    gib: float,
    tb_s: float,
    half: float,
    fp32: float,
    fp8: float | None = None,
    reached: tuple[float, float, float] = (0.67, 0.86, 0.67),
    attention: tuple[float, float] = (0.46, 0.75),
) -> DeviceSpec:
    """Describe a GPU by memory (GiB), bandwidth (TB/s) and dense TFLOP/s.

    `reached` are the shares that 16-bit products, the bandwidth and 8-bit products reach. `attention` are the shares of
    attention over prompts in 16 and 8 bits.
    """
    flops = {"fp16": half * _T, "bf16": half * _T, "fp32": fp32 * _T}
    fractions = {}
    if fp8:
        flops["fp8"], fractions = fp8 * _T, {"fp8": reached[2]}
    shares = (*reached[:2], fractions, attention[0], {"fp8": attention[1]})
    return DeviceSpec(kind, gib * 2**30, tb_s * 1e12, flops, *shares, _VISIBLE_GIB[kind] * 2**30)


# The makers' data sheets: memory, bandwidth, dense tensor-core rates with 32-bit sums, float32 outside tensor cores (no
# dtype here means TF32). Shares reached are medians over three engines' matrix products in the tables of aiconfigurator
# 0.12.0: those of at least 4096 in every size, and for bandwidth at most 16 rows by at least 0.25 GB of weights. There
# an 8-bit product includes the quantisation of its input, which engines fuse into what comes before (static scales):
# the shares of H100, H200, B200 and L40S are without it, RTXPRO6000's with. Attention: TensorRT-LLM's kernels over
# prompts of 8,192 tokens and more. Devices that those tables lack keep the defaults, or take their generation's.
_KINDS: dict[str, tuple[DeviceSpec, LinkSpec, LinkSpec]] = {
    spec.kind: (spec, intra, inter)
    for spec, intra, inter in [
        # NVIDIA A40 data sheet, 2021. Reached: 100 TFLOP/s, 600 GB/s and 19 GB/s, given with the paper's cluster.
        (_gpu("A40", 48, 0.696, 149.7, 37.4), _PCIE4_A40, _IB100),
        # NVIDIA A100 data sheet, 2021 (SXM). The 40 GB model is the same chip.
        (_gpu("A100-40GB", 40, 1.555, 312, 19.5, reached=(0.84, 0.76, 0)), _NVLINK3, _IB200x8),
        (_gpu("A100-80GB", 80, 2.039, 312, 19.5, reached=(0.84, 0.76, 0)), _NVLINK3, _IB200x8),
        # NVIDIA A800 data sheet, 2022: an A100 with two thirds of its NVLink.
        (_gpu("A800-80GB", 80, 2.039, 312, 19.5, reached=(0.84, 0.76, 0)), _NVLINK3_A800, _IB200x8),
        # NVIDIA H100 data sheet, 2023 (SXM; its rates there are with sparsity: half of them).
        (
            _gpu("H100-SXM", 80, 3.35, 989.5, 67, 1979, reached=(0.78, 0.84, 0.75), attention=_HOPPER),
            _NVLINK4,
            _IB400x8,
        ),
        # NVIDIA H200 data sheet, 2024 (SXM, with sparsity).
        (
            _gpu("H200-SXM", 141, 4.8, 989.5, 67, 1979, reached=(0.77, 0.83, 0.74), attention=_HOPPER),
            _NVLINK4,
            _IB400x8,
        ),
        # NVIDIA L40S data sheet, 2023. Of its 48 GB 45 GiB are there, with error correction (nvidia-smi).
        (
            _gpu("L40S", 45, 0.864, 362.05, 91.6, 733, reached=(0.57, 0.83, 0.55), attention=_ADA),
            _PCIE4,
            _IB100,
        ),
        # NVIDIA HGX B200 data sheet, 2025 (an eighth of the board's; with sparsity).
        (
            _gpu("B200", 180, 8.0, 2250, 75, 4500, reached=(0.65, 0.78, 0.68), attention=_BLACKWELL),
            _NVLINK5,
            _IB400x8,
        ),
        # NVIDIA Ada GPU architecture whitepaper, 2022. Not in the tables.
        (_gpu("RTX4090", 24, 1.008, 165.2, 82.6, 330.3, attention=_ADA), _PCIE4, _IB100),
        # NVIDIA RTX Blackwell PRO GPU architecture whitepaper, 2025; the tables measured the Server Edition.
        (
            _gpu("RTXPRO6000", 96, 1.792, 503.8, 125, 1007.6, reached=(0.79, 0.83, 0.69), attention=_PRO),
            _PCIE5,
            _IB100,
        ),
    ]
}

KINDS = tuple(_KINDS)
"""Built-in device kinds."""


def device_kind(kind: str) -> DeviceSpec:
    """Return the built-in device of this kind, by its name or by words that fit no other (`H200`, `a100-sxm4-80gb`).

    Raises:
        InputError: The kind is unknown, with the list of kinds; or it fits several kinds, with those.
    """
    words = _words(kind)
    exact = [name for name in KINDS if name.lower() == kind.lower()]
    kinds = exact or [name for name in KINDS if words and _names(words, name)]
    if len(kinds) == 1:
        return _KINDS[kinds[0]][0]
    if kinds:
        raise InputError(f"'{kind}' is ambiguous: write {' or '.join(kinds)}.")
    raise InputError(
        f"There is no device kind '{kind}': the kinds are {', '.join(KINDS)}; to describe another device, edit the "
        f"file that `exegpt show 8x{KINDS[0]} --yaml` prints."
    )


def is_stock(cluster: ClusterSpec) -> bool:
    """Return whether a cluster's device and the links within its nodes are the built-in ones of its kind."""
    kind = _KINDS.get(cluster.device.kind)
    return kind is not None and (cluster.device, cluster.intra) == kind[:2]


_SAY_NOTHING = re.compile(r"nvidia|geforce|tesla|ada|blackwell|hbm\de?|server|edition|workstation")
"""Words of marketing names that distinguish no two kinds."""


def _words(kind: str) -> list[str]:
    """Return the words of a kind's name: `NVIDIA H100-SXM5-80GB` is h100, sxm, 80gb."""
    text = re.sub(r"\brtx[-_ ]*(pro)?[-_ ]*(?=\d)", r"rtx\1", kind.lower())
    words = [re.sub(r"^sxm\d$", "sxm", word) for word in re.split(r"[-_ ]+", text) if word]
    return [word for word in words if not _SAY_NOTHING.fullmatch(word)]


def _names(words: list[str], name: str) -> bool:
    """Return whether these words name a kind: by its name, memory, or form if only one form is built in."""
    kind_words = _words(name)
    known = {*kind_words, f"{_KINDS[name][0].memory_bytes / 2**30:.0f}gb"}
    if _KINDS[name][1] in (_NVLINK3, _NVLINK3_A800, _NVLINK4, _NVLINK5):
        known.add("sxm")
    return words[0] == kind_words[0] and known.issuperset(words)


def local_cluster() -> ClusterSpec:
    """Return this machine's CPU as one device. Its rates are zero: they are measured on first use."""
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    device = DeviceSpec("cpu", memory, 0.0, {}, 1.0, 1.0, attention_fraction=1.0)
    link = LinkSpec(10e9, 1e-6)
    return ClusterSpec(f"local ({platform.machine()})", 1, 1, device, link, link, memory_fraction=0.5)


_TIMES = r"\s*[xX×*]\s*"
_FORM = re.compile(rf"(?:(\d{{1,99}}){_TIMES})?(\d{{1,99}}){_TIMES}([A-Za-z][A-Za-z0-9_ -]*)")


def parse_cluster(text: str, memory_fraction: float | None = None) -> ClusterSpec:
    """Parse a cluster from `local`, `4xA40`, `2x8xA100-80GB` or a YAML file; its name has the kind's own spelling."""
    if text == "local":
        cluster = local_cluster()
    elif text.endswith((".yaml", ".yml")):
        cluster = _from_yaml(Path(text))
    elif match := _FORM.fullmatch(text):
        device = device_kind(match[3])
        _, intra, inter = _KINDS[device.kind]
        name = f"{f'{int(match[1])}x' if match[1] else ''}{int(match[2])}x{device.kind}"
        cluster = ClusterSpec(name, int(match[1] or 1), int(match[2]), device, intra, inter)
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
    meant = [name for name in KINDS if (words := _words(kind)) and _names(words, name)]
    if meant:
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
        for key, spec in zip(("device", "intra", "inter"), _KINDS[like or KINDS[0]], strict=True):
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
