"""Orders under a latency bound: accepted requests may be passed in the queue, and should be in time all the same.

Admission control decides as in a server. Its engine is a replica in simulated time, with the true lengths. Requests
come at about twice the rate that it sustains. Run as `python -m benchmarks.orders_under_a_bound`.
"""

import contextlib
import math
from dataclasses import replace

import numpy as np

from benchmarks.simulated_server import SimulatedServer
from xcore.arrays import Array
from xcore.batching import Order
from xcore.orders import make_order
from xcore.orders.noise import noisy_scores
from xcore.orders.promised import Promised
from xcore.policies.orca import OrcaControl
from xcore.requests.request import Request
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule, Stage
from xcore.specs.workload import task
from xprofiler.roofline import roofline_profile
from xserver.http.api_error import ApiError

TAU = 0.62
"""Kendall's tau of the ranker, as on LMSYS-Chat."""
REQUESTS = 1500
_MODEL, _CLUSTER = builtin_model("opt-13b"), parse_cluster("1xA100-80GB")
_PROFILE = roofline_profile(_MODEL, _CLUSTER)
_SCHEDULE = Schedule(
    version=Schedule.VERSION,
    policy="orca",
    control=OrcaControl(max_num_seqs=16, prefills_per_step=1),
    model=ModelReference(_MODEL, _MODEL.fingerprint),
    cluster=_CLUSTER,
    workload=task("T"),
    profile=ProfileReference("roofline", "0"),
    stages=(Stage((0,), 1, "both", None, (0, _MODEL.layers)),),
    kv_blocks=2000,
    dtype="fp16",
    kv_dtype="fp16",
    admission="grow",
)


def served(order: Order, bound_s: float, count: int, rate: float = 10.0, seed: int = 2) -> tuple[int, Array]:
    """Serve requests of twice the rate that the engine sustains.

    Returns:
        The number of late requests, and the accepted requests' latencies in seconds per output token.
    """
    rng, workload = np.random.default_rng(seed), _SCHEDULE.workload
    arrivals = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    inputs, outputs = (side.sample(count, rng).astype(int).tolist() for side in (workload.input, workload.output))
    scores = noisy_scores(outputs, TAU, seed).tolist()
    server = SimulatedServer(replace(_SCHEDULE, latency_bound_s=bound_s), _PROFILE, count, order)
    due_s: dict[str, float] = {}
    for i, arrival_s in enumerate(arrivals):
        server.run(arrival_s)
        request = Request(str(i), (1,) * inputs[i], workload.output.max)
        with contextlib.suppress(ApiError):
            promise = server.send(request, outputs[i], scores[i])
            due_s[request.id] = math.inf if promise.long else arrival_s + bound_s
    server.run()
    assert len(server.finished) == len(due_s)
    late = sum(end_s > due_s[output.request.id] for output, end_s in server.finished)
    return late, np.array([(end_s - output.added_s) / len(output.tokens) for output, end_s in server.finished])


def main() -> None:
    """Print the accepted and the late requests of each order."""
    orders = {
        "fcfs": make_order("fcfs"),
        "learned, as promised": Promised(make_order("learned")),
        "learned, without a limit": make_order("learned"),
    }
    print(f"{'bound':>6}  {'order':26} accepted  late  ms per token")
    for bound_s in (20.0, 40.0):
        for name, order in orders.items():
            late, per_token_s = served(order, bound_s, REQUESTS)
            print(f"{bound_s:5g}s  {name:26} {len(per_token_s):8,} {late:5,}  {per_token_s.mean() * 1e3:12.0f}")


if __name__ == "__main__":
    main()
