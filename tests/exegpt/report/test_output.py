"""What commands print while they work."""

import json

import pytest

from xcore.console import output


@pytest.fixture
def clock(monkeypatch):
    """A list of one number, the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def work(clock, seconds):
    with output.progress("searching policies") as progress:
        for done in range(1, 5):
            clock[0] += seconds
            progress(done, 4)


def test_progress_is_a_line_now_and_then_where_standard_error_is_no_terminal(clock, capsys):
    work(clock, output.LINE_EVERY_S / 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["searching policies: 2 of 4, 10 s", "searching policies: 4 of 4, 20 s"]


def test_short_work_prints_no_progress(clock, capsys):
    work(clock, output.LINE_EVERY_S / 5)
    assert capsys.readouterr().err == ""


def test_progress_is_json_where_notes_are(clock, capsys, monkeypatch):
    monkeypatch.setenv(output.LOG_FORMAT, "json")
    work(clock, output.LINE_EVERY_S)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["event"], line["done"], line["total"]) for line in lines] == [("progress", n, 4) for n in range(1, 5)]
