"""The recorder keeps what was measured, through an interruption too."""

import itertools
from types import SimpleNamespace

import pytest

from xprofiler.recorder import Grid, Recorder
from xprofiler.timing import Timing, timed

GRID = Grid("rest", ("tokens", "past"), ((1, 2, 4), (0, 8)))


def record_all(recorder, limit=99):
    measured = []
    for number, at in enumerate(itertools.product(*GRID.points)):
        if number == limit:
            raise KeyboardInterrupt

        def measure(at=at):
            measured.append(at)
            return Timing(at[0] * 10.0 + at[1], 0.1)

        recorder.record(GRID.table, at, 0, measure)
    return measured


def test_the_table_holds_every_point_scaled_to_one_layer():
    recorder = Recorder()
    record_all(recorder)
    table = recorder.compiled(GRID, scale=2.0)
    assert float(table(4, 8)) == pytest.approx((40 + 8) / 2)
    assert table.spread == (0.1,) * 6


def test_an_interrupted_profile_goes_on_and_a_torn_line_is_measured_again(tmp_path):
    path = tmp_path / "points.jsonl"
    with pytest.raises(KeyboardInterrupt):
        record_all(Recorder(path), limit=3)
    path.write_text(path.read_text() + '{"table": "rest", "at": [2, 8], "sec')
    rest = record_all(Recorder(path))
    assert rest == [(2, 8), (4, 0), (4, 8)]
    assert record_all(Recorder(path)) == []


def test_progress_counts_every_point_and_forget_removes_the_file(tmp_path):
    points = []
    recorder = Recorder(tmp_path / "points.jsonl", points.append)
    record_all(recorder)
    assert points == ["rest"] * len(GRID)
    recorder.forget()
    assert not list(tmp_path.iterdir())


def test_timing_warms_up_and_repeats():
    calls = []
    timing = timed(lambda: calls.append(1), budget_s=10.0, least=2, most=5)
    assert len(calls) == 6
    assert timing.seconds >= 0


def test_something_is_done_before_every_call():
    """A layer whose weights are still in the caches since the call before is faster than it is in a run."""
    order = []
    timed(lambda: order.append("call"), budget_s=0.0, least=3, before=lambda: order.append("read"))
    assert order == ["read", "call"] * 4  # once to warm up
    order.clear()
    timed(lambda: order.append("call"), budget_s=0.0, least=3)
    assert order == ["call"] * 4


def test_of_a_job_the_median_rank_counts_and_rank_0_keeps_the_file(tmp_path):
    def others(mine, *kinds):
        """Four ranks: this one, one with no part in the point, and two more."""
        return [mine, None, Timing(9.0, 0.3), Timing(5.0, 0.2)] if isinstance(mine, Timing) else [mine]

    grid = Grid("send", ("bytes",), ((1,),))
    for rank in (0, 3):
        path = tmp_path / f"rank{rank}.jsonl"
        recorder = Recorder(path, ranks=SimpleNamespace(rank=rank, all=others))
        recorder.record("send", (1,), 0, lambda: Timing(1.0, 0.1))
        table = recorder.compiled(grid)
        assert (table.values, table.spread) == ((5.0,), (0.2,))
        assert path.exists() == (rank == 0)


def test_a_point_is_the_median_of_its_passes():
    grid = Grid("head", ("rows",), ((1,),))
    recorder = Recorder()
    for turn, seconds in enumerate((1.0, 9.0, 2.0)):
        recorder.record("head", (1,), turn, lambda seconds=seconds: Timing(seconds, 0.1))
    assert recorder.compiled(grid).values == (2.0,)
