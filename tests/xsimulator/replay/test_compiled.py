"""The compiled event simulator against `replay`, request by request, and its early ends against whole runs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.batching import deal
from exegpt.cluster import parse_cluster
from exegpt.errors import InputError
from exegpt.profile import Table
from exegpt.workload import RequestLengths
from tests.exegpt.nouns import MODEL, schedule
from tests.xsimulator.replay.test_event_simulator import PROFILE, REQUESTS, plans, stages_of
from xsimulator.replay import event_loop
from xsimulator.replay.compiled import COUNTS, COUNTS_FOR_LATENCY, Replicas, Requests, Watch
from xsimulator.replay.event_simulator import replay


def mixed_attention(table):
    """A profile whose engine computes prompts and decoding in one kernel."""
    points = ((0.0, 64.0), (0.0, 48.0, 200.0), (0.0, 16.0), (0.0, 32.0, 128.0))
    values = tuple(1e-5 + 1e-7 * i * (i % 7) for i in range(36))
    (degree,) = table.degrees
    mixed = replace(degree.decoder, mixed_attention=Table(("chunk", "past", "decodes", "context"), points, values))
    return replace(table, degrees=(replace(degree, decoder=mixed),))


MIXED = mixed_attention(PROFILE)


BENT = replace(
    PROFILE,
    send=Table(("bytes",), ((1.0, 3e4, 9e4),), (1e-5, 2e-3, 2.5e-3)),
    host_copy=Table(("bytes",), ((1.0, 2e5, 1e6),), (1e-5, 5e-3, 6e-3)),
)
"""Links whose first bytes take longest: what they take is not in proportion to what is sent."""

FRONT_END = replace(PROFILE, front_end_s=13e-3)
"""13 ms of each request outside the engine."""


def arrays(requests, flags=COUNTS + COUNTS_FOR_LATENCY):
    columns = np.array([(r.arrival_s, r.input, r.output, flags) for r in requests], dtype=np.float64)
    return Requests(*np.ascontiguousarray(columns.T))


@settings(max_examples=300)
@given(plans(), REQUESTS, st.sampled_from([PROFILE, MIXED, BENT, FRONT_END]))
def test_every_request_has_the_replays_times(plan, requests, other):
    made, tables = plan
    tables = other if tables is PROFILE else tables
    check_times(made, tables, requests)


@pytest.mark.parametrize("policy", ["orca", "rra", "static"])
def test_stages_that_are_alike_share_their_costs(policy):
    """Of four stages the two in the middle hold the same."""
    stages = stages_of(MODEL, "both", 0, 4)
    assert stages[1].decoder_layers == (3, 6) and stages[2].decoder_layers == (6, 9)
    made = schedule(policy, stages=stages, cluster=parse_cluster("4xA40"))
    check_times(made, PROFILE, [RequestLengths(5 + 7 * i, 1 + 3 * i, 0.01 * i) for i in range(12)])


def check_times(made, tables, requests):
    """Each request's times beside those of `replay`."""
    requests = sorted(requests, key=lambda r: r.arrival_s)
    expected = {s.index: s for s in replay(made, tables, requests, timeline=False).served}
    replicas = Replicas(tables)
    for own in deal([(r.input, r.output) for r in requests], made.replicas):
        if not own:
            continue
        times = replicas.serve(made, arrays([requests[i] for i in own]))
        for name, found in (("start_s", times.started), ("first_token_s", times.first), ("finish_s", times.finished)):
            assert found == pytest.approx([getattr(expected[i], name) for i in own], rel=1e-9)


@settings(max_examples=50)
@given(plans(), REQUESTS)
def test_stages_are_as_busy_as_in_the_replay(plan, requests):
    made, tables = plan
    made, requests = replace(made, replicas=1), sorted(requests, key=lambda r: r.arrival_s)
    run = replay(made, tables, requests, timeline=False)
    busy = Replicas(tables).serve(made, arrays(requests)).busy
    assert busy / run.seconds == pytest.approx(run.estimate.utilisation, rel=1e-9)  # one device a stage


def misses(requests, times, limits):
    """How many requests miss each bound."""
    many = requests.outputs > 1
    tpot = (times.finished - times.first)[many] / (requests.outputs[many] - 1)
    figures = (times.first - requests.arrivals, tpot, times.finished - requests.arrivals)
    return [int((figure > limit).sum()) for figure, limit in zip(figures, limits, strict=True)]


