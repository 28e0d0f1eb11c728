"""Small specs that several tests need."""

from dataclasses import replace

from xcore.policies import traits_of
from xcore.policies.control import kinds
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import Workload, task

MODEL = builtin_model("gpt2")


def with_gib(cluster: ClusterSpec, gib: float) -> ClusterSpec:
    """The cluster with this memory per device, whatever the memory of its kind is."""
    return cluster.with_memory(gib * 2**30 / cluster.device.memory_bytes)


def line(slope, constant, *axes):
    """A table that is linear in the product of its coordinates."""
    import itertools
    import math

    points = ((1.0, 1024.0),) * len(axes)
    return Table(axes, points, tuple(constant + slope * math.prod(at) for at in itertools.product(*points)))


def profile(model=MODEL):
    """A profile with plain lines in every table."""
    layer = LayerTables(
        rest=line(1e-5, 1e-4, "tokens"),
        encode_attention=line(1e-8, 1e-5, "batch", "length"),
        chunk_attention=line(1e-9, 1e-5, "chunk", "past"),
        decode_attention=line(1e-8, 1e-5, "batch", "context"),
    )
    return Profile(
        version=Profile.VERSION,
        source="measured",
        model=model.fingerprint,
        dtype="fp32",
        device="cpu",
        degrees=(DegreeTables(1, layer, embedding=line(1e-8, 0.0, "tokens"), head=line(1e-5, 1e-4, "rows")),),
        overhead=line(1e-6, 1e-4, "batch"),
        send=line(1e-9, 1e-5, "bytes"),
        send_between_nodes=line(1e-9, 1e-5, "bytes"),
        provenance={"processor": "imagined"},
    )


def split(policy, fields):
    """The fields of a schedule in which control variables stand beside the others."""
    record = traits_of(policy).control
    names = set(kinds(record))
    variables = {name: value for name, value in fields.items() if name in names}
    rest = {name: value for name, value in fields.items() if name not in names}
    return {"control": record(**variables), **rest}


def changed(plan, **changes):
    """The schedule with other fields, control variables among them."""
    return replace(plan, **split(plan.policy, plan.control.variables | changes))


def schedule(policy="rra", model=MODEL, workload: Workload | None = None, **changes):
    """A schedule of one stage on one device."""
    defaults = {
        "rra": {"encode_batch": 4, "decode_batch": 9, "decode_iterations": 8},
        "static": {"encode_batch": 4},
        "hybrid": {"encode_batch": 4, "micro_batches": 2, "encode_micro_batches": 3},
        "waa-c": {"encode_batch": 4, "decode_batch": 9, "micro_batches": 2},
        "waa-m": {"encode_batch": 4, "decode_batch": 9, "micro_batches": 2},
        "orca": {"max_num_seqs": 8, "prefills_per_step": 1},
        "chunked": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
    }.get(policy, {})
    fields = {
        "version": Schedule.VERSION,
        "policy": policy,
        "model": ModelReference(model, model.fingerprint),
        "cluster": parse_cluster("1xA40"),
        "workload": workload or task("S").without_requests,
        "profile": ProfileReference("measured", "0" * 16),
        "stages": (Stage((0,), 1, "both", None, (0, model.layers)),),
        "kv_blocks": 1000,
        "dtype": "fp32",
        "kv_dtype": "fp32",
    }
    return Schedule(**split(policy, fields | defaults | changes))
