"""The built-in devices: each one's data sheet, the memory that software sees, its links, and the shares it reaches."""

from dataclasses import dataclass
from typing import Literal

from xcore.specs.device_spec import DeviceSpec, LinkSpec


@dataclass(frozen=True)
class Shares:
    """Shares of the data sheet's figures that kernels reach."""

    measured_on: str
    """Kinds on which they were measured; on others of their generation they are taken over."""
    products: float = 0.67
    """Of the 16-bit rate, by large matrix products."""
    bandwidth: float = 0.86
    products8: float = 0.67
    """Of the rate in 8 bits, by large matrix products."""
    attention: float = 0.46
    """Of the 16-bit rate, by attention over prompts in 16 bits."""
    attention8: float = 0.75
    """Of the 16-bit rate, by attention over prompts in 8 bits."""
    products4: float = 0.43
    """Of the rate in NVFP4, by large matrix products with the quantisation of their input."""


@dataclass(frozen=True)
class DeviceLink:
    """What a link between devices reaches."""

    measured_on: str
    """Kinds on which all-reduces were measured; on others it is taken over."""
    spec: LinkSpec
    network: LinkSpec
    """The usual link between nodes of such devices."""


Checked = Literal["yaml", "corroborated", "memory"]
"""How a sheet's figures were checked: against aiconfigurator's system files, against public pages, or not at all."""


@dataclass(frozen=True)
class DeviceSheet:
    """The sheet of one built-in device kind. Rates are dense, with 32-bit sums, in TFLOP/s."""

    kind: str
    mib: int
    """Memory that nvidia-smi or AMD's table counts (MiB)."""
    visible_gib: float
    """Memory that CUDA or HIP reports (GiB)."""
    tb_s: float
    """Memory bandwidth (TB/s)."""
    half: float
    """Rate in fp16."""
    fp32: float
    """Rate in fp32 outside tensor cores, not TF32."""
    shares: Shares
    link: DeviceLink
    source: str
    """Address of the data sheet, or its title."""
    checked: Checked
    fp8: float | None = None
    fp4: float | None = None
    int8: float | None = None
    """None: the rate of fp8."""
    link_gb_s: float = 0.0
    """Data sheet of NVLink or Infinity Fabric, per direction, all links of a device (GB/s); 0: PCIe alone."""
    network: LinkSpec | None = None
    """Link between nodes; None: the usual one of its link."""
    bf16: bool = True
    """Whether it computes in bf16, as fast as in fp16."""
    dies: int = 1
    """Devices that software sees for one that is sold; each has an equal part of all figures."""

    @property
    def device(self) -> DeviceSpec:
        """Return the device as software sees it."""
        rates, shares = self.tflops, self.shares
        reached = {"fp8": shares.products8, "fp4": shares.products4, "int8": shares.products8}
        return DeviceSpec(
            self.kind,
            self.mib * 2.0**20 / self.dies,
            self.tb_s * 1e12 / self.dies,
            {dtype: rate * 1e12 / self.dies for dtype, rate in rates.items()},
            shares.products,
            shares.bandwidth,
            {dtype: share for dtype, share in reached.items() if dtype in rates},
            shares.attention,
            {"fp8": shares.attention8},
            self.visible_gib * 2**30 / self.dies,
        )

    @property
    def tflops(self) -> dict[str, float]:
        """Return the rates by dtype (TFLOP/s) in which it computes."""
        rates = {"fp16": self.half, "bf16": self.half if self.bf16 else None, "fp32": self.fp32, "fp8": self.fp8}
        rates |= {"fp4": self.fp4, "int8": self.int8 or self.fp8}
        return {dtype: rate for dtype, rate in rates.items() if rate}

    @property
    def intra(self) -> LinkSpec:
        """Return the link within a node."""
        return self.link.spec

    @property
    def inter(self) -> LinkSpec:
        """Return the link between nodes."""
        return self.network or self.link.network

    @property
    def not_compared(self) -> tuple[str, ...]:
        """Return which figures were not measured on this kind, each with its origin; empty if all were."""
        texts = []
        if self.shares_from:
            texts.append(f"the shares of its peak rates are those of {self.shares_from}")
        if self.links_from:
            texts.append(f"bandwidth and latency of its links are derived from {self.links_from}")
        if self.checked == "memory":
            texts.append("its peak rates were not checked against a data sheet")
        return tuple(texts)

    @property
    def shares_from(self) -> str | None:
        """Return the kinds from which its shares were taken over; None: they were measured on this kind."""
        return None if self.kind in self.shares.measured_on.split(", ") else self.shares.measured_on

    @property
    def links_from(self) -> str | None:
        """Return the kinds from which its links are derived; None: they were measured on this kind."""
        return None if self.kind in self.link.measured_on.split(", ") else self.link.measured_on


