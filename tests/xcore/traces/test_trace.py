"""Traces in every form, and every way in which one can be wrong."""

import json
import math
import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore import columns
from xcore.errors import InputError
from xcore.specs.workload import RequestLengths
from xcore.traces import arrival_unit, trace


def write_csv(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("input", "output"), list(zip(columns.COLUMNS["input"], columns.COLUMNS["output"], strict=False))
)
def test_columns_are_recognized_by_name(tmp_path, input, output):
    path = write_csv(tmp_path / "t.csv", f"other,{output},{input}\nx,7,3\ny,9,4\n")
    assert trace.read_trace(path) == [RequestLengths(3, 7), RequestLengths(4, 9)]


@pytest.mark.parametrize("suffix", trace.SUFFIXES)
@given(lengths=st.lists(st.tuples(st.integers(1, 9999), st.integers(1, 9999)), min_size=1, max_size=5))
def test_all_forms_give_what_was_written(tmp_path_factory, suffix, lengths):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path_factory.mktemp("trace") / f"t{suffix}"
    if suffix in (".csv", ".tsv"):
        between = "," if suffix == ".csv" else "\t"
        write_csv(path, f"input{between}output\n" + "".join(f"{i}{between}{o}\n" for i, o in lengths))
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps({"input": i, "output": o}) + "\n" for i, o in lengths))
    else:
        parquet.write_table(pyarrow.table({"input": [i for i, _ in lengths], "output": [o for _, o in lengths]}), path)
    assert trace.read_trace(path) == [RequestLengths(i, o) for i, o in lengths]


def test_dates_become_seconds_since_the_earliest(tmp_path):
    text = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16T18:15:45.6805900Z,1,1
"""
    rows = trace.read_trace(write_csv(tmp_path / "azure.csv", text))
    assert [r.arrival_s for r in rows] == pytest.approx([1.0, 5.314579, 0.0], abs=1e-5)


@pytest.mark.parametrize(
    ("second", "after_s"),
    [
        *(("2023-11-16 18:00:00.000000137 UTC", 137e-9), ("2023-11-16 18:00:00,5", 0.5), ("2023-11-16T18:00:01Z", 1.0)),
        *(("20231116T180002.25Z", 2.25), ("2023-11-16T18:00:00.1000005+00:00", 0.1000005)),
    ],
)
def test_dates_keep_nanoseconds_and_other_ways_to_write_utc(tmp_path, second, after_s):
    path = write_csv(tmp_path / "t.csv", f'input,output,timestamp\n1,1,2023-11-16T18:00:00\n1,1,"{second}"\n')
    assert [r.arrival_s for r in trace.read_trace(path)] == pytest.approx([0.0, after_s], rel=1e-12)


def test_dates_without_a_zone_beside_another_zone_are_refused(tmp_path):
    text = "input,output,timestamp\n1,1,2023-11-16T18:00:00\n1,1,2023-11-16T20:00:01+02:00\n"
    with pytest.raises(InputError, match="1 of 2 dates have no time zone, and others are not in UTC"):
        trace.read_trace(write_csv(tmp_path / "t.csv", text))


@pytest.mark.parametrize("key", ["timestamp", "session_id", "prompt_tokens"])
def test_a_key_that_only_later_json_lines_have_is_named(tmp_path, key):
    lines = [{"input_tokens": 1, "output": 1}, {"input_tokens": 1, "output": 1, "other": 2}]
    path = write_csv(tmp_path / "t.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert len(trace.read_trace(path)) == 2
    write_csv(path, path.read_text() + json.dumps({**lines[0], key: 3}) + "\n")
    if key == "prompt_tokens":  # another name of a column that all rows have
        assert len(trace.read_trace(path)) == 3
        return
    with pytest.raises(InputError, match=f"row 3 has the key '{key}', which the first row lacks: write it in all rows"):
        trace.read_trace(path)


@pytest.mark.parametrize("name", [*columns.COLUMNS["arrival"], "TIMESTAMP", "Timestamp"])
def test_arrival_columns_are_recognized_by_name(tmp_path, name):
    unit_s = arrival_unit.UNITS.get(name.rpartition("_")[2], 1.0)
    rows = trace.read_trace(write_csv(tmp_path / "t.csv", f"input,output,{name}\n1,1,7\n1,1,9.5\n"))
    assert [r.arrival_s for r in rows] == [0.0, 2.5 * unit_s]
    rows = trace.read_trace(write_csv(tmp_path / "t.csv", f"input,output,{name}\n1,1,2024-05-01\n1,1,2024-05-02\n"))
    assert [r.arrival_s for r in rows] == [0.0, 86400.0]  # a date's unit is never in doubt


@pytest.mark.parametrize(
    "text",
    [
        "Input,Output,Arrival\n3,7,0\n4,9,1\n",
        " input , output , arrived at\n3,7,0\n4,9,1\n",
        "input;output;arrival\n3;7;0\n4;9;1\n",
        "Input Tokens\tOutput Tokens\tTimestamp\n3\t7\t0\n4\t9\t1\n",
        "isl,osl,Arrival (s)\n3,7,0\n4,9,1\n",
    ],
)
def test_spelling_and_separators_are_no_obstacle(tmp_path, text):
    assert trace.read_trace(write_csv(tmp_path / "t.csv", text)) == [RequestLengths(3, 7), RequestLengths(4, 9, 1.0)]


def test_requests_without_an_output_are_left_out_and_counted(tmp_path):
    """BurstGPT's failures."""
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,A,4,2,6\n6,A,4,0,4\n7,A,3,1,4\n"
    notes = []
    rows = trace.read_trace(write_csv(tmp_path / "t.csv", text), note=notes.append)
    assert rows == [RequestLengths(4, 2), RequestLengths(3, 1, 2.0)]
    assert notes[0] == f"'{tmp_path / 't.csv'}': 1 of 3 rows have no output and are left out"
    assert "column 'Timestamp' are in seconds, as in BurstGPT's traces: 0.5 requests/s" in notes[1]


