"""What requests' times come to: latencies, the bound's sequence, the window between ramp-up and drain."""

import numpy as np
import pytest

from xcore.specs.bound import ALL_REQUESTS, PAPER_BOUND, BoundMeaning
from xcore.specs.request_times import RequestTimes, percentiles, steady_tokens_s, summarise


def served(n=100, seconds_per_token=0.1, together=10):
    """`n` requests of 1..n output tokens; batches of `together` start one second apart."""
    return [
        RequestTimes(
            i, 5, i + 1, 0.0, float(i // together), i // together + 0.5, i // together + 0.5 + i * seconds_per_token
        )
        for i in range(n)
    ]


def test_the_bounds_latency_is_about_the_longest_answers_or_about_all_requests():
    requests = served()
    longest = [s.finish_s - s.start_s for s in requests if s.output_tokens >= np.percentile(range(1, 101), 98)]
    assert summarise(requests, 20.0, PAPER_BOUND).latency_s == pytest.approx(np.percentile(longest, 95))
    every = [s.finish_s - s.start_s for s in requests]
    assert summarise(requests, 20.0, ALL_REQUESTS).latency_s == pytest.approx(np.percentile(every, 99))
    half = BoundMeaning(percentile=50.0)
    assert summarise(requests, 20.0, half).latency_s == pytest.approx(np.median(every))
    assert summarise(requests, 20.0, half).ttft_bounded_s == pytest.approx(0.5)


def test_time_per_output_token_leaves_out_requests_of_one_token():
    estimate = summarise(served(), 20.0)
    assert estimate.tpot_s == pytest.approx(0.1)
    assert estimate.ttft_s == pytest.approx(0.5)
    assert estimate.throughput_seq_s == pytest.approx(5.0)
    assert estimate.throughput_tok_s == pytest.approx(5050 / 20)
    assert estimate.latency_from == "start"


def test_latencies_count_from_arrival_where_requests_arrive_over_time():
    requests = [RequestTimes(0, 1, 2, 0.0, 1.0, 2.0, 3.0), RequestTimes(1, 1, 2, 1.0, 3.0, 4.0, 5.0)]
    estimate = summarise(requests, 5.0)
    assert estimate.latency_from == "arrival"
    assert estimate.latency_p50_s == pytest.approx(3.5)


def test_no_requests_have_no_latencies():
    assert summarise([], 1.0).latency_s is None
    assert percentiles([]) == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
    assert steady_tokens_s([]) is None


def test_the_steady_window_counts_tokens_between_ramp_up_and_drain():
    # one request starts every second and gives 10 tokens evenly over 9 seconds: 10 tokens a second once 10 are resident
    requests = [RequestTimes(i, 1, 10, 0.0, float(i), float(i), i + 9.0) for i in range(100)]
    assert steady_tokens_s(requests) == pytest.approx(10.0, rel=0.02)
    assert steady_tokens_s(requests[:5]) is None  # the last one starts before the first has left
    two_batches = [RequestTimes(0, 8, 4, 0.0, 0.0, 0.5, 2.0), RequestTimes(1, 8, 4, 0.0, 2.1, 2.5, 4.0)]
    assert steady_tokens_s(two_batches) is None