@settings(max_examples=300)
@given(plans(), REQUESTS, st.tuples(*[st.floats(0.0, 1.2)] * 3), st.tuples(*[st.integers(0, 3)] * 3))
def test_an_early_end_is_the_whole_runs_verdict(plan, requests, shares, allowed):
    made, tables = plan
    requests = arrays(sorted(requests, key=lambda r: r.arrival_s))
    replicas = Replicas(tables)
    whole = replicas.serve(made, requests)
    slowest = (whole.first - requests.arrivals).max(), 0.01, (whole.finished - requests.arrivals).max()
    limits = np.array([share * most for share, most in zip(shares, slowest, strict=True)])
    expected = misses(requests, whole, limits)
    watch = Watch(limits, np.array(allowed, dtype=np.float64), np.zeros(3))
    times = replicas.serve(made, requests, watch)
    assert (times is None) == any(n > most for n, most in zip(expected, allowed, strict=True))
    if times is not None:
        assert watch.missed.tolist() == expected
        assert np.array_equal(times.finished, whole.finished)


def test_requests_that_do_not_count_miss_nothing():
    requests = arrays([RequestLengths(50, 5)] * 4, flags=0.0)
    watch = Watch(np.zeros(3), np.zeros(3), np.zeros(3))
    assert Replicas(PROFILE).serve(schedule("orca"), requests, watch) is not None
    assert not watch.missed.any()


def test_a_hopeless_run_ends_early():
    """Of many requests at once only the first are asked for before their waiting tells."""
    requests = arrays([RequestLengths(50, 40)] * 500)
    replicas = Replicas(PROFILE)
    whole = replicas.serve(schedule("orca"), requests)
    watch = Watch(np.array([0.1 * whole.first.max(), np.inf, np.inf]), np.array([4.0, np.inf, np.inf]), np.zeros(3))
    assert replicas.serve(schedule("orca"), requests, watch) is None


def test_a_request_larger_than_the_cache_is_refused():
    with pytest.raises(InputError, match="Request 1 needs 8 KV blocks"):
        Replicas(PROFILE).serve(schedule(kv_blocks=4), arrays([RequestLengths(10, 4), RequestLengths(100, 20)]))


def test_a_request_that_fills_the_cache_is_served():
    """49 + 15 tokens of 16 are cached: four blocks."""
    assert Replicas(PROFILE).serve(schedule("orca", kv_blocks=4), arrays([RequestLengths(49, 16)])) is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"admission": "grow"}, "Admission 'grow' isn't compiled"),
        ({"prefix_caching": True}, "Prefix caching isn't compiled"),
    ],
)
def test_what_is_not_compiled_is_refused(changes, said):
    with pytest.raises(InputError, match=said):
        Replicas(PROFILE).serve(schedule("orca", **changes), arrays([RequestLengths(10, 4)]))


def test_what_does_not_fit_together_is_refused():
    two, three = np.ones(2), np.ones(3)
    with pytest.raises(ValueError, match="sizes"):
        event_loop.run(two, two, two, two, three, np.ones(6), three, three, three, np.ones(6), np.ones(1))


def test_front_end_time_counts_for_bounds_on_first_tokens_and_latencies_alone():
    made, requests = schedule("orca"), [RequestLengths(20, 5)] * 3
    bare = Replicas(PROFILE).serve(made, arrays(requests))
    late = Replicas(FRONT_END).serve(made, arrays(requests))
    assert late.first == pytest.approx(bare.first + 13e-3) and late.finished == pytest.approx(bare.finished + 13e-3)
    assert (late.started == bare.started).all() and (late.busy == bare.busy).all()
    several = float(((bare.finished - bare.first) / 4).max())
    between = {0: bare.first.max() + 6e-3, 1: several * 1.001, 2: bare.finished.max() + 6e-3}
    for place, limit in between.items():
        limits = np.full(3, np.inf)
        limits[place] = limit
        watch = [Watch(limits, np.zeros(3), np.zeros(3)) for _ in range(2)]
        assert Replicas(PROFILE).serve(made, arrays(requests), watch[0]) is not None
        assert (Replicas(FRONT_END).serve(made, arrays(requests), watch[1]) is None) == (place != 1)
