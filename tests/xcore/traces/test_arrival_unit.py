"""Units of arrivals: from names, from numbers, or asked for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.columns import parse_columns
from xcore.errors import InputError
from xcore.traces import arrival_unit
from xcore.traces.arrival_unit import split_unit
from xcore.traces.trace import read_trace

MOONCAKE = {"input_length": 100, "output_length": 50}


def rows(directory, name, moments, columns=None, more=None):
    """(seconds of the last arrival, notes) of a trace with these arrivals in a column."""
    path, notes = directory / "t.jsonl", []
    lengths = {"input": 100, "output": 50} if more is None else more
    path.write_text("".join(json.dumps({name: at, **lengths}) + "\n" for at in moments))
    requests = read_trace(path, parse_columns(columns) if columns else None, notes.append)
    return max(request.arrival_s for request in requests), notes


def question(directory, name, moments, more=None):
    """The refusal of a trace whose unit is in doubt."""
    with pytest.raises(InputError) as error:
        rows(directory, name, moments, more=more)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        *(("arrival_time_ms", "ms"), ("arrival_us", "us"), ("arrival_time_ns", "ns"), ("timestamp_s", "s")),
        *(("arrivalTimeMs", "ms"), ("ARRIVAL_TIME_MS", "ms"), ("TimestampNS", "ns"), ("timestampms", "ms")),
        *(("Arrival (µs)", "us"), ("Arrival [ms]", "ms"), ("arrival_milliseconds", "ms"), ("arrival_in_sec", "s")),
        *(("arrived_at_nanos", "ns"), ("arrival_min", "min"), ("arrival_hours", "h"), ("arrival_days", "d")),
    ],
)
def test_a_units_name_in_a_column_decides(tmp_path, name, unit):
    last_s, notes = rows(tmp_path, name, [250, 300, 400])
    assert last_s == pytest.approx(150 * arrival_unit.UNITS[unit])
    assert len(notes) == 1 and f"are {arrival_unit.unit_text(unit)}, as the column's name says" in notes[0]


@pytest.mark.parametrize("name", ["arrivals", "timestamps", "status_arrival", "arrival", "arrivedAt", "us_east"])
def test_plurals_and_other_words_are_no_units(name):
    assert arrival_unit.split_unit(name)[1] is None


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
@pytest.mark.parametrize("year_s", [1_000_000_000, 1_700_000_000, 4_000_000_000])
def test_moments_of_this_century_have_the_unit_of_their_size(tmp_path, unit, scale, year_s):
    last_s, notes = rows(tmp_path, "timestamp", [year_s * scale + place * scale // 27 for place in range(60)])
    assert last_s == pytest.approx(59 / 27 if scale > 1 else 2, rel=1e-3)
    assert f"{arrival_unit.unit_text(unit)}, because its numbers are then dates from" in notes[0]
    assert notes[0].endswith(f"{27 if scale > 1 else 29.5} requests/s")


def test_microseconds_apart_are_read_to_the_microsecond(tmp_path):
    last_s, notes = rows(tmp_path, "timestamp", [1_700_000_000_000_000 + 37 * place for place in range(60)])
    assert last_s == pytest.approx(59 * 37e-6) and "in microseconds" in notes[0] and "27,000 requests/s" in notes[0]


def test_nanoseconds_of_an_epoch_keep_all_digits(tmp_path):
    moments = [1_700_000_000_000_000_000 + 37 * place for place in range(60)]
    for told in (moments, [str(moment) for moment in moments]):
        last_s, notes = rows(tmp_path, "timestamp", told)
        assert last_s == pytest.approx(59 * 37e-9, rel=1e-12) and "in nanoseconds" in notes[0]


def test_mooncakes_columns_with_fractions_of_seconds_are_in_seconds(tmp_path):
    hashed = {**MOONCAKE, "hash_ids": [1]}
    last_s, notes = rows(tmp_path, "timestamp", [0.05 * place for place in range(200)], more=hashed)
    assert last_s == pytest.approx(9.95) and "in seconds, because its numbers have fractions" in notes[-1]
    asked = question(tmp_path, "timestamp", list(range(200)), more=hashed)
    assert "1 requests/s if they are in seconds" in asked and "1,000 requests/s if they are in milliseconds" in asked


@pytest.mark.parametrize("gap", [5, 50, 3000])
def test_mooncake_is_in_milliseconds_without_its_hashes_too(tmp_path, gap):
    last_s, notes = rows(tmp_path, "timestamp", [gap * place for place in range(200)], more=MOONCAKE)
    assert last_s == pytest.approx(gap * 0.199)
    assert "in milliseconds, as in Mooncake's traces" in notes[-1]
    assert rows(tmp_path, "timestamp", [0, gap], more={**MOONCAKE, "hash_ids": [1]})[0] == pytest.approx(gap / 1000)


def test_bailian_and_burstgpt_are_in_seconds(tmp_path):
    bailian = {**MOONCAKE, "hash_ids": [1], "chat_id": 1, "parent_chat_id": -1, "turn": 1}
    assert rows(tmp_path, "timestamp", [0, 3000], more=bailian)[0] == 3000.0
    burst = {"Model": "A", "Request tokens": 5, "Response tokens": 6}
    assert rows(tmp_path, "Timestamp", [5, 45], more=burst)[0] == 40.0


def test_two_plausible_units_are_asked_with_both_rates(tmp_path):
    text = question(tmp_path, "timestamp", range(0, 10_000, 50))
    assert "one request every 50 s if they are in seconds (--columns arrival=timestamp:s)" in text
    assert "20 requests/s if they are in milliseconds (--columns arrival=timestamp:ms)" in text
    assert "micro" not in text and text.count("\n") == 0
    for option, last_s in (("timestamp:s", 9950.0), ("timestamp:ms", 9.95), ("timestamp:us", 9.95e-3)):
        read_s, notes = rows(tmp_path, "timestamp", range(0, 10_000, 50), f"arrival={option}")
        assert read_s == pytest.approx(last_s) and "as --columns says" in notes[0]
    assert rows(tmp_path, "timestamp", [0, 250, 500], "arrival_ms=timestamp")[0] == 0.5


def test_nanoseconds_without_a_name_are_asked(tmp_path):
    text = question(tmp_path, "arrival_time", range(0, 10**10, 5 * 10**7))
    assert "arrival_time:us" in text and "20 requests/s if they are in nanoseconds" in text


@pytest.mark.parametrize(
    "moments",
    [[0, 1, 2, 3], [0.0, 0.7, 12.25, 31.5], [0, 0, 0, 1, 1, 1, 2], [0.00001, 0.00003], [0, 59.5], [0, 0.25, 500.0]],
)
def test_usual_seconds_need_no_question(tmp_path, moments):
    last_s, notes = rows(tmp_path, "arrival", moments) if moments[-1] < 400 else (moments[-1], ["in seconds"])
    assert last_s == pytest.approx(moments[-1] - moments[0]) and "in seconds" in notes[0]


@pytest.mark.parametrize(
    ("column", "moments", "last_s"),
    [
        ("date", [20231116, 20231118], 2 * 86_400),
        ("date", [45246.5, 45247.0], 43_200),
        ("request_date", [45246, 45248], 2 * 86_400),
        ("date", [20231116181546, 20231116181600], 14),
        ("date", [1_700_000_000, 1_700_000_010], 10),
        ("timestamp", [45246.5, 45246.5 + 1e-5, 45246.5 + 2e-5], 1.728),
        ("timestamp", [20231116181546, 20231116181600], 14),
        ("timestamp", [20231116] * 5000 + [20231117] * 5000, 86_400),
    ],
)
def test_dates_as_numbers_are_dates_by_name_or_where_nothing_else_is_plausible(tmp_path, column, moments, last_s):
    read_s, _ = rows(tmp_path, column, moments, f"arrival={column}")
    assert read_s == pytest.approx(last_s, rel=1e-4)


@pytest.mark.parametrize("moments", [[20231116, 20231117, 20231118], [45246.5, 45246.51, 45246.52]])
def test_numbers_that_may_be_dates_or_seconds_are_asked(tmp_path, moments):
    text = question(tmp_path, "timestamp", moments)
    assert "arrival=timestamp:s)" in text and "dates (--columns arrival=timestamp:date)" in text
    assert rows(tmp_path, "timestamp", moments, "arrival=timestamp:date")[0] > 1000


def test_a_number_that_is_no_date_is_named(tmp_path):
    with pytest.raises(InputError, match="column 'timestamp': 20231350 is not a date"):
        rows(tmp_path, "timestamp", [20231116, 20231350], "arrival=timestamp:date")


@pytest.mark.parametrize(("name", "unit"), [("ts_ms", "ms"), ("request_time_stamp_us", "us"), ("createdAtNs", "ns")])
def test_a_hint_that_is_followed_leads_to_the_right_unit(tmp_path, name, unit):
    last_s, notes = rows(tmp_path, name, [0, 500, 1000])
    option = notes[0].rpartition("--columns ")[2]
    assert last_s == 0.0 and option == f"arrival={name}"
    assert rows(tmp_path, name, [0, 500, 1000], option)[0] == pytest.approx(1000 * arrival_unit.UNITS[unit])


def test_a_column_whose_name_has_a_colon_can_be_named(tmp_path):
    assert rows(tmp_path, "when:ms", [0, 500], "arrival=when:ms")[0] == 0.5
    with pytest.raises(InputError, match="no arrival column 'when:weeks', only"):
        rows(tmp_path, "when", [0, 500], "arrival=when:weeks")


@pytest.mark.parametrize("text", ["arrival=a,arrival=b", "arrival=a,arrival_ms=b", "input=a,input=b"])
def test_a_column_is_named_once(text):
    with pytest.raises(InputError, match="column twice"):
        parse_columns(text)


@given(
    unit=st.sampled_from(["s", "ms", "us", "ns"]),
    gaps=st.lists(st.floats(0.01, 10.0), min_size=2, max_size=60),
    begin_s=st.integers(1_000_000_000, 4_000_000_000),
)
def test_a_log_of_this_century_is_read_as_it_was_written(tmp_path_factory, unit, gaps, begin_s):
    scale, at, moments = round(1 / arrival_unit.UNITS[unit]), 0.0, []
    for gap in gaps:
        at += gap if unit != "s" else max(1.0, gap)
        moments.append(begin_s * scale + round(at * scale))
    chosen = arrival_unit.unit_of(moments, "timestamp", ["timestamp"], "t.csv")
    assert chosen.name == unit


def test_fractions_of_milliseconds_are_asked_where_seconds_are_no_likelier(tmp_path):
    """As `performance.now()` writes them: 20 requests/s, not one every 50 s."""
    text = question(tmp_path, "timestamp", [round(50.123 * i, 3) for i in range(40)])
    assert "arrival=timestamp:s)" in text and "arrival=timestamp:ms)" in text


@pytest.mark.parametrize("name", ["timestamp_ms_utc", "arrival_ms_since_epoch", "time_ms_gmt"])
def test_a_unit_before_a_clocks_name_counts(name):
    assert split_unit(name)[1] == "ms"
