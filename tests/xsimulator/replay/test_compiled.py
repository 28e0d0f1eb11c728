"""The compiled event simulator against `replay`, request by request, and its early ends against whole runs."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import MODEL, changed, schedule
from tests.xsimulator.replay.test_event_simulator import PROFILE, REQUESTS, plans, stages_of
from xcore.batching import MicroBatching
from xcore.errors import InputError
from xcore.specs.cluster import parse_cluster
from xcore.specs.profile import Table
from xcore.specs.request_times import RequestTimes
from xcore.specs.speculation import Speculation
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.prefixes import Prefixes
from xcore.traces.prompt_identity import PromptIdentity
from xsimulator.replay import compiled
from xsimulator.replay.compiled import COUNTS, COUNTS_FOR_LATENCY, Replicas, RequestArrays, dealt
from xsimulator.replay.event_simulator import drawn_steps, replay
from xsimulator.replay.following_turns import FollowingTurns
from xsimulator.replay.python_loop import _Missed
from xsimulator.replay.record import Record
from xsimulator.replay.watch import Watch

event_loop = pytest.importorskip("xsimulator.replay.event_loop", reason="exegpt was installed without a C compiler")


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


SPECULATIONS = st.sampled_from([None, None, Speculation((0.8, 0.5)), Speculation((0.9, 0.8, 0.7), layers=2.5)])
"""What decode iterations draft."""


def arrays(requests, flags=COUNTS + COUNTS_FOR_LATENCY):
    columns = np.array([(r.arrival_s, r.input, r.output, flags) for r in requests], dtype=np.float64)
    return RequestArrays(*np.ascontiguousarray(columns.T))


@settings(max_examples=300)
@given(plans(), REQUESTS, st.sampled_from([PROFILE, MIXED, BENT, FRONT_END]), st.sampled_from([1, 2]), SPECULATIONS)
def test_every_request_has_the_replays_times(plan, requests, other, in_flight, speculation):
    made, tables = plan
    made = replace(made, speculation=None if made.model.spec.encoder_layers else speculation)
    tables = replace(other if tables is PROFILE else tables, in_flight=in_flight)
    check_times(made, tables, requests)


@settings(max_examples=150)
@given(plans(), REQUESTS)
def test_a_batch_and_a_cache_as_large_as_what_was_used_serve_alike(plan, requests):
    """And neither is less than one request needs."""
    made, tables = plan
    watch = Watch.nothing()
    times = Replicas(tables).serve(made, arrays(requests), watch)
    used, blocks = map(int, watch.used[:2])
    assert 1 <= used <= made.control.batch and 1 <= blocks <= made.kv_blocks
    smaller = replace(made, kv_blocks=blocks, control=made.control.with_batch(used))
    again = Replicas(tables).serve(smaller, arrays(requests))
    for name in ("started", "first", "finished"):
        np.testing.assert_allclose(getattr(again, name), getattr(times, name), rtol=1e-9)


IDENTITIES = st.one_of(
    st.none(),
    st.builds(
        PromptIdentity,
        prefix=st.sampled_from([None, "a", "b"]),
        prefix_tokens=st.integers(1, 60),
        conversation=st.sampled_from([None, "c", "d"]),
        block_ids=st.lists(st.integers(0, 2), max_size=4).map(tuple),
        block_tokens=st.sampled_from([7, 16, 40]),
    ),
)


@st.composite
def caches(draw):
    """A schedule whose cache grows or is shared by prefixes, its profile, and requests that crowd it."""
    made, tables = draw(plans(policies=("orca", "chunked", "static")))
    caches_prefixes = made.policy != "static" and tables is PROFILE and draw(st.booleans())
    made = changed(
        made,
        admission=draw(st.sampled_from(["grow", "grow", "reserve"])),
        prefix_caching=caches_prefixes,
        kv_blocks=draw(st.integers(9, 24)),
        micro_batches=draw(st.sampled_from([None, 1, 3])),
    )
    tables = replace(tables, in_flight=draw(st.sampled_from([1, 2])))
    if not made.model.spec.encoder_layers:
        made = replace(made, speculation=draw(SPECULATIONS))
    rows = draw(
        st.lists(
            st.tuples(st.integers(1, 60), st.integers(1, 60), st.floats(0, 0.4), IDENTITIES), min_size=2, max_size=20
        )
    )
    return made, tables, [RequestLengths(*row) for row in rows]


@settings(max_examples=60, deadline=None)
@given(caches())
def test_without_a_compiler_blocks_grow_and_are_shared_alike(drawn):
    made, tables, requests = drawn
    requests = sorted(requests, key=lambda request: request.arrival_s)
    if compiled.is_compiled(made):
        prefixes = Prefixes.of(requests, made.block_size) if made.prefix_caching else None
        check_in_python(made, tables, replace(arrays(requests), prefixes=prefixes), [np.inf] * 3)


@settings(max_examples=150, deadline=None)
@given(caches())
def test_blocks_that_grow_or_are_shared_are_the_replays(drawn):
    """Preemptions, tokens found in the cache and all times of each request."""
    made, tables, requests = drawn
    requests = sorted(requests, key=lambda request: request.arrival_s)
    lanes = replay(made, tables, requests, timeline=False, lanes=True)
    compiled = replay(made, tables, requests, timeline=False)
    assert compiled.reused == lanes.reused and compiled.preemptions == lanes.preemptions
    expected = {s.index: s for s in lanes.served}
    for found in compiled.served:
        one = expected[found.index]
        assert (found.cached_tokens, found.preemptions) == (one.cached_tokens, one.preemptions)
        times = (one.start_s, one.first_token_s, one.finish_s)
        assert (found.start_s, found.first_token_s, found.finish_s) == pytest.approx(times, rel=1e-9)
    assert compiled.seconds == pytest.approx(lanes.seconds, rel=1e-9)
    assert compiled.estimate.utilisation == pytest.approx(lanes.estimate.utilisation, rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(
    plans(policies=("rra", "waa-c")),
    st.lists(st.tuples(st.integers(1, 80), st.integers(1, 60), st.floats(0, 0.2)), min_size=2, max_size=60),
    st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    st.integers(1, 5),
)
def test_adjusted_batches_are_the_replays(plan, rows, share, encode_batch):
    """Most inputs miss the mean, so batches are exchanged and resized, and requests passed over."""
    made, tables = plan
    workload = Workload.fixed(45, 20)
    made = replace(made, adjust=share, control=made.control.with_batch(encode_batch), workload=workload)
    check_times(made, tables, [RequestLengths(*row) for row in rows])


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
    expected = {s.index: s for s in replay(made, tables, requests, timeline=False, lanes=True).served}
    replicas = Replicas(tables)
    for own, dealt_requests in dealt(requests, made.replicas, steps=drawn_steps(made, requests)):
        times = replicas.serve(made, dealt_requests)
        for name, found in (("start_s", times.started), ("first_token_s", times.first), ("finish_s", times.finished)):
            assert found == pytest.approx([getattr(expected[i], name) for i in own], rel=1e-9)


def check_in_python(made, tables, requests, limits):
    """Without a compiler: the same figures, uses and verdicts."""
    found = []
    for is_there in (True, False):
        with mock.patch.object(compiled, "COMPILED", is_there):
            watch = Watch(np.array(limits), np.full(3, 3.0), np.zeros(3))
            found.append((Replicas(tables).serve(made, requests, watch), watch))
    (times, watch), (other, noted) = found
    assert (times is None) == (other is None)
    if times:
        for name in ("started", "first", "finished", "busy", "hits", "reused", "preemptions", "seconds"):
            assert getattr(other, name) == pytest.approx(getattr(times, name), rel=1e-9), name
        assert noted.missed.tolist() == watch.missed.tolist()
        assert noted.used[[0, 2]].tolist() == watch.used[[0, 2]].tolist()
        assert watch.used[1] <= noted.used[1] <= made.kv_blocks


@settings(max_examples=100, deadline=None)
@given(plans(), REQUESTS, st.sampled_from([PROFILE, MIXED, BENT]), st.sampled_from([0.05, np.inf]), SPECULATIONS)
def test_without_a_compiler_the_lanes_do_the_same(plan, requests, other, limit, speculation):
    made, tables = plan
    made = replace(made, speculation=None if made.model.spec.encoder_layers else speculation)
    requests = sorted(requests, key=lambda r: r.arrival_s)
    limits = [limit, limit / 5, 10 * limit]
    check_in_python(made, other if tables is PROFILE else tables, arrays(requests), limits)


@settings(max_examples=50)
@given(plans(), REQUESTS)
def test_stages_are_as_busy_as_in_the_replay(plan, requests):
    made, tables = plan
    made, requests = replace(made, replicas=1), sorted(requests, key=lambda r: r.arrival_s)
    run = replay(made, tables, requests, timeline=False, lanes=True)
    busy = Replicas(tables).serve(made, arrays(requests)).busy
    used = run.estimate.utilisation[: len(made.stages)]
    assert busy / run.seconds == pytest.approx(used, rel=1e-9)  # one device a stage


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


def test_growth_that_is_not_compiled_is_refused():
    with pytest.raises(InputError, match="Admission 'grow' of policy rra has no compiled replay"):
        Replicas(PROFILE).serve(schedule("rra", admission="grow"), arrays([RequestLengths(10, 4)]))


def test_what_does_not_fit_together_is_refused():
    two, three, none, cold = np.ones(2), np.ones(3), np.zeros(0, dtype=np.intp), np.zeros(0)
    with pytest.raises(ValueError, match="sizes"):
        event_loop.run(
            *(two, two, two, two, two, three, np.ones(10), three, three, three, two),
            *(none, none, none, cold, cold, cold, none, none, np.ones(14), np.ones(1)),
        )
    plan, longer = schedule("orca", prefix_caching=True), np.zeros(3)
    with pytest.raises(ValueError, match="sizes"):
        Replicas(PROFILE).serve(plan, replace(arrays([RequestLengths(10, 4)] * 2), warm=longer))
    for following, firsts in (([2, -1], [0]), ([1, -1], [2]), ([1, -1], [-1])):
        turns = FollowingTurns(np.array(following), np.zeros(2), np.array(firsts), 1)
        with pytest.raises(ValueError, match="sizes"):
            Replicas(PROFILE).serve(plan, replace(arrays([RequestLengths(10, 4)] * 2), turns=turns))


@pytest.mark.parametrize("policy", ["orca", "chunked"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_text_that_never_leaves_the_cache_is_counted_as_its_blocks_are(policy, in_flight):
    """The first request computes the text, before all others arrive, which fill the cache most of the time.

    Where prompts have different parts of it, the end of the text may leave a full cache; its blocks are counted still.
    """
    rng = np.random.default_rng(4)
    rows = [RequestLengths(200, 1, 0.0)]
    rows += [RequestLengths(200, int(output), 9.0) for output in rng.integers(1, 60, 60)]
    warm = np.array([16.0 * min(round(0.6 * row.input / 16), (row.input - 1) // 16) for row in rows])
    plan = schedule(policy, stages=stages_of(MODEL, "both", 0, 1), kv_blocks=40, prefix_caching=True)
    columns, engine = replace(arrays(rows), prefixes=Prefixes.of_one_text(warm)), replace(PROFILE, in_flight=in_flight)
    watches = [Watch.nothing(), Watch.nothing()]
    kept = Replicas(engine).serve(plan, columns, watches[0])
    counted = Replicas(engine).serve(plan, replace(columns, warm=warm), watches[1])
    for name in ("started", "first", "finished", "hits", "reused", "preemptions"):
        assert getattr(kept, name)[1:].tolist() == pytest.approx(getattr(counted, name)[1:].tolist(), rel=1e-9)
    assert counted.hits.tolist() == warm.tolist() and kept.hits[0] == 0
    assert watches[0].used.tolist() == watches[1].used.tolist()
    with mock.patch.object(compiled, "COMPILED", False):
        in_python = Replicas(engine).serve(plan, replace(columns, warm=warm), noted := Watch.nothing())
    for name in ("started", "first", "finished", "hits", "reused", "preemptions"):
        assert getattr(in_python, name).tolist() == pytest.approx(getattr(counted, name).tolist(), rel=1e-9)
    assert noted.used.tolist() == watches[1].used.tolist()
    assert counted.started[-1] > 9.1 and 30 < watches[1].used[1] <= 40, "requests wait for blocks"


@pytest.mark.parametrize(("places", "parents"), [([0, 9], [-1, -1]), ([0, 1], [-1, 1]), ([0], [-1, -1])])
def test_prefixes_of_requests_that_there_are_not_are_refused(places, parents):
    parents = np.array(parents, dtype=np.intp)
    prefixes = Prefixes(parents, np.zeros_like(parents), np.array(places, dtype=np.intp))
    requests = replace(arrays([RequestLengths(10, 4)] * 2), prefixes=prefixes)
    with pytest.raises(ValueError, match="sizes"):
        Replicas(PROFILE).serve(schedule("orca", prefix_caching=True), requests)


def test_a_request_waits_for_one_iteration_more_where_the_next_is_decided_ahead():
    """The first decodes alone; the second arrives in the midst of an iteration."""
    ahead, made = replace(PROFILE, in_flight=2), schedule("orca", stages=stages_of(MODEL, "both", 0, 1))
    (alone,) = replay(made, PROFILE, [RequestLengths(50, 40)]).served
    iterations = [s for s in replay(made, PROFILE, [RequestLengths(50, 40)]).timeline.spans if s.phase == "decode"]
    arrival = (iterations[9].start_s + iterations[9].end_s) / 2
    requests = [RequestLengths(50, 40), RequestLengths(20, 3, arrival)]
    starts = []
    for tables in (PROFILE, ahead):
        for lanes in (False, True):
            served = replay(made, tables, requests, timeline=False, lanes=lanes).served
            starts.append(next(s.start_s for s in served if s.index == 1))
    assert starts == pytest.approx([iterations[9].end_s] * 2 + [iterations[10].end_s] * 2, rel=1e-9)
    assert alone.start_s == 0.0


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_a_slot_stays_empty_for_one_iteration_where_the_next_is_decided_ahead(policy):
    """Of two slots; with one, nothing runs meanwhile, so that the next sequence starts when the first has ended."""
    made = schedule(policy, stages=stages_of(MODEL, "both", 0, 1), max_num_seqs=2)
    requests = [RequestLengths(20, 3), RequestLengths(20, 40), RequestLengths(20, 5)]
    for lanes in (False, True):
        at_once, later = (
            {s.index: s for s in replay(made, tables, requests, timeline=False, lanes=lanes).served}
            for tables in (PROFILE, replace(PROFILE, in_flight=2))
        )
        assert at_once[2].start_s == pytest.approx(at_once[0].finish_s, rel=1e-9)
        longer = later[2].start_s - later[0].finish_s
        assert 0 < longer < 1.5 * (later[0].finish_s - later[0].first_token_s) / 2
        single = changed(made, max_num_seqs=1)
        one, two, _ = replay(single, replace(PROFILE, in_flight=2), requests, timeline=False, lanes=lanes).served
        assert two.start_s == pytest.approx(one.finish_s, rel=1e-9)


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


def test_a_bound_is_broken_after_its_time_and_not_at_it():
    """A request that arrives at 1 s has a bound of 2 s on its first token, which is due at 3 s and may come then."""
    watch = Watch(np.array([2.0, np.inf, np.inf]), np.zeros(3), np.zeros(3))
    record = Record(1, MicroBatching(1).index, False)
    missed = _Missed([RequestLengths(10, 5, 1.0)], [1], record, watch)
    assert not missed.broken(3.0) and not watch.missed.any()
    assert missed.broken(3.0 + 1e-9) and watch.missed.tolist() == [1, 0, 0]


@pytest.mark.parametrize(("tokens", "finish_s", "broken"), [(11, 1.9, False), (11, 2.1, True), (2, 1.2, True)])
def test_seconds_per_token_have_a_bound_of_their_own(tokens, finish_s, broken):
    """The first token comes at 1 s, and each other one may take a tenth of a second, whatever the other bounds are."""
    watch = Watch(np.array([9.0, 0.1, 9.0]), np.zeros(3), np.zeros(3))
    record = Record(1, MicroBatching(1).index, False)
    missed = _Missed([RequestLengths(10, tokens, 0.0)], [1], record, watch)
    record.served.append(RequestTimes(0, 10, tokens, 0.0, 0.5, 1.0, finish_s))
    assert missed.broken(finish_s) == broken and watch.missed.tolist() == [0, int(broken), 0]
