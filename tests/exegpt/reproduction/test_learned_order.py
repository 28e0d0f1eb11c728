"""vLLM-LTR's sweep at a rate without a queue and at one beyond saturation."""

import pytest

from exegpt.reproduction.learned_order import LEARNED, WAYS, reproduce, requests_at, sections


@pytest.fixture(scope="module")
def sweep():
    return reproduce(rates=(2.0, 64.0))


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
    """In the mean of latencies themselves not even the oracle is, without preemption of residents."""
    assert all(sweep.gains["per_token_s"][way] > 2.0 for way in LEARNED)
    assert 1.4 < sweep.gains["mean_s"][LEARNED[0]] < sweep.gains["mean_s"]["SJF oracle"] < 2.0


@pytest.mark.slow
def test_what_is_printed_says_whether_targets_are_met(sweep):
    first, second, third = sections(sweep)
    assert "(target 2: met)" in first.notes[0] and "everywhere" in first.notes[1]
    assert "(target 2: missed)" in second.notes[0] and not third.notes
    assert [row[0] for row in first.rows] == ["2", "64"] and len(first.columns) == 2 + len(WAYS)


def test_requests_are_those_of_a_minute():
    rows = requests_at(32.0)
    assert 32 * 60 * 0.9 < len(rows) < 32 * 60 * 1.1 and all(0 < row.arrival_s < 60 for row in rows)
    mean = sum(row.output for row in rows) / len(rows)
    assert 270 < mean < 350 and max(row.output for row in rows) <= 2048