# Shares (`python -m benchmarks.device_shares`): medians over three engines' matrix products in the tables of
# aiconfigurator 0.12.0: those of at least 4096 in every size, and for bandwidth at most 16 rows by at least 0.25 GB
# of weights. There an 8-bit product includes the quantisation of its input, which engines fuse into what comes before
# (static scales): the shares of H100, H200, B200 and L40S are without it, those of RTX PRO 6000 with it. B300, GB200
# and GB300: B200's 8-bit share and shares of attention, times the ratio of both systems' medians. Products in NVFP4
# are with the quantisation. Attention: TensorRT-LLM's kernels over prompts of 8,192 tokens and more. A40: 100 TFLOP/s
# and 600 GB/s, given with the ExeGPT paper's cluster; its attention is the A100's. A100: also int8 (TensorRT-LLM's
# SmoothQuant).
_A40 = Shares("A40")
_A100 = Shares("A100-40GB, A100-80GB", 0.84, 0.76, 0.87)
_H100 = Shares("H100-SXM", 0.78, 0.84, 0.75, 0.54, 0.75)
_H200 = Shares("H200-SXM", 0.77, 0.83, 0.74, 0.54, 0.75)
_L40S = Shares("L40S", 0.57, 0.83, 0.55, 0.40, 0.75)
_RTX4090 = Shares("A40, L40S", attention=0.40)  # products as on A40, attention as on L40S
_B200 = Shares("B200", 0.65, 0.78, 0.68, 0.50, 0.63, 0.44)
_B300 = Shares("B300-SXM", 0.66, 0.81, 0.72, 0.58, 0.81, 0.30)
_GB200 = Shares("GB200", 0.61, 0.80, 0.67, 0.50, 0.64, 0.41)
_GB300 = Shares("GB300", 0.74, 0.79, 0.76, 0.61, 0.82, 0.31)
_PRO = Shares("RTXPRO6000-Server", 0.85, 0.83, 0.74, 0.47, 0.92, 0.64)
_PRO_BOOST = Shares("RTXPRO6000-Server", 0.79, 0.83, 0.69, 0.44, 0.85, 0.59)
"""The same measured rates as shares of the Workstation Edition's peaks."""
_AMD = Shares("A40 and A100-80GB")
"""No AMD device was measured: the defaults."""

