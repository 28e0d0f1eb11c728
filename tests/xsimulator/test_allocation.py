"""Layers to devices: contiguous, complete, even, and groups within a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exegpt.builtin_models import builtin_model
from exegpt.cluster import ClusterSpec, parse_cluster
from exegpt.errors import InputError
from xsimulator.allocation import tp_degrees, uniform_stages


@given(st.sampled_from(["gpt2", "opt-13b", "llama-3.1-8b", "gpt3-175b"]), st.integers(1, 4), st.integers(1, 8))
def test_every_degree_deals_all_layers_evenly(name, nodes, devices):
    model, one = builtin_model(name), parse_cluster("1xA40")
    cluster = ClusterSpec("any", nodes, devices, one.device, one.intra, one.inter)
    for tp in tp_degrees(model, cluster):
        stages = uniform_stages(model, cluster, tp)
        cuts = [s.decoder_layers for s in stages]
        assert [a for a, _ in cuts] == [0, *(b for _, b in cuts[:-1])]
        assert cuts[-1][1] == model.layers
        sizes = [b - a for a, b in cuts]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        assert sorted(d for s in stages for d in s.devices) == list(range(cluster.devices))
        assert all(s.devices[0] // devices == s.devices[-1] // devices for s in stages)


def test_a_degree_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="degree of 3"):
        uniform_stages(builtin_model("gpt2"), parse_cluster("4xA40"), 3)
