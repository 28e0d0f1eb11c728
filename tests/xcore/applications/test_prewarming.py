"""The knob K: an earlier begin, more latency saved and more waste as it falls; the printed equation the other way."""

import itertools
import json
import random

from hypothesis import given
from hypothesis import strategies as st

from tests.public_data import needs_data
from xcore.applications.prewarming import Effect, effect, expected_effect, prewarm_at

KNOBS = [k / 10 for k in range(1, 10)]
SECONDS = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30)


def golden():
    """Completions of a docker-like call: 2 to 12 s, the mean 5, 2.2 s to start."""
    drawn = random.Random(0)
    return [2 + min(10.0, drawn.expovariate(1 / 3)) for _ in range(500)]


def test_the_published_trade_off_in_direction():
    """Hermes' Fig. 14: latency saved and waste fall as K rises."""
    effects = [expected_effect(golden(), 1.0, knob, 2.2) for knob in KNOBS]
    for part in (0, 1):
        values = [e[part] for e in effects]
        assert values == sorted(values, reverse=True) and values[0] > 2 * values[-1]
    assert [round(x, 3) for e in (effects[0], effects[-1]) for x in e] == [2.187, 2.762, 0.33, 0.172]


def test_the_published_series_fall_alike():
    for name, series in json.loads(needs_data("hermes", "trade_off.json").read_text()).items():
        for values in series.values():
            assert values == sorted(values, reverse=True), name


@given(SECONDS, st.floats(0.05, 1.0), st.floats(0.0, 20.0))
def test_saved_latency_and_waste_never_rise_with_the_knob(seconds, probability, warm_up_s):
    effects = [expected_effect(seconds, probability, knob, warm_up_s) for knob in KNOBS]
    for earlier, later in itertools.pairwise(effects):
        assert later.saved_s <= earlier.saved_s + 1e-9 and later.wasted_s <= earlier.wasted_s + 1e-9


@given(SECONDS, st.floats(0.0, 20.0))
def test_the_equation_as_printed_begins_later_for_a_smaller_knob(seconds, warm_up_s):
    begins = [prewarm_at(seconds, 0.0, 1.0, knob, warm_up_s, literal_eq3=True) for knob in KNOBS]
    assert begins == sorted(begins, reverse=True)


def test_the_gate_and_the_quantile():
    seconds = [float(s) for s in range(1, 101)]
    assert prewarm_at(seconds, 0.0, 0.4, 0.5, 5.0) is None  # p_s < K
    assert prewarm_at(seconds, 0.0, 0.5, 0.5, 5.0) == 95.0  # the last completion, warm by then
    assert prewarm_at(seconds, 0.0, 1.0, 0.5, 5.0) == 45.0
    assert prewarm_at(seconds, 0.0, 1.0, 0.1, 50.0) == 0.0  # at once
    assert prewarm_at(seconds, 0.0, 1.0, 0.5, 5.0, literal_eq3=True) == 45.0
    assert prewarm_at(seconds, 0.0, 1.0, 0.9, 5.0, literal_eq3=True) == 5.0


def test_it_is_conditioned_on_what_has_passed():
    seconds = [1.0] * 90 + [50.0] * 10
    assert prewarm_at(seconds, 0.0, 1.0, 0.5, 0.5) == 0.5
    assert prewarm_at(seconds, 2.0, 1.0, 0.5, 0.5) == 49.5  # it is a long one
    assert prewarm_at(seconds, 60.0, 1.0, 0.5, 0.5) == 60.0  # beyond all samples


def test_what_a_warm_up_brings():
    assert effect(3.0, 2.0, 10.0, used=True) == Effect(2.0, 5.0)
    assert effect(9.0, 2.0, 10.0, used=True) == Effect(1.0, 0.0)
    assert effect(3.0, 2.0, 10.0, used=False) == Effect(0.0, 5.0)
