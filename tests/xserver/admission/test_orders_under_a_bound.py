"""Orders under a latency bound: accepted requests may be passed in the queue, and are in time all the same."""

import pytest

from benchmarks.orders_under_a_bound import served
from xcore.orders import make_order
from xcore.orders.promised import Promised


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bound_s", [20.0, 40.0])
def test_accepted_requests_are_in_time_although_others_pass_them(bound_s):
    late, learned = served(Promised(make_order("learned")), bound_s, 700)
    _, first_come = served(make_order("fcfs"), bound_s, 700)
    assert late <= 0.01 * len(learned), "99% of the accepted ones"
    assert len(learned) > 0.9 * len(first_come), "and no fewer are accepted"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_order_alone_makes_many_late():
    late, latencies = served(make_order("learned"), 20.0, 800)
    assert late > 0.02 * len(latencies)


def test_few_requests_are_served_at_once_in_any_order():
    late, latencies = served(Promised(make_order("learned")), 20.0, 30, rate=2.0)
    assert not late and len(latencies) == 30