# Links: bandwidth that an all-reduce reaches, bytes on the wire over time. NVLink: 2, 4 and 8 devices with messages of
# 64 KB to 256 MB in the tables of aiconfigurator 0.12.0. They are the medians of the fits to vLLM's, TensorRT-LLM's and
# NCCL's kernels (H100: 291, 267, 291 GB/s; 6, 4, 13 µs). The same fit to the tables of B300, GB200 and GB300 gives what
# B200 reaches (medians 489 to 506 GB/s). PCIe: rings (`xprofiler/rings.py`), whose bandwidth depends on the board
# (docs/devices.md). PCIe 4: a pair of the L40S there; four and eight fitted to TensorRT-LLM's published L40S rows
# (`python -m benchmarks.published --fit-links`). PCIe 5: two RTX PRO 6000 of the board on which vLLM 0.19's and
# TensorRT-LLM 1.3.0rc10's kernels were measured (`python -m benchmarks.pcie_all_reduce --fit`); larger groups are
# assumed to reach the same. Boards with NVLink bridges: the other board there. PCIe 3: half of PCIe 4.
#
# Bridges between two or four cards count only where the cards are sold with them (NVL). A mesh of eight reaches, among
# n devices, its n - 1 links at NVLink 4's share of their rate. InfiniBand: nine tenths of the ports' rate, all ports of
# a node together. GB200, GB300: up to 18 trays of four devices share one NVLink domain.
_IB100 = LinkSpec(11e9, 10e-6)
_IB400 = LinkSpec(45e9, 10e-6)
_IB200X8 = LinkSpec(180e9, 10e-6)
_IB400X8 = LinkSpec(350e9, 10e-6)
_IB800X8 = LinkSpec(720e9, 10e-6)
_PCIE3 = DeviceLink("L40S", LinkSpec(9.5e9, 15e-6, ((2, 10.1e9), (4, 9e9), (8, 8.5e9))), _IB100)
_PCIE4 = DeviceLink("L40S", LinkSpec(19e9, 15e-6, ((2, 20.2e9), (4, 18e9), (8, 17e9))), _IB100)
_PCIE4_A40 = DeviceLink("A40", LinkSpec(19e9, 15e-6, ((4, 19e9), (8, 17e9))), _IB100)  # given with the paper's cluster
_PCIE5 = DeviceLink("RTXPRO6000-Server", LinkSpec(14.6e9, 18e-6, ((2, 14.6e9),)), _IB100)
_NVL = "H100-SXM and RTXPRO6000-Server"
_NVL2 = DeviceLink(_NVL, LinkSpec(37.4e9, 18e-6, ((2, 195e9), (4, 27e9), (8, 21.6e9))), _IB400)
_NVL4 = DeviceLink(_NVL, LinkSpec(37.4e9, 18e-6, ((2, 293e9), (4, 293e9), (8, 21.6e9))), _IB400)
_NVLINK2 = DeviceLink("A100-80GB", LinkSpec(86e9, 7e-6), _IB100)  # 150 of the A100's 300 GB/s
_NVLINK3 = DeviceLink("A100-40GB, A100-80GB", LinkSpec(172e9, 7e-6), _IB200X8)
_NVLINK3_A800 = DeviceLink("A100-80GB", LinkSpec(115e9, 7e-6), _IB200X8)  # 400 of the A100's 600 GB/s
_NVLINK4 = DeviceLink("H100-SXM, H200-SXM", LinkSpec(293e9, 6e-6), _IB400X8)
_NVLINK5 = DeviceLink("B200, B300-SXM, GB200, GB300", LinkSpec(489e9, 10e-6), _IB400X8)
_FABRIC3 = DeviceLink("H100-SXM", LinkSpec(130e9, 6e-6), _IB200X8)  # one die's half of 400 GB/s


def _mesh(link_gb_s: float) -> DeviceLink:
    """Return the link of a full mesh of eight devices, whose seven links together have this rate (GB/s)."""
    pair = 0.65 * link_gb_s * 1e9 / 7
    return DeviceLink("H100-SXM", LinkSpec(pair, 6e-6, tuple((n, (n - 1) * pair) for n in (2, 4, 8))), _IB400X8)


_MESH, _MESH8 = _mesh(448), _mesh(537.6)
_YAML: Checked = "yaml"
_PUBLIC: Checked = "corroborated"
_MEMORY: Checked = "memory"
_DC = "https://www.nvidia.com/en-us/data-center/"
_A800 = "NVIDIA A800 data sheet, 2022"
_GRACE, _NVL72 = _DC + "grace-hopper-superchip/", _DC + "gb300-nvl72/"
_PRO_6000 = "https://www.nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000/"
_PRO_SERVER = _DC + "rtx-pro-6000-blackwell-server-edition/"
_GEFORCE = "https://images.nvidia.com/aem-dam/Solutions/geforce/"
_RTX40 = _GEFORCE + "ada/nvidia-ada-gpu-architecture.pdf"
_RTX50 = _GEFORCE + "blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
_RTX30 = "NVIDIA Ampere GA102 GPU architecture whitepaper, 2021"
_INSTINCT = "https://www.amd.com/en/products/accelerators/instinct/"
_MI250, _MI355 = _INSTINCT + "mi200/mi250x.html", _INSTINCT + "mi350/mi355x.html"
_MI300, _MI325 = _INSTINCT + "mi300/mi300x.html", _INSTINCT + "mi300/mi325x.html"
_H20 = "https://willitrunai.com/es/gpus/h20-96gb"  # no page of the maker
_G5 = "https://aws.amazon.com/ec2/instance-types/g5/"
_V100, _HGX = _DC + "v100/", _DC + "hgx/"

