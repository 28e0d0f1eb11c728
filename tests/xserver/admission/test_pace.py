"""The pace's measure of slowdown, on engines that are exactly as predicted: it is 1."""

import math
from dataclasses import replace

import pytest

from benchmarks.simulated_server import SimulatedServer
from tests.xserver.admission.test_admission_control import PROFILE, SCHEDULE
from xcore.policies.chunked import ChunkedControl
from xcore.policies.orca import OrcaControl
from xcore.requests.request import Request
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import Stage
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xserver.admission.pace import Pace
from xsimulator.cost.cost_model import ReplicaCost

CLUSTER = parse_cluster("4xA100-80GB")
POLICIES = {
    "orca": OrcaControl(max_num_seqs=64, prefills_per_step=1),
    "chunked": ChunkedControl(max_num_seqs=64, max_num_batched_tokens=2048),
}
WORKLOADS = {"T": task("T"), "2000/50": Workload.fixed(2000, 50)}


def on(policy, workload, stages=1, replicas=1):
    """Return a schedule on pipelines of this many stages."""
    layers = SCHEDULE.model.spec.layers // stages
    split = tuple(Stage((i,), 1, "both", None, (i * layers, (i + 1) * layers)) for i in range(stages))
    changes = {"cluster": CLUSTER, "stages": split, "workload": WORKLOADS[workload], "kv_blocks": 2000 * stages}
    return replace(SCHEDULE, policy=policy, control=POLICIES[policy], replicas=replicas, **changes)


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4)])
@pytest.mark.parametrize("workload", list(WORKLOADS))
@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_full_engine_does_the_predicted_work(policy, workload, stages, replicas):
    """Prefills end one by one at the steady rate, while as many sequences share the engine as it holds."""
    schedule = on(policy, workload, stages, replicas)
    profile = roofline_profile(SCHEDULE.model.spec, CLUSTER)
    pace, now_s = Pace(schedule, ReplicaCost.of(schedule, profile), profile, 0.0), 0.0
    load = math.floor(pace.most)
    token_s, _, rate, _ = pace._rows[min(load, len(pace._rows) - 1)]
    pace.shared_by(load, now_s)
    for _ in range(400):
        now_s += 1 / (rate * replicas)
        pace.began(pace._input, 0)
        pace.shared_by(load, now_s)
    assert pace._work[-1] * token_s / now_s == pytest.approx(1.0, rel=0.06)


@pytest.mark.parametrize(("policy", "inputs", "outputs"), [("orca", 1000, 16), ("chunked", 1500, 8)])
def test_a_prompt_that_an_idle_engine_prefills_delays_nobody(policy, inputs, outputs):
    schedule = replace(on(policy, "T"), workload=Workload.fixed(inputs, outputs), latency_bound_s=20.0)
    server = SimulatedServer(schedule, PROFILE, 30)
    for number in range(30):
        server.run(2.0 * number)
        server.send(Request(str(number), (1,) * inputs, outputs), outputs)
    server.run()
    assert server.admission._pace._scales == {0: pytest.approx(1.0, rel=0.01)}
