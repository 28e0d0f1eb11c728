"""The machine's rates beside a profile: scaling by them, and what a run prints of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xcore.small_specs import profile as a_profile
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Table
from xcore.specs.slowdown import Slowdown
from xprofiler import rates
from xprofiler.measure import padded
from xprofiler.timing import Timing
from xrunner.comm.ranks import Ranks
from xrunner.models import Shard, load_model
from xrunner.models.create import create_model

SPEC = ModelSpec("m", "llama", 2, 64, 4, 2, 16, 128, True, 300, 128)
PROFILE = a_profile(SPEC)
FACTORS = st.floats(0.2, 5.0)


def tables(profile):
    degree = profile.degree(1)
    layer = degree.decoder
    attention = {name: getattr(layer, f"{name}_attention") for name in ("encode", "chunk", "decode")}
    ends = {"embedding": degree.embedding, "head": degree.head, "overhead": profile.overhead}
    return ends | attention | {"rest": layer.rest}


@given(FACTORS)
def test_a_machine_that_is_slower_throughout_takes_as_many_times_as_long(factor):
    scaled = tables(rates.rescaled(PROFILE, SPEC, Slowdown(factor, factor, factor, factor)))
    for name, table in tables(PROFILE).items():
        assert scaled[name].values == pytest.approx([v * factor for v in table.values], rel=1e-9), name


def test_a_switch_of_model_takes_as_long_as_reading_its_weights():
    measured = replace(PROFILE, switch=Table(("bytes",), ((0.0, 64.0),), (0.0, 0.5)))
    assert rates.rescaled(measured, SPEC, Slowdown(read=3.0)).switch.values == (0.0, 1.5)
    assert rates.rescaled(PROFILE, SPEC, Slowdown(read=3.0)).switch is None


@given(st.tuples(FACTORS, FACTORS, FACTORS, FACTORS))
def test_every_point_changes_by_something_between_the_rates(factors):
    low, high = min(factors) * (1 - 1e-9), max(factors) * (1 + 1e-9)
    scaled = tables(rates.rescaled(PROFILE, SPEC, Slowdown(*factors)))
    for name, table in tables(PROFILE).items():
        assert all(low * v <= s <= high * v for v, s in zip(table.values, scaled[name].values, strict=True)), name


def test_few_rows_follow_the_memory_and_many_the_products():
    scaled = rates.rescaled(PROFILE, SPEC, Slowdown(compute=2.0))
    before, after = PROFILE.degree(1).decoder.rest, scaled.degree(1).decoder.rest
    ratios = [b / a for a, b in zip(before.values, after.values, strict=True)]
    assert ratios == sorted(ratios) and ratios[0] < 1.1 and ratios[-1] > 1.5
    assert scaled.provenance["scaled"].endswith(PROFILE.fingerprint)


def at(table, tokens):
    return [rates._measured(table, number) for number in tokens]


def test_each_part_is_timed_beside_its_table(tmp_path, monkeypatch):
    """Reading takes 3 times as long as in the profile, computing 4, attention 2 and the head 5 times."""
    create_model(tmp_path / "m", "llama", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=300, context=48)
    model = load_model(tmp_path / "m")
    profile = a_profile(model.spec)
    degree = profile.degree(1)
    layer = degree.decoder
    passes = [2 * 3.0 * layer.rest.at(n) for n in at(layer.rest, rates._READS)]
    passes += [2 * 4.0 * layer.rest.at(n) for n in at(layer.rest, rates._COMPUTES)]
    passes += [2.0 * layer.decode_attention.at(n, 48.0) for n in at(layer.decode_attention, rates._READS)]
    passes += [5.0 * degree.head.at(n) for n in at(degree.head, rates._READS)]
    seconds = iter(passes)
    warmed_up = []

    def timed(call, least, most, device, before, untimed, warm_ups):
        assert least == most
        warmed_up.append(warm_ups)
        before()
        call()
        return Timing(next(seconds), 0.0)

    monkeypatch.setattr(rates, "timed", timed)
    assert rates.measured_slowdown(profile, model, Ranks()).factors == pytest.approx((4.0, 3.0, 5.0, 2.0))
    assert warmed_up == [rates._WARM_UPS] + [1] * (len(passes) - 1)


def test_all_ranks_of_a_group_sum_as_often(tmp_path):
    """Only one of them has the head, and the layers before it sum over all."""
    create_model(tmp_path / "m", "llama", layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=300, context=48)
    sums = []
    for rank, head in ((0, True), (1, False)):
        sums.append(0)

        def all_reduce(partial):
            sums[-1] += 1
            return partial

        model = load_model(tmp_path / "m", shard=Shard(rank, 2, all_reduce), head=head)
        profile = a_profile(model.spec)
        profile = replace(profile, degrees=(*profile.degrees, replace(profile.degree(1), tp=2)))
        rates._Present(profile, model).ratios()
    assert sums[0] == sums[1] > 0


def test_a_padded_pass_is_timed_at_the_rows_that_it_computes():
    rest = Table(("tokens",), ((16.0, 64.0, 256.0),), (1.0, 2.0, 5.0), (0.0, 0.0, 0.0))
    assert [rates._measured(table, 200) for table in (rest, padded(rest, 256), padded(rest, 64))] == [200, 256, 200]
    assert [rates._measured(rest, tokens) for tokens in (16, 300)] == [16, 256]


def test_this_machine_is_measured(tmp_path):
    create_model(tmp_path / "m", "t5", layers=2, hidden=32, heads=2, ffn=64, vocab=300, context=48)
    model = load_model(tmp_path / "m")
    slowdown = rates.measured_slowdown(a_profile(model.spec), model, Ranks())
    assert min(slowdown.factors) > 0


def test_a_small_grid_is_not_followed_beyond_its_end():
    """Of a tiny model: a line through two noisy points falls below 0 seconds long before 260 tokens."""
    degree = PROFILE.degree(1)
    falling = Table(("tokens",), ((1.0, 16.0),), (2e-4, 1e-4))
    assert falling.at(260.0) <= 0
    small = replace(PROFILE, degrees=(replace(degree, decoder=replace(degree.decoder, rest=falling)),))
    scaled = rates.rescaled(small, SPEC, Slowdown(2.0, 2.0, 2.0)).degree(1).decoder.rest
    assert scaled.values == pytest.approx([4e-4, 2e-4])
