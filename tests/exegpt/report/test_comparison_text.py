"""What is printed of a run beside its prediction."""

from dataclasses import replace

from exegpt.report.comparison_text import bound_text, speed_text
from tests.xcore.small_specs import schedule
from xcore.console.comparison import Comparison
from xcore.specs.estimate import Estimate
from xcore.specs.slowdown import Slowdown
from xcore.specs.timeline import Timeline


def _comparison(measured, replayed, steady, bound=10.0):
    figures = Estimate(1.0, 10.0, *[None] * 7)
    latencies = (replace(figures, latency_s=seconds) for seconds in (measured, replayed, steady))
    plan = replace(schedule("orca"), latency_bound_s=bound)
    return Comparison(plan, *latencies, (), (), 1.0, Timeline("measured", ()), Timeline("simulated", ()))


def test_line_22_a_bounds_text_names_the_prediction_it_was_checked_against():
    text = bound_text(_comparison(9.0, 9.4, 9.8), "steady state")
    assert "checked against the steady state (steady state 9.8 s, replay of these requests 9.4 s)" in text
    assert text.endswith("orca meets it: measured 9 s, 10.0% below.")
    assert "10.0% longer than the replay predicted" in bound_text(_comparison(10.2, 9.18, 9.0), "replay")
    assert "its replay misses it too" in bound_text(_comparison(10.2, 10.1, 9.0), "steady state")
    assert bound_text(_comparison(10.2, 10.1, 9.0, None), "steady state") == ""


def test_a_change_of_speed_is_printed_beyond_three_percent():
    assert speed_text(Slowdown(1.02, 0.98, 1.01)) == ""
    text = "computing takes 1.10 times as long, reading weights 1.00 times as long, the head 1.00 times"
    assert text in speed_text(Slowdown(compute=1.1))
    assert "the head 1.20 times as long, attention 0.90" in speed_text(Slowdown(stream=1.2, attention=0.9))
