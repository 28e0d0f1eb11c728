"""What iterations cost on a tensor-parallel group: expectations against Monte Carlo, parts against the stages' sums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exegpt.builtin_models import builtin_model
from exegpt.cluster import parse_cluster
from exegpt.workload import LengthDistribution, task
from xprofiler.roofline import roofline_profile
from xsimulator.cost.group import Group, thinned, token_totals
from xsimulator.cost.stage import Chunks, StageCost

A40 = parse_cluster("4xA40")
OPT, T5 = builtin_model("opt-13b"), builtin_model("t5-3b")
PROFILES = {model.name: roofline_profile(model, A40, overhead_s=2e-3) for model in (OPT, T5)}


def group(model=OPT, tp=1):
    profile = PROFILES[model.name]
    return Group(profile.degree(tp), profile.overhead)


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
    totals, p = token_totals(batch, distribution)
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
    one = group(model)
    cost = StageCost(one, model.layers, encoder_layers=model.encoder_layers)
    drawn = distribution.sample(batch * 600, np.random.default_rng(1)).reshape(600, batch)
    seconds = [cost.step(Chunks(row.tolist(), [0] * batch, batch), 0, 0.0) for row in drawn]
    assert float(cost.encode(batch, distribution)) == pytest.approx(np.mean(seconds), rel=0.03)


@pytest.mark.parametrize("model", [OPT, T5])
@pytest.mark.parametrize(("batch", "context"), [(1, 40), (17, 300.5), (64, 900)])
def test_decoding_is_what_the_event_simulator_counts(model, batch, context):
    cost = StageCost(group(model), model.layers, encoder_layers=model.encoder_layers)
    assert float(cost.decode(batch, context)) == pytest.approx(cost.step(None, batch, context))


@pytest.mark.parametrize("parts", [1, 2, 5, 16])
def test_micro_batches_have_the_mean_that_is_expected_and_rise(parts):
    one, distribution = group(), task("S").input
    cost = StageCost(one, OPT.layers)
    seconds = cost.of(one.encode_parts(4, distribution, parts))
    assert seconds.shape == (parts,)
    assert seconds.mean() == pytest.approx(float(cost.encode(4, distribution)))
    assert (np.diff(seconds) >= 0).all()


def test_stages_share_out_the_whole_models_parts():
    """MicroBatching anywhere, the stages' seconds are the whole's and one engine's overhead more for each cut."""
    one, distribution = group(), task("T").input
    whole = StageCost(one, OPT.layers)
    cuts = [StageCost(one, 13, last=False), StageCost(one, 20, first=False, last=False), StageCost(one, 7, first=False)]
    for of, sequences in ((lambda c: c.encode(6, distribution), 6), (lambda c: c.decode(9, 200.0), 9)):
        overhead = float(one.overhead(sequences))
        assert sum(float(of(c)) for c in cuts) == pytest.approx(float(of(whole)) + 2 * overhead)


def test_an_encoder_decoders_prompts_go_through_its_encoders_and_give_decoders_their_keys_once():
    one, distribution = group(T5), LengthDistribution.fixed(100)
    encoders = StageCost(one, 0, last=False, encoder_layers=T5.encoder_layers)
    decoders = StageCost(one, T5.layers, first=False)
    both = StageCost(one, T5.layers, encoder_layers=T5.encoder_layers)
    separate = float(encoders.encode(4, distribution)) + float(decoders.cross_projection(400))
    assert float(both.encode(4, distribution)) == pytest.approx(separate)
    assert float(StageCost(group(OPT), OPT.layers).cross_projection(400)) == 0.0


def test_it_notes_which_tables_are_asked_beyond_their_grid():
    inside, beyond, blind = group(), group(), group()
    blind.watched = False
    inside.decode(8, 200.0)
    for one in (beyond, blind):
        one.decode(1e7, 200.0)
    assert (inside.extrapolated, blind.extrapolated) == (set(), set())
    assert "decode_attention" in beyond.extrapolated
