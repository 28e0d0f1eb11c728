"""A profile as a model of a cost table: what it says at the ends of the lines, and near it between them."""

import pytest

from tests.public_data import needs_data
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import find_engine
from xcore.specs.schedule import Stage
from xmulti.stages.line_costs import line_costs
from xmulti.stages.profiled_costs import profiled_model
from xprofiler.roofline import roofline_profile
from xprofiler.samullm_costs import samullm_costs
from xsimulator.cost.cost_model import CostModel

CLUSTER = parse_cluster("8xA100-80GB", 0.9)


def profiled(name, load_s):
    spec = builtin_model(name)
    profile = roofline_profile(spec, CLUSTER, engine=find_engine("vllm"))
    return spec, profile, profiled_model(name, spec, CLUSTER, profile, load_s)


def test_iterations_cost_what_the_profile_says():
    spec, profile, model = profiled("llama-2-13b", {1: 20.0, 2: 30.0})
    assert [(degree.tp, degree.load_s) for degree in model.degrees] == [(1, 20.0), (2, 30.0)]
    for degree in model.degrees:
        layers = Stage(tuple(range(degree.tp)), degree.tp, "both", None, (0, spec.layers))
        (stage,) = CostModel(spec, CLUSTER, profile, profile.dtype).replica((layers,)).stage_costs
        costs = line_costs(degree, padded=False)
        for batch in (1, 16, 128):
            assert costs.decode_s([16] * batch) == pytest.approx(float(stage.decode(batch, 16.0)), rel=1e-6)
            assert costs.decode_s([150] * batch) == pytest.approx(float(stage.decode(batch, 150.0)), rel=0.05)
            assert costs.prefill_s([1] * batch) == pytest.approx(float(stage.encode_fixed(batch, 1)), rel=1e-6)


def test_a_model_that_fits_on_no_degree_is_refused():
    with pytest.raises(InputError, match="does not fit on 1 of the devices"):
        profiled("llama-2-70b", {1: 30.0})
    _, _, model = profiled("llama-2-70b", {1: 30.0, 2: 60.0})
    assert [degree.tp for degree in model.degrees] == [2]


def test_the_roofline_is_near_what_was_timed():
    """Llama-2-13B's sizes are vicuna-13b's: SamuLLM timed those on the same GPU."""
    timed = samullm_costs(needs_data("samullm")).model("vicuna-13b-v1.5")
    _, _, model = profiled("llama-2-13b", {1: 20.0, 2: 30.0})
    for tp in (1, 2):
        roofline, measured = (line_costs(of_one.degree(tp)) for of_one in (model, timed))
        for batch in (1, 16, 64, 256, 512):
            ratio = roofline.decode_s([100] * batch) / measured.decode_s([100] * batch)
            assert 0.75 < ratio < 1.05
        assert roofline.blocks == pytest.approx(measured.blocks, rel=0.05)
