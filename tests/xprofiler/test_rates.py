"""The machine's rates beside a profile: scaling by them, and what a run says of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exegpt.document import from_dict, to_dict
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.profile import Profile, Rates
from tests.exegpt.nouns import profile as a_profile
from xprofiler import rates
from xrunner.ranks import Ranks

SPEC = ModelSpec("m", "llama", 2, 64, 4, 2, 16, 128, True, 300, 128)
THEN = Rates(2e11, 2e10)
PROFILE = replace(a_profile(SPEC), rates=THEN)
FACTORS = st.floats(0.2, 5.0)


def tables(profile):
    degree = profile.degree(1)
    layer = degree.decoder
    attention = {name: getattr(layer, f"{name}_attention") for name in ("encode", "chunk", "decode")}
    ends = {"embedding": degree.embedding, "head": degree.head, "overhead": profile.overhead}
    return ends | attention | {"rest": layer.rest}


@given(FACTORS)
def test_a_machine_that_is_slower_throughout_takes_as_many_times_as_long(factor):
    now = Rates(THEN.flops_s / factor, THEN.bandwidth_bytes_s / factor)
    scaled = tables(rates.rescaled(PROFILE, SPEC, now))
    for name, table in tables(PROFILE).items():
        assert scaled[name].values == pytest.approx([v * factor for v in table.values], rel=1e-9), name


@given(FACTORS, FACTORS)
def test_every_point_changes_by_something_between_the_two_rates(compute, read):
    now = Rates(THEN.flops_s / compute, THEN.bandwidth_bytes_s / read)
    low, high = min(compute, read) * (1 - 1e-9), max(compute, read) * (1 + 1e-9)
    scaled = tables(rates.rescaled(PROFILE, SPEC, now))
    for name, table in tables(PROFILE).items():
        assert all(low * v <= s <= high * v for v, s in zip(table.values, scaled[name].values, strict=True)), name


def test_few_rows_follow_the_memory_and_many_the_products():
    scaled = rates.rescaled(PROFILE, SPEC, Rates(THEN.flops_s / 2, THEN.bandwidth_bytes_s))
    before, after = PROFILE.degree(1).decoder.rest, scaled.degree(1).decoder.rest
    ratios = [b / a for a, b in zip(before.values, after.values, strict=True)]
    # A row's FLOPs per byte of weights are a half: ten times fewer than the rates' ratio of ten.
    assert ratios == sorted(ratios) and ratios[0] < 1.1 and ratios[-1] > 1.5
    assert scaled.provenance["scaled"].endswith(PROFILE.fingerprint) and scaled.rates.flops_s == THEN.flops_s / 2


def test_a_profile_without_rates_stays_as_it_is():
    old = replace(PROFILE, rates=None)
    assert rates.rescaled(old, SPEC, THEN) is old and rates.slowdown(old, THEN) == (1.0, 1.0)
    assert all(from_dict(Profile, to_dict(one), "it") == one for one in (PROFILE, old))
    with pytest.raises(InputError, match="must be positive"):
        Rates(0.0, 1.0)


def test_this_machines_rates_are_measured(monkeypatch):
    monkeypatch.setattr(rates, "_WINDOW_S", 0.0)
    now = rates.measured_rates(Ranks(), "fp32")
    assert now.flops_s > 1e8 and now.bandwidth_bytes_s > 1e7
