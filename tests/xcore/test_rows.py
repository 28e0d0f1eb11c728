"""Rows of files: odd columns, odd values and odd bytes, each read or named."""

import contextlib
import datetime
import decimal
import re

import pytest

from xcore.errors import InputError
from xcore.specs.workload import RequestLengths
from xcore.traces.trace import form_of, read_labels, read_trace

NANOSECONDS = [1_700_158_546_680_590_100 + place * 10**9 for place in range(3)]


def parquet(directory, **columns):
    """A Parquet file with these columns beside two of lengths."""
    import pyarrow
    from pyarrow import parquet as files

    count = len(next(iter(columns.values())))
    path = directory / "t.parquet"
    table = pyarrow.table({"input": [5] * count, "output": [7] * count} | columns)
    files.write_table(table, path, version="2.6")
    return path


def arrays():
    """Columns that Python's own types can't hold, or that nothing here can read."""
    import pyarrow as pa

    return {
        "nanoseconds": pa.array(NANOSECONDS, pa.timestamp("ns")),
        "durations": pa.array([1, 2, 3], pa.duration("ns")),
        "a zone that is unknown": pa.array([1, 2, 3], pa.timestamp("us", "Mars/Olympus")),
        "an offset": pa.array([1, 2, 3], pa.timestamp("us", "+25:61")),
        "year 300000": pa.array([9_403_862_400_000_000] * 3, pa.timestamp("us")).cast("int64").view(pa.timestamp("ms")),
        "not UTF-8": pa.array([b"\xff", b"a", b"b"]).view(pa.string()),
        "lists": pa.array([[1], [2, 3], []]),
        "groups": pa.array([{"a": {"b": 1}}] * 3),
    }


@pytest.mark.parametrize("name", arrays())
def test_columns_that_nothing_needs_are_not_read(tmp_path, name):
    path = parquet(tmp_path, odd=arrays()[name], **{"a.b": [1, 2, 3]})
    assert read_trace(path) == [RequestLengths(5, 7)] * 3


@pytest.mark.parametrize("name", ["nanoseconds", "durations", "a zone that is unknown", "an offset"])
def test_moments_of_any_unit_and_zone_are_arrivals(tmp_path, name):
    column, notes = arrays()[name], []
    unit_s = {"ns": 1e-9, "us": 1e-6}[column.type.unit]
    rows = read_trace(parquet(tmp_path, arrival=column), note=notes.append)
    step = 1.0 if name == "nanoseconds" else unit_s
    assert [row.arrival_s for row in rows] == [0, step, 2 * step]
    assert "'arrival': " in notes[0]


def test_days_and_encoded_values_are_read(tmp_path):
    import pyarrow as pa

    days = pa.array([datetime.date(2024, 5, 1), datetime.date(2024, 5, 2)])
    rows = read_trace(parquet(tmp_path, arrival=days))
    assert [row.arrival_s for row in rows] == [0, 86_400]
    assert [row.arrival_s for row in read_trace(parquet(tmp_path, arrival=days.cast(pa.date64())))] == [0, 86_400]
    text = pa.array(["2024-05-01T00:00:00.5", "2024-05-01T00:00:01"]).dictionary_encode()
    assert [row.arrival_s for row in read_trace(parquet(tmp_path, timestamp=text))] == [0, 0.5]
    exact = pa.array([decimal.Decimal("1.50"), decimal.Decimal("2.75")])
    assert [row.arrival_s for row in read_trace(parquet(tmp_path, arrival=exact))] == [0, 1.25]


@pytest.mark.parametrize(
    ("column", "name", "sentence"),
    [
        ("arrival", "year 300000", "row 1, column 'arrival': its date is not in the years 1 to 9999"),
        ("arrival", "not UTF-8", "row 1, column 'arrival': its value of type string can't be read"),
        ("arrival", "lists", "row 1, column 'arrival': [1] is not an arrival"),
        ("arrival", "groups", "is not an arrival"),
        ("client", "not UTF-8", "row 1, column 'client': its value of type string can't be read"),
    ],
)
def test_a_needed_value_that_cannot_be_read_is_named_with_its_row(tmp_path, column, name, sentence):
    path = parquet(tmp_path, **{column: arrays()[name]})
    with pytest.raises(InputError, match=re.escape(sentence)):
        read_labels(path)


