"""What requests take alone, against replays of each one."""

import pytest

from tests.xcore.small_specs import profile, schedule
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import Stage
from xcore.specs.workload import RequestLengths
from xprofiler.roofline import roofline_profile
from xsimulator.cost.batch_one_latency import batch_one_times
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.event_simulator import replay

LENGTHS = [(5, 2), (200, 3), (30, 400), (900, 100)]


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "t5-small"])
def test_alone_is_a_replay_of_one(name, stages):
    spec = builtin_model(name)
    layers, tall = spec.layers // stages, spec.encoder_layers // stages
    parts = tuple(
        Stage((r,), 1, "both", (r * tall, r * tall + tall) if tall else None, (r * layers, r * layers + layers))
        for r in range(stages)
    )
    plan = schedule("orca", spec, stages=parts, cluster=parse_cluster("4xA40"), kv_blocks=200)
    table = roofline_profile(spec, plan.cluster) if spec.encoder_layers else profile(spec)
    solo = batch_one_times(ReplicaCost.of(plan, table), *zip(*LENGTHS, strict=True))
    for (tokens, output), prefill, total in zip(LENGTHS, solo.prefill, solo.total, strict=True):
        (alone,) = replay(plan, table, [RequestLengths(tokens, output)], timeline=False).served
        assert total == pytest.approx(alone.finish_s, rel=0.02)
        if not spec.encoder_layers:
            assert prefill == pytest.approx(alone.first_token_s, rel=0.01)
        assert 0 < prefill <= total
