"""What iterations take on all stages of a side: the compiled decoding against the sum of a group's parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.profile import DegreeTables, LayerTables, Profile, Table
from xcore.specs.workload import task
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import Layout, both_stages, layer_speeds
from xsimulator.cost.cost_model import CostModel

A40 = parse_cluster("4xA40")
LAYOUTS = [Layout(4), Layout(4, 4, 4), Layout(4, 2, 2), Layout(1)]


def side(model, layout, profile=None, watched=False):
    model = builtin_model(model)
    profile = profile or roofline_profile(model, A40, overhead_s=2e-3)
    workload = task("S")
    stages = both_stages(model, layer_speeds(workload, profile), layout)
    return CostModel(model, A40, profile, "fp16", watched).replica(stages).decode


@pytest.mark.parametrize("model", ["opt-13b", "t5-3b"])
@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
def test_decoding_is_the_sum_of_its_parts(model, layout, data):
    costs = side(model, layout)
    batches = st.floats(0.1, 5000)
    shape = data.draw(st.sampled_from([(), (1,), (3,), (2, 3)]))
    size = int(np.prod(shape))
    batch = np.array(data.draw(st.lists(batches, min_size=size, max_size=size))).reshape(shape)
    context = np.array(data.draw(st.lists(st.floats(1, 9000), min_size=size, max_size=size))).reshape(shape)
    seconds = costs.decode(batch, context)
    assert seconds.shape == (*shape, len(costs.stages))
    np.testing.assert_allclose(seconds, costs.each(lambda group: group.decode(batch, context)), rtol=1e-9)


def test_one_batch_at_many_contexts():
    costs = side("opt-13b", Layout(4))
    contexts = np.linspace(1, 3000, 7)
    np.testing.assert_array_equal(costs.decode(12.5, contexts), costs.decode(np.full(7, 12.5), contexts))


def test_tables_of_one_point_are_constant():
    flat = Table(("tokens",), ((1.0,),), (0.5,))
    layer = LayerTables(
        Table(("tokens",), ((1.0, 2.0),), (1.0, 3.0)),
        Table(("batch", "length"), ((1.0,), (1.0,)), (0.0,)),
        Table(("chunk", "past"), ((1.0,), (0.0,)), (0.0,)),
        Table(("batch", "context"), ((1.0,), (10.0, 20.0)), (0.0, 1.0)),
    )
    nothing = Table(("bytes",), ((1.0,),), (0.0,))
    degree = DegreeTables(1, layer, flat, flat)
    profile = Profile(1, "measured", "", "fp16", "A40", (degree,), flat, nothing, nothing)
    layers = builtin_model("opt-13b").layers
    decode = side("opt-13b", Layout(1), profile).decode(4.0, 15.0)
    assert decode == pytest.approx([layers * (7.0 + 0.5) + 3 * 0.5])


def test_a_watched_side_notes_what_lies_outside_the_tables():
    costs = side("opt-13b", Layout(1), watched=True)
    plain = side("opt-13b", Layout(1))
    np.testing.assert_allclose(costs.decode(1e7, 200.0), plain.decode(1e7, 200.0), rtol=1e-9)
    assert "decode_attention" in costs.costs[0].group.extrapolated
    assert not plain.costs[0].group.extrapolated