@pytest.mark.parametrize("text", ["2048x256", "2048,256", "2048:256", "2048 256", "2048 x 256"])
def test_lengths_written_otherwise_are_shown_their_form(text):
    with pytest.raises(InputError, match="write fixed lengths as 2048/256"):
        trace.parse_workload(text)


@pytest.mark.parametrize(
    ("header", "patterns"),
    [
        ("input,output,Arrival", []),
        ("input,output,ts_ms", ["'ts_ms' is not used for arrivals; .* --columns arrival=ts_ms"]),
        ("input,output,arrives", ["'arrives' is not used for arrivals; .* --columns arrival=arrives"]),
        ("input,output,request_time_stamp", ["'request_time_stamp' is not used for arrivals"]),
        ("input,output,time", ["'time' is not used for arrivals"]),
        (
            "input,output,arrival,timestamp",
            ["'timestamp' is not used, because arrival is 'arrival'; --columns arrival=NAME"],
        ),
        ("input,output,input_token", ["'input_token' is not used, because input is 'input'"]),
        ("input,output,session_id,prefix_id,prefix_tokens", []),
        ("input,output,session_id,prefix_tokens", ["'prefix_tokens' is not used without a column 'prefix_id'"]),
        ("input,output,prefix_id", ["'prefix_id' is not used without a column 'prefix_tokens'"]),
        (
            "input,output,turn,cached_tokens",
            ["'turn' is not used: turns are replayed", "'cached_tokens' is not used: the cached tokens"],
        ),
        ("input,output,NumImages", ["'NumImages' is not used: images are not simulated"]),
        ("input,output,model,queued_ts,total", []),
    ],
)
def test_columns_that_look_as_if_they_mattered_are_named(tmp_path, header, patterns):
    notes = []
    trace.read_trace(write_csv(tmp_path / "t.csv", f"{header}\n{'1,' * header.count(',')}1\n"), note=notes.append)
    assert len(notes) == len(patterns)
    for text, pattern in zip(notes, patterns, strict=True):
        assert re.search(pattern, text), text


