"""What iterations cost on a tensor-parallel group: parts against the stages' sums."""

import pytest

from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xprofiler.roofline import roofline_profile
from xsimulator.cost.group import Group
from xsimulator.cost.stage import StageCost

A40 = parse_cluster("4xA40")
OPT, T5 = builtin_model("opt-13b"), builtin_model("t5-3b")
PROFILES = {model.name: roofline_profile(model, A40, overhead_s=2e-3) for model in (OPT, T5)}


def group(model=OPT, tp=1):
    profile = PROFILES[model.name]
    return Group(profile.degree(tp), profile.overhead)


@pytest.mark.parametrize("model", [OPT, T5])
@pytest.mark.parametrize(("batch", "context"), [(1, 40), (17, 300.5), (64, 900)])
def test_decoding_is_what_the_event_simulator_counts(model, batch, context):
    cost = StageCost(group(model), model.layers, encoder_layers=model.encoder_layers)
    assert float(cost.decode(batch, context)) == pytest.approx(cost.step(None, batch, context))


def test_stages_share_out_the_whole_models_parts():
    """MicroBatching anywhere, the stages' seconds are the whole's and one engine's overhead more for each cut."""
    layer = group()
    stage = StageCost(layer, OPT.layers)
    cuts = [
        StageCost(layer, 13, last=False),
        StageCost(layer, 20, first=False, last=False),
        StageCost(layer, 7, first=False),
    ]
    for of, sequences in ((lambda c: c.encode_fixed(6, 128), 6), (lambda c: c.decode(9, 200.0), 9)):
        overhead = float(layer.overhead(sequences))
        assert sum(float(of(c)) for c in cuts) == pytest.approx(float(of(stage)) + 2 * overhead)


def test_an_encoder_decoders_prompts_go_through_its_encoders_and_give_decoders_their_keys_once():
    layer = group(T5)
    encoders = StageCost(layer, 0, last=False, encoder_layers=T5.encoder_layers)
    decoders = StageCost(layer, T5.layers, first=False)
    both = StageCost(layer, T5.layers, encoder_layers=T5.encoder_layers)
    separate = float(encoders.encode_fixed(4, 100)) + float(decoders.cross_projection(400))
    assert float(both.encode_fixed(4, 100)) == pytest.approx(separate)
    assert float(StageCost(group(OPT), OPT.layers).cross_projection(400)) == 0.0


def test_tables_read_beyond_their_grid_are_noted():
    inside, beyond, blind = group(), group(), group()
    blind.watched = False
    inside.decode(8, 200.0)
    for cost in (beyond, blind):
        cost.decode(1e7, 200.0)
    assert (inside.extrapolated, blind.extrapolated) == (set(), set())
    assert "decode_attention" in beyond.extrapolated
