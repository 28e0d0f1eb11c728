"""What makes a run invalid."""

from dataclasses import replace

import pytest

from exegpt.loadtest.measurements import RequestBounds, measure
from exegpt.loadtest.open_loop import Sent
from exegpt.loadtest.request_outcome import NO_DONE, RequestOutcome


def outcome(index: int, lag_s: float = 0.0, **changes) -> RequestOutcome:
    usual = RequestOutcome(index, 8, 5, 5, 1.0, 1.0, 1.0, lag_s, 2.0, 4.0, 200, "length", None, None, 0, 5, True)
    return replace(usual, **changes)


@pytest.mark.parametrize(
    ("late", "cpu_share", "rate", "warnings"),
    [
        (0, 0.04, 5.0, []),
        (3, 0.04, 5.0, ["sent at least 12 ms late"]),
        (1, 0.04, 5.0, []),  # one of 200 is beyond the 99th percentile
        (3, 0.06, 5.0, ["sent at least 12 ms late", "6% of the CPU time of 4 cores"]),
        (200, 0.04, float("inf"), []),
    ],
)
def test_a_slow_client_is_said(late, cpu_share, rate, warnings):
    sent = Sent(tuple(outcome(i, 0.012 if i < late else 0.001) for i in range(200)), cpu_share, 4, 1)
    run = measure(sent, rate, RequestBounds())
    assert len(run.warnings) == len(warnings) and run.valid == (not warnings)
    assert all(part in text for part, text in zip(warnings, run.warnings, strict=True))


def test_goodput_is_of_requests_within_all_bounds():
    """TTFT 1 s, TPOT 0.5 s, latency 3 s."""
    outcomes = (outcome(0), outcome(1, first_token_s=3.5), outcome(2, finish_s=9.0), outcome(3, error="closed"))
    for bounds, within in (
        (RequestBounds(latency_s=3.0), 2),
        (RequestBounds(ttft_s=1.0), 2),
        (RequestBounds(tpot_s=0.5), 2),
        (RequestBounds(latency_s=3.0, ttft_s=1.0), 1),
        (RequestBounds(latency_s=2.9), 0),
        (RequestBounds(latency_s=100.0), 3),
    ):
        run = measure(Sent(outcomes, 0.0, 1, 1), 1.0, bounds)
        assert run.within_bounds == within / 4 and run.goodput_seq_s == pytest.approx(within / 9.0)
    single = outcome(0, output_tokens=1)  # it has no time per token
    assert measure(Sent((single,), 0.0, 1, 1), 1.0, RequestBounds(tpot_s=1e-9)).within_bounds == 1.0


def test_answers_in_one_chunk_have_no_time_per_token():
    """Nor are they within a bound on it; where there are no others, nothing is judged."""
    coarse, single = outcome(0, chunks=1, finish_s=2.0), outcome(1, output_tokens=1, chunks=1)
    run = measure(Sent((coarse, coarse), 0.0, 1, 1), 1.0, RequestBounds(tpot_s=1e-3))
    assert run.completed == run.in_one_chunk == 2 and set(run.tpot.values()) == {None}
    assert run.within_bounds is run.goodput_seq_s is None
    mixed = measure(Sent((coarse, outcome(2)), 0.0, 1, 1), 1.0, RequestBounds(tpot_s=1.0))
    assert (mixed.within_bounds, mixed.in_one_chunk, mixed.tpot["mean"]) == (0.5, 1, pytest.approx(0.5))
    assert measure(Sent((coarse,), 0.0, 1, 1), 1.0, RequestBounds(latency_s=5.0)).within_bounds == 1.0
    assert measure(Sent((single,), 0.0, 1, 1), 1.0, RequestBounds()).in_one_chunk == 0


def test_streams_without_done_fail_where_others_of_the_endpoint_have_it():
    """A client that leaves early waits for none."""
    sent = Sent((outcome(0, done=False), outcome(1, done=None), outcome(2, error="closed", done=False)), 0.0, 1, 1)
    assert not sent.has_done and measure(sent, 1.0, RequestBounds()).without_done == 1
    required = sent.requiring_done()
    assert [o.error for o in required.outcomes] == [NO_DONE, None, "closed"]
    assert Sent((outcome(0),), 0.0, 1, 1).has_done
