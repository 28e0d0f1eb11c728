"""This machine: its provenance and its two measured rates, of computing and of reading memory."""

import math
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.cluster import ClusterSpec, local_cluster
from xcore.specs.device_spec import DeviceSpec
from xcore.specs.model import usual_kv_dtype
from xcore.usable_cpus import usable_cpus
from xprofiler.timing import timed

if TYPE_CHECKING:
    import torch

_GPU_MEMORY_FRACTION = 0.9


_CPUINFO = Path("/proc/cpuinfo")
_GENERATION = ("cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
"""Fields that distinguish CPUs of one marketing name, such as "AMD EPYC": of x86, then of Arm."""
_BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
"""Flags of CPUs that multiply in bfloat16: of x86, then of Arm."""


@dataclass(frozen=True)
class Rates(Spec):
    """The two rates that bound all work on a device."""

    flops_s: float
    """FLOP/s of a matrix product in one dtype."""
    bandwidth_bytes_s: float
    """Bytes/s of reading memory."""

    def __post_init__(self) -> None:
        if not (0 < self.flops_s < math.inf and 0 < self.bandwidth_bytes_s < math.inf):
            raise InputError(f"The rates {self.flops_s} FLOP/s and {self.bandwidth_bytes_s} bytes/s must be positive.")


def _cpu_facts() -> dict[str, str]:
    """Return the operating system's facts of the first CPU; none if it isn't Linux."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def computes_bf16() -> bool:
    """Return whether this CPU has instructions for products in bfloat16."""
    facts = _cpu_facts()
    return not _BF16_FLAGS.isdisjoint(f"{facts.get('flags', '')} {facts.get('Features', '')}".split())


def cpu_name() -> str:
    """Return the CPU's name and generation, from the operating system."""
    facts = _cpu_facts()
    name = facts.get("model name") or platform.processor() or platform.machine()
    generation = ", ".join(f"{key} {facts[key]}" for key in _GENERATION if key in facts)
    return f"{name} ({generation})" if generation else name


def local(device: "torch.device") -> ClusterSpec:
    """Return this machine's CPU or GPU as a cluster of one device.

    A GPU's rates are measured (a second); the CPU's are zero, and measured on first use.
    """
    cluster = local_cluster()
    if device.type == "cpu":
        return cluster
    import torch

    from xrunner.models.weights import DTYPES

    properties = torch.cuda.get_device_properties(device)
    rates = {name: matrix_flops_s(8192, device, dtype) for name, dtype in DTYPES.items()}
    bandwidth = read_bandwidth_bytes_s(2**30, device)
    gpu = DeviceSpec(properties.name, float(properties.total_memory), bandwidth, rates, 1.0, 1.0)
    name = f"local ({properties.name})"
    return replace(cluster, name=name, device=gpu, memory_fraction=_GPU_MEMORY_FRACTION)


def local_named(device: str | None) -> ClusterSpec:
    """Return `local` of a device by its name; None: a GPU if there is one, else the CPU.

    Raises:
        InputError: There is no such device.
    """
    from xrunner.models.device import find_device

    return local(find_device(device))


def which(cluster: ClusterSpec) -> "torch.device | None":
    """Return the device of this machine from which `local` made a cluster; None for another machine's cluster."""
    import torch

    if cluster.is_cpu:
        return None if cluster.device.flops_s else torch.device("cpu")  # a file's cluster has known rates
    kind = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return torch.device("cuda") if cluster.name == f"local ({kind})" else None


def _products() -> dict[str, str]:
    """Return what distinguishes this CPU's matrix products from oneDNN's; see `kernels/linear.py`."""
    import torch

    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return {"products": "in tiles"}
    return {"products": "in AMX's tiles"} if torch.cpu._is_amx_tile_supported() else {}


def provenance(device: "torch.device | None" = None, attention: str = "triton") -> dict[str, str]:
    """Return the hardware and software on which a measurement on this machine depends.

    On a GPU, that includes the library that computes attention.
    """
    import torch

    from xcore import __version__

    if device and device.type == "cuda":
        from xrunner.models.attention_planning import described

        gpu = {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
        rows = {"rows": "as of graphs"} if attention == "triton" else {}
        host = {name: fact for name, fact in provenance().items() if name not in ("products", "parts")}  # of the CPU
        return host | gpu | rows | {"attention": str(described(attention, device))}
    return _products() | {
        "parts": "in the order of a run",
        "processor": cpu_name(),
        "cores": str(usable_cpus()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "exegpt": __version__,
    }


def matrix_flops_s(size: int = 2048, device: "torch.device | None" = None, dtype: "torch.dtype | None" = None) -> float:
    """Measure FLOP/s of a large matrix product, in float32 by default, through the runner's linear kernel."""
    import torch

    from exegpt.kernels.linear import PackedLinear

    weight, x = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = PackedLinear(weight)
    return 2.0 * size**3 / timed(lambda: product(x), device=device).seconds


def read_bandwidth_bytes_s(size: int = 2**28, device: "torch.device | None" = None) -> float:
    """Measure bytes/s of streaming `size` bytes, far more than the caches hold, once through the device."""
    import torch

    values = torch.ones(size // 4, device=device)
    return size / timed(lambda: values.sum(), device=device).seconds


def measured(cluster: ClusterSpec, dtype: str = "fp32") -> ClusterSpec:
    """Return the local cluster with its CPU's rate in a dtype and its bandwidth measured (about a second)."""
    from xrunner.models.weights import torch_dtype

    rate = matrix_flops_s(dtype=torch_dtype(dtype))
    rates = {usual_kv_dtype(dtype): rate}  # weights of fewer bits are converted to it
    device = replace(cluster.device, bandwidth_bytes_s=read_bandwidth_bytes_s(), flops_s=rates)
    return replace(cluster, device=device)
