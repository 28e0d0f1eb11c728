"""Layers to devices (spec section 4): tensor-parallel groups of one degree, pipeline stages of equal shares."""

from exegpt.cluster import ClusterSpec
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.schedule import Stage


def tp_degrees(model: ModelSpec, cluster: ClusterSpec) -> tuple[int, ...]:
    """Tensor-parallel degrees whose groups stay within a node, divide its devices, and leave every stage a layer."""
    return tuple(
        tp
        for tp in model.tp_degrees(cluster.devices_per_node)
        if cluster.devices_per_node % tp == 0 and cluster.devices // tp <= model.layers
    )


def uniform_stages(model: ModelSpec, cluster: ClusterSpec, tp: int) -> tuple[Stage, ...]:
    """Pipeline stages of `tp` devices each, their contiguous layers as even as whole layers allow."""
    if tp not in tp_degrees(model, cluster):
        raise InputError(f"A tensor-parallel degree of {tp} doesn't fit model '{model.name}' on {cluster.name}.")
    count = cluster.devices // tp
    cuts = [round(i * model.layers / count) for i in range(count + 1)]
    return tuple(
        Stage(tuple(range(i * tp, (i + 1) * tp)), tp, "both", None, (cuts[i], cuts[i + 1])) for i in range(count)
    )
