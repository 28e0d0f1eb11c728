"""The time of a model's requests when each runs alone: the unit of normalised latencies."""

from collections.abc import Sequence

from xcore.specs.schedule import BLOCK_SIZE, Stage
from xcore.specs.workload import RequestLengths
from xscheduler.settings import Setting


def mean_batch_one_latency(setting: Setting, requests: Sequence[RequestLengths]) -> float | None:
    """Return the mean seconds of these requests, one at a time on the smallest tensor-parallel group of a node.

    The group must hold the model and its longest request. Return None if no group does.
    """
    from xsimulator.cost.batch_one_latency import batch_one_times
    from xsimulator.cost.cost_model import CostModel

    model, cluster, profile = setting.model, setting.cluster, setting.profile
    cost_model = CostModel(model, cluster, profile, setting.kv_dtype, tokens=setting.workload.mean_tokens)
    inputs, outputs = [request.input for request in requests], [request.output for request in requests]
    longest = max(request.input + request.output for request in requests)
    degrees = {tables.tp for tables in profile.degrees}
    encoder = (0, model.encoder_layers) if model.encoder_layers else None
    for tp in model.tp_degrees(cluster.devices_per_node):
        if tp not in degrees:
            continue
        replica = cost_model.replica((Stage(tuple(range(tp)), tp, "both", encoder, (0, model.layers)),))
        (memory,) = replica.memory((max(inputs), 1))
        if memory.blocks * BLOCK_SIZE >= longest:
            return float(batch_one_times(replica, inputs, outputs).total.mean())
    return None
