"""Seconds to encode prompts whose lengths vary: expectations against draws, by the event simulator's costs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import LengthDistribution, task
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xsimulator.cost.cost_model import CostModel
from xsimulator.cost.group import Group
from xsimulator.cost.stage import Chunks, StageCost
from xsimulator.steady.prompts import Prompts, thinned

A40 = parse_cluster("4xA40")
OPT, T5 = builtin_model("opt-13b"), builtin_model("t5-3b")
PROFILES = {model.name: roofline_profile(model, A40, overhead_s=2e-3) for model in (OPT, T5)}


def group(model=OPT):
    profile = PROFILES[model.name]
    return Group(profile.degree(1), profile.overhead)


distributions = st.lists(
    st.tuples(st.integers(1, 900), st.floats(0.01, 1)), min_size=1, max_size=200, unique_by=lambda x: x[0]
)


def distribution_of(pairs):
    lengths, weights = zip(*sorted(pairs), strict=True)
    return LengthDistribution(lengths, tuple(w / sum(weights) for w in weights))


@given(distributions, st.integers(1, 80))
def test_a_thinned_distribution_keeps_mass_and_mean(pairs, most):
    distribution = distribution_of(pairs)
    s, p = thinned(distribution, most)
    assert len(s) <= max(most, 1)
    assert p.sum() == pytest.approx(1)
    assert s @ p == pytest.approx(distribution.mean)
    assert (np.diff(s) > 0).all()


@given(distributions, st.integers(1, 40))
def test_totals_have_the_sums_mean_and_no_more_than_its_deviation(pairs, batch):
    distribution = distribution_of(pairs)
    totals, p = Prompts(distribution).tokens(batch)
    assert totals @ p == pytest.approx(batch * distribution.mean)
    deviation = float(np.sqrt(p @ (totals - batch * distribution.mean) ** 2))
    assert deviation <= distribution.std * batch**0.5 * (1 + 1e-9)
    if len(distribution.s) <= 24:
        assert deviation == pytest.approx(distribution.std * batch**0.5, abs=1e-6)


@pytest.mark.parametrize("model", [OPT, T5])
@pytest.mark.parametrize(("name", "batch"), [("S", 1), ("S", 3), ("C2", 1), ("T", 40)])
def test_expected_encoding_is_the_mean_over_drawn_batches(model, name, batch):
    """Each drawn batch costs what the event simulator makes of it."""
    distribution = task(name).input
    layers, prompts = group(model), Prompts(distribution)
    cost = StageCost(layers, model.layers, encoder_layers=model.encoder_layers)
    drawn = distribution.sample(batch * 600, np.random.default_rng(1)).reshape(600, batch)
    seconds = [cost.step(Chunks(row.tolist(), [0] * batch, batch), 0, 0.0) for row in drawn]
    assert float(cost.of(prompts.encode(layers, batch))) == pytest.approx(np.mean(seconds), rel=0.03)


@pytest.mark.parametrize("parts", [1, 2, 5, 16])
def test_micro_batches_have_the_mean_that_is_expected_and_rise(parts):
    layers, prompts = group(), Prompts(task("S").input)
    cost = StageCost(layers, OPT.layers)
    seconds = cost.of(prompts.micro_batches(layers, 4, parts))
    assert seconds.shape == (parts,)
    assert seconds.mean() == pytest.approx(float(cost.of(prompts.encode(layers, 4))))
    assert (np.diff(seconds) >= 0).all()


@pytest.mark.parametrize("batch", [1, 2, 4, 32])
def test_a_batchs_seconds_vary_as_drawn_ones_do(batch):
    side = CostModel(OPT, A40, PROFILES[OPT.name], "fp16").replica(uniform_stages(OPT, A40, 4)).encode
    (stage,), lengths = side.costs, task("S").input
    draws = lengths.sample(4000 * batch, np.random.default_rng(0)).reshape(4000, batch)
    seconds = [stage.step(Chunks(row.tolist(), [0] * batch, batch), 0, 0.0) for row in draws]
    deviation = Prompts(lengths).deviation(side, batch)
    assert deviation == pytest.approx(np.std(seconds), rel=0.35 if batch == 1 else 0.1)