# Figures of the makers' data sheets, cross-checked as `checked` says. The sheets of H100 and H200 print 1979 in 16 bits
# with sparsity: half of it. B200: the HGX sheet's bandwidth, to which shares and waits were fitted (aiconfigurator
# counts 7.7 TB/s). B300 and GB300 are slow in int8. fp4 of MI355X is MXFP4. Visible memory: what PyTorch and vLLM print
# for these devices in public logs (A40, L40 and L40S with error correction; drivers differ by 0.1 to 0.3 GiB). No log
# was seen of A10G (taken as A10), A800 and the PCIe cards of A100 and H100 (as SXM), and H200-NVL (as H200-SXM).
_ROWS = (
    DeviceSheet(
        "A40", 46068, 44.4, 0.696, 149.7, 37.4, _A40, _PCIE4_A40, _DC + "a40/", _PUBLIC, int8=299.3, link_gb_s=56.25
    ),
    DeviceSheet(
        "A100-40GB", 40960, 39.5, 1.555, 312, 19.5, _A100, _NVLINK3, _DC + "a100/", _PUBLIC, int8=624, link_gb_s=300
    ),
    DeviceSheet(
        "A100-80GB", 81920, 79.15, 2.039, 312, 19.5, _A100, _NVLINK3, _DC + "a100/", _YAML, int8=624, link_gb_s=300
    ),
    DeviceSheet(
        "A800-80GB", 81920, 79.15, 2.039, 312, 19.5, _A100, _NVLINK3_A800, _A800, _MEMORY, int8=624, link_gb_s=200
    ),
    DeviceSheet(
        "H100-SXM", 81559, 79.19, 3.35, 989.5, 67, _H100, _NVLINK4, _DC + "h100/", _YAML, fp8=1979, link_gb_s=450
    ),
    DeviceSheet(
        "H200-SXM", 143771, 139.8, 4.8, 989.5, 67, _H200, _NVLINK4, _DC + "h200/", _YAML, fp8=1979, link_gb_s=450
    ),
    DeviceSheet("L40S", 46068, 44.4, 0.864, 362.05, 91.6, _L40S, _PCIE4, _DC + "l40s/", _YAML, fp8=733),
    DeviceSheet("B200", 183359, 178.35, 8.0, 2250, 75, _B200, _NVLINK5, _HGX, _YAML, fp8=4500, fp4=9000, link_gb_s=900),
    DeviceSheet("RTX4090", 24564, 23.5, 1.008, 165.2, 82.6, _RTX4090, _PCIE4, _RTX40, _PUBLIC, fp8=330.3, int8=660.6),
    DeviceSheet(
        "RTXPRO6000", 97887, 94.97, 1.792, 503.8, 125, _PRO_BOOST, _PCIE5, _PRO_6000, _MEMORY, fp8=1007.6, fp4=2015.2
    ),
    DeviceSheet("T4", 15360, 14.56, 0.32, 65, 8.1, _A40, _PCIE3, _DC + "tesla-t4/", _PUBLIC, int8=130, bf16=False),
    DeviceSheet(
        "V100-16GB-SXM", 16384, 15.77, 0.9, 125, 15.7, _A100, _NVLINK2, _V100, _MEMORY, link_gb_s=150, bf16=False
    ),
    DeviceSheet(
        "V100-32GB-SXM", 32768, 31.75, 0.9, 125, 15.7, _A100, _NVLINK2, _V100, _PUBLIC, link_gb_s=150, bf16=False
    ),
    DeviceSheet("A10", 23028, 22.06, 0.6, 125, 31.2, _A40, _PCIE4, _DC + "products/a10-gpu/", _MEMORY, int8=250),
    DeviceSheet("A10G", 23028, 22.06, 0.6, 70, 35, _A40, _PCIE4, _G5, _MEMORY, int8=140),
    DeviceSheet(
        "A30", 24576, 23.53, 0.933, 165, 10.3, _A100, _PCIE4, _DC + "products/a30-gpu/", _YAML, int8=330, link_gb_s=100
    ),
    DeviceSheet(
        "A100-40GB-PCIe", 40960, 39.5, 1.555, 312, 19.5, _A100, _PCIE4, _DC + "a100/", _MEMORY, int8=624, link_gb_s=300
    ),
    DeviceSheet(
        "A100-80GB-PCIe", 81920, 79.15, 1.935, 312, 19.5, _A100, _PCIE4, _DC + "a100/", _YAML, int8=624, link_gb_s=300
    ),
    DeviceSheet(
        "A800-80GB-PCIe", 81920, 79.15, 1.935, 312, 19.5, _A100, _PCIE4, _A800, _MEMORY, int8=624, link_gb_s=200
    ),
    DeviceSheet("L4", 23034, 22.03, 0.3, 121, 30.3, _L40S, _PCIE4, _DC + "l4/", _YAML, fp8=242.5),
    DeviceSheet("L40", 46068, 44.4, 0.864, 181.05, 90.5, _L40S, _PCIE4, _DC + "l40/", _MEMORY, fp8=362),
    DeviceSheet("RTX3090", 24576, 23.69, 0.936, 71, 35.6, _A40, _PCIE4, _RTX30, _MEMORY, int8=284, link_gb_s=56.25),
    DeviceSheet(
        "RTX5090", 32607, 31.36, 1.792, 209.5, 104.8, _PRO_BOOST, _PCIE5, _RTX50, _PUBLIC, fp8=419, fp4=1676, int8=838
    ),
    DeviceSheet(
        "RTXPRO6000-Server", 97887, 94.97, 1.792, 467.8, 117, _PRO, _PCIE5, _PRO_SERVER, _YAML, fp8=935.6, fp4=1871.2
    ),
    DeviceSheet("H20", 97871, 95.22, 4.0, 148, 44, _H100, _NVLINK4, _H20, _PUBLIC, fp8=296, link_gb_s=450),
    DeviceSheet(
        "H100-PCIe",
        81559,
        79.19,
        2.0,
        756.5,
        51,
        _H100,
        _PCIE5,
        _DC + "h100/",
        _YAML,
        fp8=1513,
        link_gb_s=300,
        network=_IB400,
    ),
    DeviceSheet(
        "H100-NVL", 95830, 93.0, 3.9, 835.5, 60, _H100, _NVL2, _DC + "h100/", _PUBLIC, fp8=1670.5, link_gb_s=300
    ),
    DeviceSheet(
        "H200-NVL", 143771, 139.8, 4.8, 835.5, 60, _H200, _NVL4, _DC + "h200/", _PUBLIC, fp8=1670.5, link_gb_s=450
    ),
    DeviceSheet(
        "GH200-96GB",
        97871,
        95.0,
        4.0,
        989,
        67,
        _H100,
        _NVLINK4,
        _GRACE,
        _MEMORY,
        fp8=1978,
        link_gb_s=450,
        network=_IB400,
    ),
    DeviceSheet(
        "B300-SXM",
        275040,
        267.69,
        7.75,
        2250,
        75,
        _B300,
        _NVLINK5,
        _HGX,
        _YAML,
        fp8=4500,
        fp4=14000,
        int8=153.5,
        link_gb_s=900,
        network=_IB800X8,
    ),
    DeviceSheet(
        "GB200",
        189471,
        184.31,
        8.0,
        2500,
        80,
        _GB200,
        _NVLINK5,
        _NVL72,
        _YAML,
        fp8=5000,
        fp4=10000,
        link_gb_s=900,
        network=_NVLINK5.spec,
    ),
    DeviceSheet(
        "GB300",
        284208,
        276.5,
        8.0,
        2500,
        80,
        _GB300,
        _NVLINK5,
        _NVL72,
        _YAML,
        fp8=5000,
        fp4=15000,
        int8=165,
        link_gb_s=900,
        network=_NVLINK5.spec,
    ),
    DeviceSheet(
        "MI250X", 131072, 127.96, 3.2768, 383, 47.9, _AMD, _FABRIC3, _MI250, _PUBLIC, int8=383, link_gb_s=400, dies=2
    ),
    DeviceSheet("MI300X", 196608, 191.98, 5.3, 1307.4, 163.4, _AMD, _MESH, _MI300, _PUBLIC, fp8=2614.9, link_gb_s=448),
    DeviceSheet("MI325X", 262144, 255.98, 6.0, 1307.4, 163.4, _AMD, _MESH, _MI325, _PUBLIC, fp8=2614.9, link_gb_s=448),
    DeviceSheet(
        "MI355X",
        294912,
        287.98,
        8.0,
        2516.6,
        157.3,
        _AMD,
        _MESH8,
        _MI355,
        _PUBLIC,
        fp8=5033.2,
        fp4=10066,
        link_gb_s=537.6,
    ),
)
SHEETS = {sheet.kind: sheet for sheet in _ROWS}
"""The built-in devices by kind."""
KINDS = tuple(SHEETS)
"""Built-in device kinds."""
