"""Equal requests in step: by how much the time to first token falls where more of them are resident."""

from hypothesis import given, settings
from hypothesis import strategies as st

from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady import chunked, lockstep, orca
from xsimulator.steady.load import Load
from xsimulator.steady.outcome import ttft
from xsimulator.steady.scenario import Scenario

MODEL, H100 = builtin_model("llama-3.1-8b"), parse_cluster("1xH100-SXM")
COSTS = CostModel(MODEL, H100, roofline_profile(MODEL, H100), "bf16", watched=False)


def scenario(workload, variation=True):
    stages = uniform_stages(MODEL, H100, 1)
    return Scenario(COSTS.replica(stages), Load(workload, encoder_decoder=False), variation=variation)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(20, 3000),
    st.integers(2, 600),
    st.integers(64, 8192),
    st.integers(1, 60),
    st.integers(1, 60),
    st.booleans(),
)
def test_ttft_falls_by_its_slack_at_most(prompt, output, budget, few, more, variation):
    where = scenario(Workload.fixed(prompt, output), variation)
    slack = lockstep.ttft_slack(where)
    for outcome, most in ((chunked.outcome, budget), (orca.outcome, 1 + budget % 8)):
        first, second = (ttft(where, outcome(where, n, most), 0.99) for n in (few, few + more))
        assert second >= first * (1 - slack)


def test_ttft_nearly_halves_where_prompts_no_longer_share_iterations():
    """Two prompts of 2,048 tokens fit into 4,096, but not beside a decoding sequence."""
    where = scenario(Workload.fixed(2048, 256))
    two, three = (ttft(where, chunked.outcome(where, n, 4096), 0.99) for n in (2, 3))
    assert 1 - lockstep.ttft_slack(where) <= three / two < 0.55


def test_requests_that_differ_have_no_slack():
    assert lockstep.ttft_slack(scenario(task("S"))) == 0.0