def test_seconds_are_made_relative(tmp_path):
    rows = trace.read_trace(write_csv(tmp_path / "t.csv", "arrival_s,input,output\n10,1,1\n12.5,1,1\n"))
    assert [r.arrival_s for r in rows] == [0.0, 2.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no input column .*only 'a', 'b'.*--columns"),
        ("input,b\n1,2\n", "no output column"),
        ("input,output\n", "no requests"),
        ("", "no requests"),
        ("input,output\n5,0\n", "no requests"),
        ("input,output\n5,-3\n", "row 2, column 'output': '-3'"),
        ("input,output\n5,3\n0,3\n", "row 3, column 'input': '0'"),
        ("input,output\n5,\n", "row 2, column 'output': ''"),
        ("input,output\n5\n", "row 2, column 'output': the value is missing"),
        ("input,output\nfive,3\n", "'five'"),
        ("input,output\n5,2.5\n", "'2.5'"),
        ("input,output\n5,nan\n", "'nan'"),
        ("input,output\n5,inf\n", "'inf'"),
        ("input,output\n5," + "9" * 5000 + "\n", "is not a length"),
        ("input,output\n5,99999999999\n", "'99999999999'"),
        ("arrival_s,input,output\nsoon,5,2\n", "'soon' is not an arrival"),
        (
            "arrival,input,output\n2020-01-01,5,2\n7,5,2\n",
            "column 'arrival': 1 arrivals are numbers, like 7, but 1 are",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        trace.read_trace(write_csv(tmp_path / "t.csv", text))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b'{"input": 1, "output": 2}\n{"inp', "row 2, is not valid JSON"),
        ("t.jsonl", b"[1, 2]\n", "row 1: .* not a JSON object"),
        ("t.jsonl", b'{"input": true, "output": 2}\n', "True is not a length"),
        ("t.jsonl", b"\xff\xfe", "is in UTF-16: save it in UTF-8"),
        ("t.csv", b"input,output\n\xff,2\n", r"not in UTF-8 .*: save it"),
        ("t.parquet", b"PAR1 not really", "not a readable Parquet"),
        ("t.txt", b"", "must end in"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        trace.read_trace(path)


def test_too_many_rows_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MAX_ROWS", 2)
    with pytest.raises(InputError, match="more than 2 rows"):
        trace.read_trace(write_csv(tmp_path / "t.csv", "input,output\n" + "1,1\n" * 3))


def test_workloads_are_tasks_lengths_and_files(tmp_path):
    assert trace.parse_workload("C1").p99_output == 137
    fixed = trace.parse_workload("2048/256", rate=3.0)
    assert (fixed.input.mean, fixed.output.mean, fixed.arrival_rate) == (2048, 256, 3.0)
    path = write_csv(tmp_path / "t.csv", "en,de\n1,2\n3,4\n")
    workload = trace.parse_workload(str(path), columns.parse_columns("input=en,output=de"))
    assert (workload.input.mean, workload.output.mean, workload.name) == (2.0, 3.0, "t.csv")


@pytest.mark.parametrize("text", ["X", "0/5", "5/0", "5", "missing.csv", ""])
def test_other_workloads_are_refused(text):
    with pytest.raises(InputError, match=re.escape(f"'{text}'")):
        trace.parse_workload(text)


@pytest.mark.parametrize("text", ["5", "0/s", "-1/s", "x/s", "5/h"])
def test_rates_need_a_number_and_a_unit(text):
    with pytest.raises(InputError, match="5/s"):
        trace.parse_rate(text)


def test_rates_are_per_second_or_minute():
    assert trace.parse_rate("5/s") == 5.0
    assert trace.parse_rate("90 / m") == 1.5


@pytest.mark.parametrize("text", ["foo=bar", "input", "input="])
def test_columns_need_a_name(text):
    with pytest.raises(InputError, match="input=NAME"):
        columns.parse_columns(text)


def test_poisson_arrivals_have_the_rate():
    rows = trace.with_poisson_arrivals([RequestLengths(1, 1)] * 20_000, rate=4.0, seed=0)
    gaps = np.diff([r.arrival_s for r in rows])
    assert rows[0].arrival_s == 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    assert not math.isclose(rows[1].arrival_s, rows[2].arrival_s)


@pytest.mark.parametrize("suffix", trace.SUFFIXES)
def test_a_pipe_is_no_trace(tmp_path, suffix):
    os.mkfifo(tmp_path / f"t{suffix}")
    with pytest.raises(InputError, match="a pipe or a device: name a trace file"):
        trace.read_trace(tmp_path / f"t{suffix}")


def test_numbers_of_thousands_of_digits_are_no_lengths_or_rates():
    for text, parse in (("9" * 5000 + "/1", trace.parse_workload), ("9" * 400 + "/s", trace.parse_rate)):
        with pytest.raises(InputError, match="is not a"):
            parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input,input,output\n12,13,20\n", "2 columns 'input': keep one"),
        ("input,output\n12,20\n10,20,30\n", "row 3: it has more values than the header's 2 columns"),
        ("input,output\n12,20\n10\n", "row 3, column 'output': the value is missing"),
    ],
)
def test_rows_and_columns_that_may_mean_two_things_are_refused(tmp_path, text, message):
    with pytest.raises(InputError, match=re.escape(message)):
        trace.read_trace(write_csv(tmp_path / "t.csv", text))


def test_an_empty_value_after_the_last_column_means_nothing(tmp_path):
    assert trace.read_trace(write_csv(tmp_path / "t.csv", "input,output\n12,20,\n")) == [RequestLengths(12, 20)]


def test_rows_name_their_models(tmp_path):
    text = "model,input_tokens,output,arrival_ms\nb,3,7,3000\na,4,9,500\nb,5,0,1\nb,6,1,1500\n"
    notes = []
    requests = trace.read_model_trace(write_csv(tmp_path / "t.csv", text), ["a", "b", "c"], note=notes.append)
    assert requests == {"b": [RequestLengths(3, 7, 2.5), RequestLengths(6, 1, 1.0)], "a": [RequestLengths(4, 9, 0.0)]}
    assert len(notes) == 2 and "1 of 4 rows have no output" in notes[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "model,input,output\nother,1,1\n",
            "row 2, column 'model': 'other' is not one of the models: write one of a, b",
        ),
        ("model,input,output\na,1,1\n,1,1\n", "row 3, column 'model': '' is not one of the models"),
        ("input,output\n1,1\n", "has no column 'model': add one that names the model of each row, one of a, b"),
        ("model,input,output\na,1,few\n", "row 2, column 'output': 'few' is not a length"),
        ("model,input,output\n", "has no requests"),
    ],
)
def test_a_row_of_no_model_is_refused(text, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        trace.read_model_trace(write_csv(tmp_path / "t.csv", text), ["b", "a"])


def test_arrivals_of_a_lifetime_are_refused(tmp_path):
    text = "input,output,arrival_s\n1,1,0\n1,1,1\n1,1,2\n1,1,{}\n"
    with pytest.raises(InputError, match=r"column 'arrival_s': .* span .* seconds, but at most 1,000,000,000"):
        trace.read_trace(write_csv(tmp_path / "t.csv", text.format("2e9")))
    assert len(trace.read_trace(write_csv(tmp_path / "t.csv", text.format("1e9")))) == 4