def test_a_missing_value_is_named_with_its_row(tmp_path):
    import pyarrow as pa

    path = parquet(tmp_path, arrival=pa.array([1, None, 3], pa.timestamp("ns")))
    with pytest.raises(InputError, match="row 2, column 'arrival': None is not an arrival"):
        read_trace(path)
    path = parquet(tmp_path, ISL=[1, 2], output=[None, 3])
    with pytest.raises(InputError, match="row 1, column 'output': the value is missing"):
        read_trace(path)


def test_torn_parquet_files_are_refused_wherever_they_are_torn(tmp_path):
    content = parquet(tmp_path, text=["x" * 50, "y" * 50, "z" * 50]).read_bytes()
    path = tmp_path / "torn.parquet"
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place])
        with pytest.raises(InputError, match="is not a readable Parquet file"):
            read_trace(path)
        flipped = bytes(byte ^ 0xFF for byte in content[place : place + 3])
        path.write_bytes(content[:place] + flipped + content[place + 3 :])
        with contextlib.suppress(InputError):  # what isn't in the needed columns changes nothing
            read_trace(path)


@pytest.mark.parametrize("name", ["UP.CSV", "Up.Tsv", "t.JSONL", "t.Parquet"])
def test_names_may_end_in_capital_letters(tmp_path, name):
    path = tmp_path / name
    if form_of(path) == ".parquet":
        parquet(tmp_path, x=[1]).rename(path)
    elif form_of(path) == ".jsonl":
        path.write_text('{"input": 5, "output": 7}\n')
    else:
        path.write_text("input,output\n5,7\n")
    assert read_trace(path) == [RequestLengths(5, 7)]


@pytest.mark.parametrize("size", [131_073, 300_000])
def test_long_fields_are_read(tmp_path, size):
    path = tmp_path / "t.csv"
    path.write_text(f'input,prompt,output\n5,"{"word, " * (size // 6)}",7\n6,"two\nlines",8\n')
    assert read_trace(path) == [RequestLengths(5, 7), RequestLengths(6, 8)]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("input,output\n1,1\n".encode("utf-16"), "is in UTF-16: save it in UTF-8"),
        ("input,output\n1,1\n".encode("utf-16-le"), "has a zero byte"),
        (b"input,output\n1,1\n\0,1\n", "row 3: it has a zero byte"),
        (b"\x1f\x8b\x08\x00\xff\xff", "is compressed: unpack it"),
        (b"PK\x03\x04\xff\xff", "is compressed or a spreadsheet: unpack it, or save it as CSV"),
        (b'input,prompt,output\n1,"never closed,2\n1,x,2\n', "row 3: it is not CSV (unexpected end of data)"),
        (b'input,output\n"1"x,2\n', "row 2: it is not CSV"),
        (b"input,output\n1,\xff\n", "is not in UTF-8"),
    ],
)
def test_what_is_no_csv_is_named(tmp_path, content, sentence):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(sentence)):
        read_trace(path)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_line_ends_and_byte_order_marks_change_nothing(tmp_path, ending):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + ending.join(["input,output", "5,7", "", "6,8", ""]).encode())
    assert read_trace(path) == [RequestLengths(5, 7), RequestLengths(6, 8)]


@pytest.mark.parametrize("digits", [400, 4000, 5000])
def test_whole_numbers_of_any_length_are_refused(tmp_path, digits):
    path = tmp_path / "t.jsonl"
    for column in ("input", "output", "arrival", "deadline_s"):
        path.write_text(f'{{"input": 1, "output": 1, "{column}": {"9" * digits}}}\n')
        with pytest.raises(InputError, match="row 1"):
            read_labels(path)


def test_compressed_names_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "t.csv.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(InputError, match=r"decompress \.gz"):
        read_trace(tmp_path / "t.csv.gz")


def test_a_duration_that_is_no_deadline_is_shown_with_its_unit(tmp_path):
    import pyarrow as pa

    path = parquet(tmp_path, deadline_s=pa.array([1_500_000_000], pa.duration("ns")))
    with pytest.raises(InputError, match="column 'deadline_s': 1,500,000,000 ns is not a deadline: write the seconds"):
        read_labels(path)
