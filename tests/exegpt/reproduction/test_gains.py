"""Figures 6 and 8: one scenario through the command, and all of them within the ranges that the paper's means set."""

import pytest

from exegpt.reproduction import gains
from exegpt.reproduction.setup import Reached
from tests.exegpt.cli.conftest import run_command


@pytest.mark.slow
def test_one_scenario_through_the_command(tmp_path):
    page = tmp_path / "figure6.html"
    done = run_command(
        *("reproduce", "figure6", "--model", "opt-13b", "--workload", "S", "--report", page, "--json"),
    )
    assert done.code == 0, done.err
    answer = done.json
    assert answer["reproduces"] == "figure6" and answer["provenance"]["exegpt"]
    rows = answer["rows"]
    assert [row["bound_s"] is None for row in rows] == [False, False, False, True]
    for row in rows:
        rates = [row[name]["throughput_seq_s"] for name in ("rra", "waa")]
        assert row["gain"] == pytest.approx(max(rates) / row["ft"]["throughput_seq_s"])
        assert row["gain"] > 1 and row["today"]["throughput_seq_s"] >= max(rates)
        if row["bound_s"]:
            assert all(row[name]["latency_s"] <= row["bound_s"] for name in ("ft", "rra", "waa", "today"))
    (summary,) = answer["summaries"]
    assert summary["mean"] == pytest.approx(sum(row["gain"] for row in rows) / 4)
    assert summary["paper"] == {}  # its means are over all scenarios
    assert page.read_text().count("<rect") > 12


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (("--model", "gpt2"), "figure6 has no model 'gpt2': its models are t5-11b, opt-13b, gpt3-39b, gpt3-101b."),
        (("--workload", "G"), "figure6 has no task 'G': its tasks are S, T, C1."),
        (("--model", "gpt3-39b", "--workload", "C2"), "no model 'gpt3-39b' with task 'C2'"),
    ],
)
def test_scenarios_that_the_figure_does_not_have(scenario, message):
    done = run_command("reproduce", "figure6", *scenario)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err


def row(task, bound_s, rra, waa, counts=True):
    def reached(rate):
        return Reached(rate, 1.0, "") if rate else None

    best = max(rra, waa if counts else 0.0)
    ft = Reached(2.0, 1.0, "")
    return gains.GainsRow(
        *("figure6", "m", "c", task, bound_s, ft, reached(rra), reached(waa), counts),
        *(best / 2, max(rra, waa) / 2, reached(2 * max(rra, waa)), 2.0),
    )


def test_a_summary_counts_what_the_paper_counts():
    rows = [row("S", 1.0, 4.0, 6.0), row("S", None, 9.0, 8.0), row("T", 1.0, 5.0, 0.0), row("T", 2.0, 2.0, 3.0, False)]
    summary = gains.summary("figure6", rows, {"mean": 2.0})
    assert summary.mean == pytest.approx((3 + 4.5 + 2.5 + 1) / 4)
    assert (summary.largest, summary.smallest, summary.mean_unbounded) == (4.5, 1.0, 4.5)
    assert summary.mean_with_waa == pytest.approx((3 + 4.5 + 2.5 + 1.5) / 4)
    assert summary.waa_ahead == {"S": 1.0, "T": 0.0}  # finite bounds, where the paper ran WAA
    *_, section = gains.sections(gains.Gains(tuple(rows), (summary,)))
    assert section.rows[0] == ("mean gain over FT", "2.75", "2", "+37.5%")


@pytest.fixture(scope="module")
def all_rows():
    return gains.reproduce(("figure6", "figure8"))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two minutes per figure on two quiet cores
def test_mean_gains(all_rows):
    """The paper's 2.0, 3.2 and 2.9: in these ranges a build without a mistake comes out."""
    small, large, both = all_rows.summaries
    assert (small.pairs, large.pairs, both.pairs) == (48, 48, 96)
    assert 1.8 < small.mean < 3.0
    assert 2.2 < large.mean < 3.6
    assert 2.2 < both.mean < 3.2
    assert small.smallest > 1 and large.smallest > 1


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two minutes per figure on two quiet cores
def test_waa_wins_on_short_outputs_and_rra_on_long_ones(all_rows):
    small, large, _ = all_rows.summaries
    assert small.waa_ahead["S"] > 0.5 and small.waa_ahead["C1"] > 0.5
    assert small.waa_ahead["T"] < 0.5 and large.waa_ahead["G"] < 0.5


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two minutes per figure on two quiet cores
def test_todays_search_is_never_below_the_papers(all_rows):
    assert all(row.today_over_paper >= 1 - 1e-9 for row in all_rows.rows)
    assert all_rows.summaries[-1].today_mean > 1
