"""This machine: what it is, and the two rates that bound everything on it, measured."""

import os
import platform
from dataclasses import replace

from exegpt.cluster import ClusterSpec
from xprofiler.timing import timed


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def provenance() -> dict[str, str]:
    """Hardware and software that a measurement on this machine depends on."""
    import torch

    import exegpt

    return {
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "exegpt": exegpt.__version__,
    }


def matrix_flops_s(size: int = 2048) -> float:
    """FLOP/s of a large float32 matrix product through the linear kernel that the runner uses."""
    import torch

    from exegpt.kernels.linear import PackedLinear

    product = PackedLinear(torch.randn(size, size))
    x = torch.randn(size, size)
    return 2.0 * size**3 / timed(lambda: product(x)).seconds


def read_bandwidth_bytes_s(size: int = 2**28) -> float:
    """Bytes/s of streaming `size` bytes, far more than the caches hold, once through the processor."""
    import torch

    values = torch.ones(size // 4)
    return size / timed(lambda: values.sum()).seconds


def measured(cluster: ClusterSpec) -> ClusterSpec:
    """The local cluster with its device's float32 rate and bandwidth measured (about a second)."""
    rate = matrix_flops_s()
    device = replace(cluster.device, bandwidth_bytes_s=read_bandwidth_bytes_s(), flops_s={"fp32": rate})
    return replace(cluster, device=device)
