"""Set up a job: check that its ranks can run the schedule, connect them, and load each rank's part of the model."""

import os
from pathlib import Path

import torch

from xcore import __version__
from xcore.document import fingerprint, to_dict
from xcore.errors import InputError
from xcore.policies.from_schedule import make_policy
from xcore.requests.engine_protocol import TokenEvent
from xcore.requests.request import Request, Result
from xcore.specs.change import Change
from xcore.specs.model import ModelSpec, usual_kv_dtype
from xcore.specs.schedule import Schedule, devices, ranks_needed
from xcore.specs.timeline import Span
from xrunner.comm.gpu import Gpu
from xrunner.comm.kv_transfer import KVArrival
from xrunner.comm.place import Place
from xrunner.comm.ranks import Ranks
from xrunner.comm.staged import StagedTransport
from xrunner.comm.transport import Transport
from xrunner.models import Model, Shard, load_model
from xrunner.models.attention_planning import check_attention, described
from xrunner.models.cache import checked_kv_dtype
from xrunner.models.device import identity
from xrunner.models.weights import DTYPES, QUANTIZED
from xrunner.rank.assembly import DeviceBatch

KINDS = DeviceBatch, KVArrival, Request, Result, TokenEvent, Change, Span
"""Dataclasses that ranks send each other, in addition to numbers and texts."""


def job_facts(directory: str | Path, schedule: Schedule, ranks: Ranks) -> dict[str, str]:
    """Return the facts that all ranks must agree on.

    Raises:
        InputError: The schedule can't be run by this number of ranks with this model.
    """
    spec = ModelSpec.from_directory(directory)
    check_runnable(schedule, spec)
    check_ranks(schedule, ranks.size)
    files = [(path.name, path.stat().st_size) for path in sorted(Path(directory).glob("*.safetensors"))]
    return {
        "exegpt": __version__,
        "model": f"{spec.name} ({fingerprint([spec.fingerprint, files])})",
        "schedule": fingerprint(to_dict(schedule)),
    }


def on_device(schedule: Schedule, device: torch.device, attention: str) -> dict[str, str]:
    """Return the facts about their devices that all ranks must agree on.

    Raises:
        InputError: The device doesn't support this attention, or the schedule's KV dtype.
    """
    checked_kv_dtype(schedule.kv_dtype, schedule.model.spec, schedule.dtype, device)
    check_attention(attention, schedule.model.spec, schedule.dtype, device)
    return {"device": device.type, "attention": str(described(attention, device))}


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the `Gpu` of a device; None for the CPU."""
    return Gpu(device) if device.type == "cuda" else None


def make_transport(ranks: Ranks, place: Place, gpu: Gpu | None) -> Transport:
    """Return a rank's transport to the other ranks; all call it.

    Data goes from GPU to GPU if each rank has its own GPU, else through host memory.
    """
    if gpu is None:
        return Transport(ranks, place.group, KINDS)
    import torch.distributed as dist

    direct = dist.is_available() and dist.is_nccl_available() and os.environ.get("EXEGPT_NCCL") != "0"
    everyone = ranks.all((ranks.host, identity(gpu.device), direct))
    if all(direct for _, _, direct in everyone) and len(set(everyone)) == ranks.size:
        from xrunner.comm.direct import DirectTransport

        return DirectTransport(ranks, place.schedule, place.schedule.model.spec, KINDS, gpu)
    return StagedTransport(ranks, place.group, KINDS, gpu)


def load_part(
    directory: str | Path, place: Place, transport: Transport | None, device: torch.device, attention: str
) -> Model:
    """Load a rank's part of the model: its layers, or its shard of them, and the ends that it needs.

    Raises:
        InputError: A weight can't be read.
    """
    schedule = place.schedule
    return load_model(
        directory,
        schedule.dtype,
        layers=place.layers,
        embedding=place.first,
        head=place.samples and bool(place.layers),
        encoder_layers=place.encoder_layers if schedule.model.spec.encoder_layers else None,
        shard=Shard(place.part, place.tp, transport.all_reduce) if transport else Shard(0, 1, lambda x: x),
        device=device,
        attention=attention,
        kv_dtype=schedule.kv_dtype,
    )


def check_schedule(schedule: Schedule, model: Model, started: int) -> None:
    """Check that `started` ranks can run a schedule with this model.

    Raises:
        InputError: The schedule is for another model, dtype or number of ranks.
    """
    schedule.check_model(model.spec)
    dtypes = ("dtype", schedule.dtype, model.dtype), ("kv_dtype", schedule.kv_dtype, model.kv_dtype)
    for name, dtype, loaded in dtypes:
        if dtype != loaded:
            raise InputError(
                f"The schedule has {name} {dtype}, but the model was loaded in {loaded}: use the same dtype."
            )
    make_policy(schedule)  # refuses at once what can't be run
    check_ranks(schedule, started)


def check_ranks(schedule: Schedule, started: int) -> None:
    """Raise InputError if a job has another number of ranks than its schedule has devices."""
    need = ranks_needed(schedule)
    if started == need:
        return
    what = "one process was" if started == 1 else f"{started} ranks were"
    nodes, per_node = schedule.cluster.nodes, schedule.cluster.devices_per_node
    each = per_node // devices(schedule) * devices(schedule)  # ranks of a node; the devices left over there stay idle
    placed = f"--map-by ppr:{each}:node " if nodes > 1 and 0 < each < per_node else ""
    raise InputError(
        f"This schedule is for {need} devices ({schedule.replicas} x {devices(schedule)}), and {what} started: start "
        f"mpirun -n {need} {placed}exegpt run."
    )


def check_runnable(schedule: Schedule, model: ModelSpec) -> None:
    """Check that a schedule can be run with a model, since some schedules are only for predictions.

    Raises:
        InputError: The schedule is for another model, or its stages, dtypes or degrees can't be run.
    """
    schedule.check_model(model)
    schedule.check_stages()
    if schedule.speculation:
        raise InputError(
            f"The schedule drafts {schedule.speculation.drafted} tokens per iteration, and this engine doesn't: export "
            "it to another engine, or tune without --draft-acceptance."
        )
    make_policy(schedule)
    if schedule.dtype not in DTYPES | QUANTIZED or schedule.kv_dtype not in (usual_kv_dtype(schedule.dtype), "int8"):
        raise InputError(
            f"The schedule has dtype {schedule.dtype} and kv_dtype {schedule.kv_dtype}: both must be the same, "
            f"{' or '.join(DTYPES)}, or kv_dtype int8; tune with --dtype or --kv-dtype."
        )
    checked_kv_dtype(schedule.kv_dtype, model, schedule.dtype)
    for tp in sorted({stage.tp for stage in schedule.stages}):
        possible = model.tp_degrees(tp)
        if tp not in possible:
            raise InputError(
                f"The schedule has stages of tensor-parallel degree {tp}, but model '{model.name}' can only be split "
                f"into {', '.join(map(str, possible))}: tune again."
            )
