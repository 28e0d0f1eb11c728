"""Joining a job: what its ranks must agree on, and their ways to each other."""

import os
from pathlib import Path

import torch

from xcore import __version__
from xcore.document import fingerprint, to_dict
from xcore.errors import InputError
from xcore.requests.request import Request, Result
from xcore.specs.change import Change
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule, devices, ranks_needed
from xcore.specs.timeline import Span
from xrunner.comm.gpu import Gpu
from xrunner.comm.kv_transfer import Arrival
from xrunner.comm.place import Place
from xrunner.comm.ranks import Ranks
from xrunner.comm.staged import StagedTransport
from xrunner.comm.transport import Transport
from xrunner.core.events import Token
from xrunner.core.valid import why_not
from xrunner.models.device import identity
from xrunner.models.planning import check_attention, described
from xrunner.rank.assembly import DeviceBatch

KINDS = DeviceBatch, Arrival, Request, Result, Token, Change, Span
"""What ranks send each other, beside numbers and texts."""


def job_facts(directory: str | Path, schedule: Schedule, ranks: Ranks) -> dict[str, str]:
    """What all ranks must agree on; InputError for a schedule that can't be run by so many ranks with this model."""
    spec = ModelSpec.from_directory(directory)
    reason = why_not(schedule, spec)
    if reason:
        raise InputError(reason)
    if ranks_needed(schedule) != ranks.size:
        raise InputError(how_to_start(schedule, ranks.size))
    files = [(path.name, path.stat().st_size) for path in sorted(Path(directory).glob("*.safetensors"))]
    return {
        "exegpt": __version__,
        "model": f"{spec.name} ({fingerprint([spec.fingerprint, files])})",
        "schedule": fingerprint(to_dict(schedule)),
    }


def on_device(schedule: Schedule, device: torch.device, attention: str) -> dict[str, str]:
    """What all ranks must agree on of their devices; InputError for attention that can't be had there."""
    check_attention(attention, schedule.model.spec, schedule.dtype, device)
    return {"device": device.type, "attention": str(described(attention, device))}


def gpu_of(device: torch.device) -> Gpu | None:
    """How a device is worked on; None for the CPU."""
    return Gpu(device) if device.type == "cuda" else None


def make_transport(ranks: Ranks, place: Place, gpu: Gpu | None) -> Transport:
    """A rank's way to the others, where all call it: from GPU to GPU if each has its own, else through host memory."""
    if gpu is None:
        return Transport(ranks, place.group, KINDS)
    import torch.distributed as dist

    direct = dist.is_available() and dist.is_nccl_available() and os.environ.get("EXEGPT_NCCL") != "0"
    everyone = ranks.all((ranks.host, identity(gpu.device), direct))
    if all(direct for _, _, direct in everyone) and len(set(everyone)) == ranks.size:
        from xrunner.comm.direct import DirectTransport

        return DirectTransport(ranks, place.schedule, place.schedule.model.spec, KINDS, gpu)
    return StagedTransport(ranks, place.group, KINDS, gpu)


def how_to_start(schedule: Schedule, started: int) -> str:
    """The sentence for a job that was started with another number of ranks than its schedule has devices."""
    need = ranks_needed(schedule)
    what = "one process was" if started == 1 else f"{started} ranks were"
    nodes, per_node = schedule.cluster.nodes, schedule.cluster.devices_per_node
    each = per_node // devices(schedule) * devices(schedule)  # ranks of a node; the devices left over there stay idle
    placed = f"--map-by ppr:{each}:node " if nodes > 1 and 0 < each < per_node else ""
    return (
        f"This schedule is for {need} devices ({schedule.replicas} x {devices(schedule)}), and {what} started: start "
        f"mpirun -n {need} {placed}exegpt run."
    )
