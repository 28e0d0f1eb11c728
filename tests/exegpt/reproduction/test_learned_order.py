"""vLLM-LTR's sweep at a rate without a queue and at one beyond saturation."""

import pytest

from exegpt.reproduction import prompts_at_once
from exegpt.reproduction.learned_order import (
    GIVING_WAY,
    LEARNED,
    WAYS,
    YIELDING,
    reproduce,
    requests_at,
    requests_at_once,
    sections,
)
from exegpt.reproduction.prompts_at_once import Answers, PromptsAtOnce, answers_of
from xcore.specs.request_times import RequestTimes


@pytest.fixture(scope="module")
def sweep():
    return reproduce(rates=(2.0, 64.0), prompts=2_000)


@pytest.mark.slow
def test_the_learned_order_lies_between_first_come_and_the_oracle(sweep):
    calm, busy = sweep.rates
    means = [own.mean_s for own in calm.latencies.values()]
    assert means == pytest.approx([calm.latencies["FCFS"].mean_s] * len(means)), "nobody waits"
    per_token = {way: busy.latencies[way].per_token_s for way in WAYS}
    assert per_token["SJF oracle"] < per_token[LEARNED[1]] < per_token[LEARNED[0]] < per_token["classifier"]
    assert per_token["classifier"] < per_token["FCFS"]
    assert sweep.between


@pytest.mark.slow
def test_it_is_twice_as_good_per_token_at_saturation(sweep):
    """In the mean of latencies themselves not even the oracle is."""
    assert all(sweep.gains["per_token_s"][way] > 2.0 for way in LEARNED)
    assert 1.4 < sweep.gains["mean_s"][LEARNED[0]] < sweep.gains["mean_s"]["SJF oracle"] < 2.0


@pytest.mark.slow
def test_giving_way_helps_most_by_swap(sweep):
    for way in YIELDING:
        none, recompute, swap = (sweep.giving_way[way][preempt] for preempt in GIVING_WAY)
        assert not none.preemptions and recompute.preemptions and swap.preemptions
        assert swap.latencies.per_token_s < recompute.latencies.per_token_s < none.latencies.per_token_s
        assert swap.latencies.mean_s < none.latencies.mean_s


@pytest.mark.slow
def test_what_is_printed_says_whether_targets_are_met(sweep):
    first, second, third, yielding, _ = sections(sweep)
    assert len(yielding.rows) == len(YIELDING) * len(GIVING_WAY) and yielding.rows[0][:3] == (LEARNED[0], "none", "0")
    assert "(target 2: met)" in first.notes[0] and "everywhere" in first.notes[1]
    assert "(target 2: missed)" in second.notes[0] and not third.notes
    assert [row[0] for row in first.rows] == ["2", "64"] and len(first.columns) == 2 + len(WAYS)


def test_requests_are_those_of_a_minute():
    rows = requests_at(32.0)
    assert 32 * 60 * 0.9 < len(rows) < 32 * 60 * 1.1 and all(0 < row.arrival_s < 60 for row in rows)
    mean = sum(row.output for row in rows) / len(rows)
    assert 270 < mean < 350 and max(row.output for row in rows) <= 2048


@pytest.mark.slow
def test_the_first_answers_come_sooner_by_rank_and_the_last_no_later(sweep):
    first_come, *others = (sweep.at_once.answers[way] for way in prompts_at_once.METHODS)
    assert all(sweep.at_once.gain(way) > 1.5 for way in prompts_at_once.METHODS[1:])
    assert max(own.all_s for own in others) < 1.1 * first_come.all_s, "all answers take about as long in any order"


def test_answers_are_counted_up_to_the_limit_and_up_to_the_wanted():
    ends = (4.0, 1.0, 3.0, 2.0)
    served = [RequestTimes(i, 5, 10 + i, 0.0, 0.0, 0.5, end) for i, end in enumerate(ends)]
    assert answers_of(served, wanted=2, limit_s=3.0) == Answers(3, 11 + 12 + 13, 2.0, 4.0)


def test_the_table_of_synthetic_data_compares_with_the_published_gain():
    result = PromptsAtOnce(4, 2, {"FCFS": Answers(3, 300, 6.0, 8.0), "SJF oracle": Answers(4, 400, 2.0, 8.0)})
    table = prompts_at_once.section(result)
    assert table.rows[1] == ("SJF oracle", "4", "1", "2", "3.00", "8") and "6.5 times" in table.notes[0]


def test_prompts_at_once_have_the_lengths_of_the_sweep():
    rows = requests_at_once(3_000)
    assert {row.arrival_s for row in rows} == {0.0}
    assert 270 < sum(row.output for row in rows) / len(rows) < 350
