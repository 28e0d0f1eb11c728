"""Times to first token of an encoder-decoder, whose first token comes from an iteration after the prefill."""

import numpy as np
import pytest

from tests.xcore.small_specs import schedule
from tests.xsimulator.steady.test_few_residents import replayed
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import task
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xsimulator import estimate

T5, A40 = builtin_model("t5-11b"), parse_cluster("1xA40")


@pytest.mark.parametrize(("residents", "prefills"), [(4, 1), (8, 1), (16, 1), (16, 4), (32, 4)])
def test_an_encoder_decoders_first_iteration_has_others_prompts_or_none(residents, prefills):
    """The mean of the two kinds of iterations would leave out a fifth of the tail."""
    profile, workload = roofline_profile(T5, A40), task("S")
    fields = {"cluster": A40, "stages": uniform_stages(T5, A40, 1), "kv_blocks": 10**6}
    plan = schedule("orca", T5, workload, **fields, max_num_seqs=residents, prefills_per_step=prefills)
    times, *_ = replayed(plan, profile, workload.draw(4000, seed=1))
    estimated = estimate(plan, profile)
    assert estimated.ttft_s == pytest.approx(times["ttft"].mean(), rel=0.05)
    assert estimated.ttft_p99_s == pytest.approx(np.percentile(times["ttft"], 99), rel=0.08)
    assert estimated.latency_p99_s == pytest.approx(np.percentile(times["latency"], 99), rel=0.1)
