"""The cluster that a job's ranks form, as measured, and its file."""

import statistics
from dataclasses import replace
from pathlib import Path

import torch

from xcore import document
from xcore.specs.cluster import ClusterSpec
from xcore.specs.device_spec import DeviceSpec, LinkSpec
from xprofiler import machine
from xrunner.comm.ranks import Ranks
from xrunner.models.device import CPU


def found_cluster(ranks: Ranks, intra: LinkSpec, inter: LinkSpec, on: torch.device = CPU) -> ClusterSpec:
    """Return the cluster of the ranks, with one device per rank: a GPU, or a share of its node's CPUs and memory.

    Its rates are those of the median rank while all ranks compute. All ranks must call it (about a second).
    """
    local = machine.local(on)
    local = local if local.device.flops_s else machine.measured(local)
    devices = ranks.all(local.device, DeviceSpec)
    device = replace(
        local.device,
        memory_bytes=min(device.memory_bytes for device in devices) // (ranks.per_node if on.type == "cpu" else 1),
        bandwidth_bytes_s=statistics.median(device.bandwidth_bytes_s for device in devices),
        flops_s={dtype: statistics.median(d.flops_s[dtype] for d in devices) for dtype in local.device.flops_s},
    )
    name = f"{len(ranks.nodes)} nodes x {ranks.per_node} ranks"
    return replace(
        local,
        name=name,
        nodes=len(ranks.nodes),
        devices_per_node=ranks.per_node,
        device=device,
        intra=intra,
        inter=inter,
    )


def write_cluster(path: Path, cluster: ClusterSpec) -> None:
    """Write a cluster as the YAML file that `--cluster` reads, whole or not at all."""
    import yaml

    document.write_text(path, yaml.safe_dump(document.to_dict(cluster), sort_keys=False))
