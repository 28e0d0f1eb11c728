"""Numbers for people: three digits, thousands apart, never an exponent."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.quantity import count_text, figure_text, more_text, percent_text, signed_percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.0367, "0.0367"),
        (26.52, "26.5"),
        (99.96, "100"),
        (849.1, "849"),
        (1657.3, "1,660"),
        (10405.6, "10,400"),
        (3.6, "3.6"),
        (-0.00001234, "-0.0000123"),
        (9.89e14, "989,000,000,000,000"),
        (math.inf, "inf"),
    ],
)
def test_figures_have_three_digits_and_no_exponent(value, text):
    assert figure_text(value) == text


@given(st.floats(-1e15, 1e15), st.integers(1, 8))
def test_a_figure_reads_back_to_its_digits(value, digits):
    text = figure_text(value, digits)
    assert re.fullmatch(r"-?\d{1,3}(,\d{3})*(\.\d+)?", text)
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.5 * 10 ** (1 - digits) * 1.001, abs=1e-300)


def test_shares_errors_ratios_and_counts():
    assert [percent_text(v) for v in (None, 0.1432, 0.98512, 1.007, 7)] == ["–", "14.3%", "98.5%", "101%", "700%"]
    assert percent_text(1.0074, 4) == "100.7%"
    assert [signed_percent(v) for v in (None, 0.1234, -0.5, -101.79)] == ["–", "+12.3%", "-50.0%", "> 10x"]
    assert [more_text(v) for v in (1.11, 1.996, 2.0, 7.03)] == [
        "11% more",
        "100% more",
        "2 times as much",
        "7 times as much",
    ]
    assert [count_text(v) for v in (8.03e9, 56.3e6, 2345, 1.026e12)] == [
        "8.03 billion",
        "56.3 million",
        "2,345",
        "1.03 trillion",
    ]
