"""Durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.duration import beyond_text, duration_text, format_duration, parse_delay, parse_duration, rounded_up
from xcore.errors import InputError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5), ("250ms", 0.25), ("2m", 120), (" 1.5 s ", 1.5), (".5s", 0.5), ("1h", 3600), ("INF", None)],
)
def test_durations_have_a_number_and_a_unit(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "0s", "0ms", "5 parsecs", "1e3s", "nan", "5s6"])
def test_others_are_refused_with_the_value(text):
    with pytest.raises(InputError, match=f"'{text}'"):
        parse_duration(text)


@given(st.floats(1e-3, 1e5))
def test_what_is_printed_can_be_read(seconds):
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.005)


@pytest.mark.parametrize(
    ("seconds", "digits", "text"),
    [
        (0.0874, 3, "87.4 ms"),
        (0.99951, 3, "1 s"),
        (9.634, 3, "9.63 s"),
        (99.96, 3, "100 s"),
        (1234.5, 3, "1,230 s"),
        (4.2e-6, 3, "4.2 µs"),
        (12.0961, 4, "12.1 s"),
        (137.26, 4, "137.3 s"),
    ],
)
def test_tables_have_a_time_in_the_unit_that_reads_best(seconds, digits, text):
    assert duration_text(seconds, digits) == text


@pytest.mark.parametrize(
    ("seconds", "limit", "text"),
    [
        (12.1004, 12, "12.1 s, over 12 s"),
        (10.00002, 10, "10.00002 s, over 10 s"),
        (0.0154, 0.001, "15.4 ms, over 1 ms"),
        (1.0, 1.0 - 1e-9, "1 s, over 999.999999 ms"),
    ],
)
def test_a_time_beyond_its_limit_prints_differently(seconds, limit, text):
    assert beyond_text(seconds, limit) == text


@pytest.mark.parametrize(
    ("seconds", "up"),
    [(3.352886, 3.36), (3.36, 3.36), (5.5, 5.5), (0.0123401, 0.0124), (137.0001, 138.0), (99.91, 100.0)],
)
def test_a_time_rounded_up_is_a_bound_that_can_be_met(seconds, up):
    assert rounded_up(seconds) == pytest.approx(up, rel=1e-12)


@pytest.mark.parametrize(("text", "seconds"), [("13ms", 13e-3), ("0s", 0.0), ("60s", 60.0), ("1m", 60.0)])
def test_a_delay_may_be_nothing_and_is_a_minute_at_most(text, seconds):
    assert parse_delay(text, "--front-end") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["61s", "inf", "-1ms", "7", ""])
def test_what_is_no_delay_is_refused_with_the_option(text):
    with pytest.raises(InputError, match=r"^--front-end .* is not a delay"):
        parse_delay(text, "--front-end")
