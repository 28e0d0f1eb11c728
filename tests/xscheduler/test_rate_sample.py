"""Arrivals: lengths as a replay has them, and which requests count for which bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.batching import deal
from xcore.errors import InputError
from xcore.specs.bound import ALL_REQUESTS, PAPER_BOUND
from xcore.specs.prefix_hit import found_tokens, with_prefix_hit
from xcore.specs.workload import LengthDistribution, RequestLengths, Workload, task
from xscheduler.rate_sample import EACH, Arrivals, at, may_miss

LENGTHS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=20)


def plain(outputs, random=False):
    """Requests of ten tokens and these outputs, a second apart."""
    outputs = np.array(outputs, dtype=np.float64)
    return Arrivals(np.full(len(outputs), 10.0), outputs, np.arange(float(len(outputs))), random)


@given(LENGTHS, st.one_of(st.none(), st.integers(2, 60)))
def test_lengths_fit_into_the_context_as_each_request_would(pairs, context):
    requests = [RequestLengths(*pair, float(second)) for second, pair in enumerate(pairs)]
    found = Arrivals.traced(Workload.from_requests("t", requests), context).requests(1.0)
    fitting = [request.clipped(context) if context else request for request in requests]
    assert [(r.input, r.output) for r in found] == [(r.input, r.output) for r in fitting]


@given(st.integers(1, 3000), st.sampled_from([0.95, 0.99]))
def test_no_fewer_than_none_may_miss(count, quantile):
    most = may_miss(count, quantile)
    assert 0 <= most < max(1, (1 - quantile) * count)
    assert most > (1 - quantile) * count - 2, "nor many fewer than the share"


def test_the_first_request_comes_at_once_and_alone_it_has_no_rate():
    found = Arrivals.poisson(task("S"), None, count=50)
    assert found.times[0] == 0.0 < found.times[1]
    (alone,) = found.requests(2.0, 1)
    assert alone.arrival_s == 0.0
    assert [r.arrival_s for r in found.requests(2.0, 11)][-1] == pytest.approx(5.0)


def test_a_workloads_own_requests_come_in_turn():
    """Over and over, at random times; other seeds give other times."""
    rows = [RequestLengths(7, 3), RequestLengths(5, 2), RequestLengths(9, 4)]
    found, other = (Arrivals.poisson(Workload.from_requests("t", rows), None, seed, count=7) for seed in (0, 1))
    assert found.inputs.tolist() == other.inputs.tolist() == [7, 5, 9, 7, 5, 9, 7]
    assert found.outputs.tolist() == [3, 2, 4, 3, 2, 4, 3]
    assert found.random and (found.times[1:] != other.times[1:]).all()


@pytest.mark.parametrize(("asked", "devices", "count"), [(100, 8, 100), (EACH, 8, 8 * EACH), (9 * EACH, 8, 9 * EACH)])
def test_every_device_may_be_a_replica_with_enough_requests_unless_few_were_asked_for(asked, devices, count):
    assert Arrivals.poisson(Workload.fixed(9, 9), None, devices=devices, count=asked).count == count


def test_requests_that_come_all_at_once_have_no_pattern():
    rows = [RequestLengths(5, 5, 3.0)] * 4
    with pytest.raises(InputError, match="The first 4 requests all arrive at the same time"):
        Arrivals.traced(Workload.from_requests("t", rows), None)


@pytest.mark.parametrize(("bound", "allowed"), [(ALL_REQUESTS, [8, 4, 8]), (PAPER_BOUND, [8, 4, 1])])
def test_those_after_the_first_tenth_count_for_the_bounds_that_are_about_them(bound, allowed):
    """A thousand requests, of which 490 that count have a token after their first, and 40 are the longest.

    Of n requests a percentile q, interpolated, may be missed by n - 2 - ⌊q (n - 1)⌋: of 900 by 8 and of 490 by 4, where
    q is 99 %, and by 1 of the 40 longest, where it is 95 %.
    """
    outputs = np.tile([1.0, 5.0], 500)
    outputs[-80::2] = 9.0
    outputs[:100] = 99.0  # the first ones would be the longest
    sample = plain(outputs).sample(1000, 1, bound)
    (requests,) = sample.replicas
    flags = np.full(1000, 1.0 if bound.of_length else 3.0)
    flags[:100] = 0.0
    flags[-80::2] = 3.0
    assert sample.count == 1000 and requests.flags.tolist() == flags.tolist()
    assert sample.allowed.tolist() == allowed


def test_a_few_of_many_replicas_are_followed_and_every_one_of_a_trace():
    """All replicas of random requests are alike; a trace's bursts come to different ones."""
    outputs = [5] * 60
    for replicas in (1, 2, 3):
        dealt = deal([(10, 5)] * 60, replicas)
        trace, chance = (plain(outputs, random).sample(60, replicas, ALL_REQUESTS) for random in (False, True))
        assert [r.arrivals.tolist() for r in trace.replicas] == [[float(i) for i in places] for places in dealt]
        assert trace.count == chance.count == 60
    few = plain(outputs, random=True).sample(20, 3, ALL_REQUESTS)
    assert [r.arrivals.tolist() for r in few.replicas] == [[float(i) for i in range(0, 60, 3)]]
    assert plain([5, 5]).sample(2, 3, ALL_REQUESTS).count == 2, "a replica without requests is not followed"


def test_a_sample_is_made_once():
    arrivals = plain([5] * 20)
    assert arrivals.sample(20, 1, ALL_REQUESTS) is arrivals.sample(20, 1, ALL_REQUESTS)
    assert arrivals.sample(10, 1, ALL_REQUESTS).count == 10


def test_a_rate_quickens_arrivals():
    (requests,) = plain([5] * 20).sample(20, 1, ALL_REQUESTS).replicas
    assert at(requests, 4.0).arrivals.tolist() == [i / 4 for i in range(20)]


def test_requests_that_find_a_share_have_it_of_one_text():
    lengths = LengthDistribution((10, 40, 100), (0.2, 0.3, 0.5)), LengthDistribution.fixed(7)
    workload = with_prefix_hit(Workload("w", *lengths, 7), 0.6)
    arrivals = Arrivals.poisson(workload, 90, count=500)
    assert arrivals.warm.tolist() == found_tokens(arrivals.inputs, 0.6).tolist() and arrivals.inputs.max() == 89
    assert arrivals.prefixes.found(arrivals.inputs, 16).tolist() == arrivals.warm.tolist()
    keys = [arrivals.prefixes.keys(i, int(tokens), 16) for i, tokens in enumerate(arrivals.inputs)]
    alike = [[key for key in own if key in keys[7]] for own in keys]
    assert [len(own) for i, own in enumerate(alike) if i != 7] == [
        min(tokens, arrivals.warm[7]) // 16 for i, tokens in enumerate(arrivals.warm) if i != 7
    ]
    computed = arrivals.computed(workload)
    assert computed.prefix_hit == 0.0 and computed.input.mean == pytest.approx((arrivals.inputs - arrivals.warm).mean())
    (replica,) = arrivals.sample(500, 1, ALL_REQUESTS).replicas
    assert replica.warm.tolist() == arrivals.warm.tolist()


def test_gaps_say_nothing_of_lengths():
    """Of thirty samples, the first 25 gaps and prompts: on average they are not correlated."""
    samples = [Arrivals.poisson(task("T"), None, seed, count=26) for seed in range(30)]
    related = [np.corrcoef(np.diff(sample.times), sample.inputs[1:])[0, 1] for sample in samples]
    assert abs(np.mean(related)) < 0.15, "four standard errors"
