"""The search for the highest rate, on schedules whose limits are known."""

import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xcore.small_specs import changed, profile, schedule
from tests.xsimulator.replay.test_event_simulator import disaggregated
from xcore.specs.estimate import Estimate
from xcore.specs.workload import RequestLengths, Workload
from xscheduler.candidates import CandidateFamily, Candidates, Size
from xscheduler.goodput import (
    BEYOND,
    FINE,
    LEAST_LOAD,
    PRECISION,
    SIGMAS,
    Excess,
    Goodput,
    Meter,
    RateBounds,
    Verdict,
    _crossing,
)
from xscheduler.open_search import PATIENCE, Lead, OpenSearch, _middle_first, _moved, coarse, neighbours
from xscheduler.open_searches import _slowest
from xscheduler.open_tune import _best
from xscheduler.rate_sample import BATCHES, Arrivals
from xscheduler.search_problem import Limits
from xscheduler.space import Evaluation, Space, Variable
from xsimulator.replay.event_simulator import replay

MADE = schedule("orca")
FIXED = Workload.fixed(20, 10)
NOTHING = Size(0.0, (0.0, 0.0), 0, 0)


class Known(Meter):
    """Holds up to a rate, and knows the excess of misses: a power of the rate over it, less for certain."""

    true = 0.0
    doubt = 0.0
    asked = 0

    def holds(self, schedule, rate, count=0):
        self.asked += 1
        return rate <= self.true

    def excess(self, schedule, rate, count=0):
        self.asked += 1
        if not self.true:
            return Excess(1.0, 1.0)
        return Excess(20 * math.log(rate / self.true), 20 * (math.log(rate / self.true) - self.doubt))


def known(true, doubt=0.0, bounds=None):
    meter = Known(profile(), None, bounds or RateBounds(1.0))
    meter.true, meter.doubt = true, doubt
    return meter


@given(st.floats(1.0, 99.0), st.floats(0.01, 1.0), st.sampled_from([0.0025, 0.02]))
def test_the_highest_rate_is_reached_to_its_precision(true, share, precision):
    found = known(true).highest(MADE, share * true, 100.0, 10, precision)
    assert true / (1 + precision) <= found <= true


@pytest.mark.parametrize("held", [1.0, 100.0])
def test_no_rate_beyond_the_limit_is_tried(held):
    meter = known(math.inf)
    assert meter.highest(MADE, held, 100.0, 10, 0.02) == 100.0
    assert meter.asked <= (12 if held < 100 else 0)


@given(st.floats(0.1, 0.99), st.floats(0.0, 0.03), st.one_of(st.none(), st.floats(0.01, 3.0)))
def test_goodput_lies_between_what_is_likely_and_what_is_certain(true, doubt, start):
    meter = known(true, doubt)
    found = meter.goodput(MADE, 1.0, start=start)
    assert true / (1 + PRECISION) <= found.low <= true
    assert found.low <= found.high <= max(found.low, true * math.exp(doubt) * (1 + 1e-9))
    assert meter.asked <= 30


def test_a_goodput_takes_eight_or_nine_replays_on_average():
    """Each of 200,000 requests; from the steady throughput, from anywhere, and from within 5 % of the goodput."""
    rng, replays = random.Random(0), []
    for _ in range(300):
        meter = known(rng.uniform(0.1, 0.99), rng.uniform(0.0, 0.03))
        start = rng.choice([None, rng.uniform(0.01, 3.0), meter.true * rng.uniform(0.95, 1.05)])
        meter.goodput(MADE, 1.0, start=start)
        replays.append(meter.asked)
    assert sum(replays) / len(replays) < 8.6


@given(st.floats(0.1, 10.0), st.floats(1.001, 1.1), st.floats(1.001, 1.1), st.floats(1.2, 2.0))
def test_misses_are_certain_where_the_line_through_the_closest_rates_crosses_none(true, below, above, far):
    rates = (true / far, true / below, true * above, true * far)
    assert _crossing({rate: Excess(9.0, 20 * math.log(rate / true)) for rate in rates}) == pytest.approx(true)


@pytest.mark.parametrize(
    ("certain", "crossing"),
    [
        ((-0.2, -0.1), 1.1**2),  # beyond both, on the line
        ((0.1, 0.2), 1.0 / 1.1),  # below both
        ((-1.0, -0.99), 1.1**3),  # a line that hardly rises is followed for twice the distance
        ((-0.5, -0.5), 1.1),  # one that doesn't, not at all
    ],
)
def test_misses_that_are_not_seen_to_be_certain_are_guessed_from_the_line(certain, crossing):
    seen = {rate: Excess(9.0, excess) for rate, excess in zip((1.0, 1.1), certain, strict=True)}
    assert _crossing(seen) == pytest.approx(crossing)


def test_goodput_ends_at_the_limit_and_where_even_an_idle_schedule_misses():
    assert known(5.0).goodput(MADE, 1.0) == Goodput(BEYOND, BEYOND)
    assert known(5.0, bounds=RateBounds(None, tpot_s=1.0)).goodput(MADE, 1.0) == Goodput(1.0, 1.0)  # no queue is late
    assert known(0.0).goodput(MADE, 1.0) == Goodput(0.0, 0.0)
    assert known(0.5 * LEAST_LOAD).goodput(MADE, 1.0) == Goodput(0.0, 0.0)


def test_excess_is_the_misses_over_what_is_allowed_by_their_standard_errors():
    """Counted over the whole replay; the error of the sum from that of its forty parts."""
    arrivals = Arrivals.poisson(FIXED, None, seed=3, count=4000)
    made = schedule("orca", workload=FIXED, bound="p99-queries", max_num_seqs=1)
    meter = Meter(profile(), arrivals, RateBounds(None))
    idle = meter.served_at(made, 1e-3).latency_p50_s
    rate, limit = 0.8 / idle, 6 * idle
    sample, (times,) = meter._whole(made, rate, 4000)
    late = times.finished[400:] - sample.replicas[0].arrivals[400:] / rate > limit
    parts = [part.sum() for part in np.array_split(late, BATCHES)]
    error = SIGMAS * math.sqrt(BATCHES) * np.std(parts, ddof=1)
    allowed = sample.allowed[2]
    assert late.sum() > 20 and error < late.sum()
    found = Meter(profile(), arrivals, RateBounds(limit)).excess(made, rate, 4000)
    expected = [math.log((late.sum() + sign * error + 0.5) / (allowed + 0.5)) for sign in (1, -1)]
    assert (found.likely, found.certain) == pytest.approx(expected)
    sure = Meter(profile(), replace(arrivals, random=False), RateBounds(limit)).excess(made, rate, 4000)
    assert sure.likely == sure.certain == pytest.approx(math.log((late.sum() + 0.5) / (allowed + 0.5)))


def test_a_bound_that_is_just_met_is_not_missed():
    """Of 900 requests that count 8 may miss it. Where few do, that they are too many isn't certain of any number."""
    arrivals = Arrivals.poisson(FIXED, None, seed=3, count=1000)
    made = schedule("orca", workload=FIXED, bound="p99-queries", max_num_seqs=1)
    sample, (times,) = Meter(profile(), arrivals, RateBounds(None))._whole(made, 100.0, 1000)
    (requests,) = sample.replicas
    latest, next_latest = np.sort((times.finished - requests.arrivals / 100.0)[100:])[[-1, -2]]
    none = math.log(0.5 / (8 + 0.5))
    met = Meter(profile(), arrivals, RateBounds(float(latest))).excess(made, 100.0, 1000)
    assert (met.likely, met.certain) == pytest.approx((none, none))
    missed = Meter(profile(), arrivals, RateBounds(float(next_latest))).excess(made, 100.0, 1000)
    error = SIGMAS * math.sqrt(BATCHES) * np.std([1.0] + [0.0] * (BATCHES - 1), ddof=1)
    assert error > 1
    assert (missed.likely, missed.certain) == pytest.approx((math.log((1 + error + 0.5) / (8 + 0.5)), none))


def test_a_verdict_holds_for_smaller_batches_that_were_not_filled_and_is_not_replayed():
    """And for lower rates where it held, for higher ones where it didn't; a larger batch may do something else."""
    seen = Verdict(changed(MADE, max_num_seqs=64, kv_blocks=900), 10.0, True, 5.0, 40.0)
    sizes = [(64, 900), (5, 40), (4, 40), (5, 39), (65, 900), (64, 901)]
    schedules = [changed(MADE, max_num_seqs=batch, kv_blocks=blocks) for batch, blocks in sizes]
    assert [seen.decides(made, 10.0) for made in schedules] == [True, True, False, False, False, False]
    assert (seen.decides(MADE, 9.0), seen.decides(MADE, 11.0)) == (seen.decides(MADE, 10.0), False)
    missed = replace(seen, held=False)
    assert [missed.decides(schedules[1], rate) for rate in (9.0, 10.0, 11.0)] == [False, True, True]
    meter = Meter(profile(), Arrivals.poisson(FIXED, None, seed=3, count=400), RateBounds(1.0))
    answers = [meter.holds(changed(MADE, max_num_seqs=batch, workload=FIXED), 2.0, 400) for batch in (64, 32, 16)]
    assert answers == [True] * 3 and meter.replays == 1
    for other in ({"prefills_per_step": 2}, {"replicas": 2}):
        meter.holds(changed(MADE, workload=FIXED, **other), 2.0, 400)
    assert meter.replays == 3


def test_what_is_sustained_is_seen_in_one_replay():
    """As by the misses that are certain, and by their excess; what goes alike with another batch is not replayed."""
    arrivals, made = Arrivals.poisson(FIXED, None, seed=3, count=4000), replace(MADE, workload=FIXED)
    one = Meter(profile(), arrivals, RateBounds(0.9))
    sustained = {rate: one.sustains(made, rate, 4000) for rate in (1.0, 20.0, 40.0, 60.0, 200.0)}
    assert one.replays <= len(sustained) and {True, False} == set(sustained.values())
    for rate, is_sustained in sustained.items():
        other = Meter(profile(), arrivals, RateBounds(0.9))
        assert is_sustained == (other.holds(made, rate, 4000) and other.excess(made, rate, 4000).likely <= 0)
    replays, known = one.replays, one.excess(made, 1.0, 4000)
    fewer = changed(made, max_num_seqs=made.control.max_num_seqs - 1)
    assert one.excess(fewer, 1.0, 4000) == known and one.replays == replays
    one.excess(fewer, 2.0, 4000)
    assert one.replays == replays + 1


def test_verdicts_of_replays_side_by_side_are_those_of_one_after_the_other():
    arrivals = Arrivals.poisson(FIXED, None, seed=3, count=2000)
    schedules = [changed(MADE, workload=FIXED, prefills_per_step=prompts) for prompts in (1, 2, 4)]
    one, ahead = (Meter(profile(), arrivals, RateBounds(0.9)) for _ in range(2))
    for rate in (20.0, 60.0):
        for measured in (False, True):
            ahead.look_ahead(schedules, rate, 2000, measured)
    replays = ahead.replays
    for rate in (20.0, 60.0):
        asked = [meter.holds(made, rate, 2000) for meter in (one, ahead) for made in schedules]
        assert asked[:3] == asked[3:]
    assert ahead.replays == replays >= one.replays == 6
    ahead.look_ahead([replace(made, admission="grow") for made in schedules], 20.0, 2000)
    assert ahead.replays == replays, "no verdict on another schedule can be kept"


def test_replays_are_counted():
    """Whether they come to their end or not."""
    arrivals = Arrivals.poisson(FIXED, None, seed=3, count=100)
    meter = Meter(profile(), arrivals, RateBounds(1e-9))
    assert not meter.holds(MADE, 10.0, 50)
    meter.excess(MADE, 10.0, 20)
    meter.served_at(MADE, 10.0, 10)
    assert meter.replays == 3


@given(st.floats(5.0, 99.0), st.floats(0.5, 2.0))
def test_a_goodput_may_be_asked_to_a_finer_precision(true, start):
    found = known(true).goodput(MADE, 100.0, start=start * true, precision=FINE)
    assert true / (1 + FINE) <= found.low <= true


def test_a_finer_goodput_goes_on_behind_the_replays_that_are_known():
    arrivals, made = Arrivals.poisson(FIXED, None, seed=3, count=4000), replace(MADE, workload=FIXED)
    meter = Meter(profile(), arrivals, RateBounds(0.4))
    rough = meter.goodput(made, 100.0, 4000, 30.0)
    replays = meter.replays
    fine = meter.goodput(made, 100.0, 4000, 30.0, FINE)
    assert replays <= meter.replays <= replays + 2 and 0 < rough.low <= fine.low <= rough.low * (1 + PRECISION)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (RateBounds(2.0, 0.5, 0.1), ""),
        (RateBounds(None), ""),
        (RateBounds(1.9, 0.4), "its latency is 2 s, over 1.9 s"),
        (RateBounds(2.0, 0.4), "its time to first token is 500 ms, over 400 ms"),
        (RateBounds(2.0, 0.5, 0.09), "its time per output token is 100 ms, over 90 ms"),
    ],
)
def test_the_first_bound_that_is_broken_is_named(bounds, said):
    times = (2.0, 1.0, 1.5, 0.2, 0.05, 0.9, 0.2)
    estimate = Estimate(10.0, 100.0, *times, ttft_bounded_s=0.5, tpot_bounded_s=0.1)
    assert bounds.broken(estimate) == said
    assert bounds.end_queues == (bounds.latency_s is not None)
    assert RateBounds(None, ttft_s=1.0).end_queues
    nobody_decodes = replace(estimate, tpot_bounded_s=None)
    assert RateBounds(None, tpot_s=1e-9).broken(nobody_decodes) == ""


@pytest.mark.parametrize("bound", ["ttft_s", "tpot_s"])
def test_excess_counts_late_first_tokens_and_slow_following_ones(bound):
    """Of every other request, which alone has a following token; seconds per token are those between tokens."""
    workload = Workload.from_requests("mixed", [RequestLengths(20, n, 0.0) for n in (1, 10)])
    arrivals = replace(Arrivals.poisson(workload, None, seed=3, count=2000), random=False)
    rate = 60.0
    sample, (times,) = Meter(profile(), arrivals, RateBounds(None))._whole(MADE, rate, 2000)
    counted = np.arange(200, 2000) if bound == "ttft_s" else np.arange(201, 2000, 2)
    started = sample.replicas[0].arrivals / rate if bound == "ttft_s" else times.first
    figures = times.first - started if bound == "ttft_s" else (times.finished - started) / 9
    limit = float(np.percentile(figures[counted], 90))
    late = (figures[counted] > limit).sum()
    assert late > 50
    found = Meter(profile(), arrivals, RateBounds(None, **{bound: limit})).excess(MADE, rate, 2000)
    allowed = sample.allowed[["ttft_s", "tpot_s"].index(bound)]
    assert found.likely == pytest.approx(math.log((late + 0.5) / (allowed + 0.5)))


VALUES = st.lists(st.integers(1, 500), min_size=1, max_size=40, unique=True).map(sorted)


@given(VALUES, st.booleans(), st.floats(1.05, 3.0))
def test_a_coarse_grid_has_both_ends_and_no_more_values_than_it_needs(values, falls, ratio):
    values = values[::-1] if falls else values
    kept = sorted(values[place] for place in coarse(values, ratio))
    assert (kept[0], kept[-1]) == (min(values), max(values))
    assert all(above >= ratio * below for below, above in itertools.pairwise(kept[:-1]))
    for below, above in itertools.pairwise(kept):
        assert not any(ratio * below <= value < above for value in values)


@given(VALUES, st.booleans(), st.data(), st.sampled_from([1.25, 1.08, 1 / 1.25, 1 / 1.08]))
def test_a_step_leads_to_the_value_closest_to_the_ratio_and_moves_if_it_can(values, falls, data, ratio):
    values = values[::-1] if falls else values
    place = data.draw(st.integers(0, len(values) - 1))
    beyond = [v for v in values if (v > values[place] if ratio > 1 else v < values[place])]
    moved = values[_moved(values, place, ratio)]
    asked = ratio * values[place]
    assert abs(moved - asked) == min((abs(v - asked) for v in beyond), default=abs(values[place] - asked))


class Roomy(OpenSearch):
    """Batches up to a place fit; what they fill grows evenly, or by a power of the place."""

    most, power = 0, 1.0

    def _fits(self, space, point):
        return point[0] <= self.most

    def _fullness(self, space, point):
        return ((point[0] + 1) / (self.most + 1.5)) ** self.power if self.most >= 0 else math.inf


@given(st.integers(1, 40), st.sampled_from([1.0, 0.2, 3.0]), st.data())
def test_the_largest_batch_that_fits_is_found(count, power, data):
    """Wherever it was beside other variables before, and however memory fills."""
    search, space = Roomy(None, [], None), space_of("batches", sizes=(count, 1))
    search.power = power
    for most in data.draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=3)):
        search.most = most
        assert search._largest(space, (0,)) == (most if most >= 0 else None)


def test_of_many_batches_few_are_tried():
    """Memory grows evenly with the batch, from what weights take."""
    search, space = Roomy(None, [], None), space_of("batches", sizes=(4096, 1))
    tried = []
    search._fullness = lambda space, point: tried.append(point[0]) or 0.5 + 0.5 * (point[0] + 1) / 1801
    search.most = 1800
    assert search._largest(space, (0,)) == 1800 and len(tried) <= 5


@given(st.lists(st.integers(), unique=True))
def test_places_come_in_an_order_that_halves_the_gaps(places):
    order = _middle_first(places)
    assert sorted(order) == sorted(places)
    if places:
        assert order[0] == places[len(places) // 2 if len(places) > 2 else 0]


def test_the_grid_begins_where_the_best_of_the_middles_is():
    """So that each of the other spaces, though its ceiling is higher, is rejected by one replay a point."""
    members = [space_of(str(number), ceiling=50.0 - number, sizes=(1, 9)) for number in range(10)]
    points = [(0, place) for place in range(9)]
    search = Tabled(asked(), members, Counting(profile(), None, RateBounds(1.0)))
    search._steady = lambda space, point: 1.5
    search.tables = {
        space: {point: 0.1 + 0.1 * number + 0.005 * point[1] for point in points}
        for number, space in enumerate(members)
    }
    leads = search.grid()
    assert {lead.space for lead in leads} == {members[9]}
    assert search.meter.asked <= 160  # 312 without


def grid(*sizes):
    variables = tuple(Variable(f"x{i}", tuple(range(1, size + 1))) for i, size in enumerate(sizes))
    return Space("grid", variables, (), lambda at: Evaluation(0.0, ()))


def test_neighbours_differ_along_one_variable_before_they_differ_along_two():
    found = neighbours(grid(9, 9), (4, 4), 1.08)
    assert sorted(found[:4]) == [(3, 4), (4, 3), (4, 5), (5, 4)]
    assert sorted(found[4:]) == [(3, 3), (3, 5), (5, 3), (5, 5)]
    assert sorted(neighbours(grid(9, 1), (0, 0), 1.08)) == [(1, 0)]
    assert neighbours(grid(1), (0,), 1.25) == []


def test_points_that_differ_in_their_batches_alone_are_beside_each_other():
    space = grid(9, 9)
    one = Lead(space, (4, 4), MADE, 1.0, 1.0)
    assert one.beside(replace(one, point=(2, 4)))
    assert not one.beside(replace(one, point=(4, 2))) and not one.beside(replace(one, space=grid(9, 9)))


@pytest.mark.parametrize(
    ("bounds", "seconds"),
    [
        (RateBounds(5.0), 5.0),
        (RateBounds(None), None),
        (RateBounds(None, ttft_s=1.0), None),
        (RateBounds(None, tpot_s=0.1), None),
        (RateBounds(None, 1.0, 0.1), 1.0 + 9 * 0.1),
        (RateBounds(5.0, 1.0, 0.1), 1.0 + 9 * 0.1),
        (RateBounds(1.5, 1.0, 0.1), 1.5),
    ],
)
def test_bounds_on_tokens_bound_the_latency_together(bounds, seconds):
    """The first of ten tokens within a second, and nine more."""
    assert _slowest(bounds, Workload.fixed(20, 10)) == (seconds and pytest.approx(seconds))


@pytest.mark.parametrize("replicas", [1, 2])
def test_devices_are_as_busy_as_in_the_replay(replicas):
    """Of replicas some are followed for all, and the figures are the whole cluster's."""
    made = disaggregated(workload=FIXED, replicas=replicas, bound="p99-queries")
    arrivals = Arrivals.poisson(FIXED, None, seed=1, count=900)
    run = replay(made, profile(), arrivals.requests(60.0), timeline=False)
    served = Meter(profile(), arrivals, RateBounds(None)).served_at(made, 60.0, 900 // replicas)
    assert len(served.utilisation) == made.cluster.devices
    assert served.utilisation.count(0.0) == made.idle
    assert served.utilisation == pytest.approx(run.estimate.utilisation, rel=1e-9 if replicas == 1 else 0.1)
    assert served.throughput_seq_s == pytest.approx(60.0, rel=0.1)
    assert served.throughput_tok_s == pytest.approx(10 * served.throughput_seq_s)


class Tabled(OpenSearch):
    """Spaces whose goodputs are known; a point's schedule is its goodput."""

    tables: dict = {}  # noqa: RUF012

    def schedule(self, space, point):
        return self.tables[space][point]

    def _steady(self, space, point):
        return 1.5 * self.tables[space][point]

    def _fits(self, space, point):
        return True


class Told(Meter):
    def holds(self, schedule, rate, count=0):
        return rate <= schedule

    def used(self, schedule, rate, count):
        return None


class Counting(Told):
    asked = 0

    def holds(self, schedule, rate, count=0):
        self.asked += 1
        return super().holds(schedule, rate, count)


def space_of(name, ceiling=math.inf, quickest_s=0.0, sizes=(1,)):
    made = grid(*sizes)
    asked = {"policy": "chunked", "quickest_s": quickest_s, "find_shares": lambda values: NOTHING.shares}
    asked["measure"] = lambda values: NOTHING
    return Candidates(name, made.variables, (), made.simulate, ceiling, **asked)


def asked(latency_s=None):
    return SimpleNamespace(limits=Limits(latency_s), load=SimpleNamespace(workload=FIXED))


@given(st.lists(st.floats(0.1, 1.0), min_size=12, max_size=12), st.sampled_from([0.01, 1.0, 100.0]))
def test_the_best_of_all_points_is_found_to_its_precision(shares, scale):
    space = space_of("all", sizes=(4, 3))
    table = dict(zip(itertools.product(range(4), range(3)), (share * scale for share in shares), strict=True))
    search = Tabled(asked(), [space], Told(profile(), None, RateBounds(1.0)))
    search.tables = {space: table}
    found = search.exhaustive(10)
    assert found.goodput <= table[found.point]
    assert table[found.point] >= max(table.values()) / (1 + PRECISION) ** 2
    assert found.steady == 1.5 * table[found.point]


def test_spaces_are_opened_by_their_ceilings_and_not_where_every_query_is_late():
    late, empty = space_of("late", 80.0, quickest_s=3.0), space_of("empty", 0.0)
    members = [
        space_of("low", 1.0),
        CandidateFamily("family", 60.0, 2, lambda: [space_of("inner", 50.0), empty, space_of("inmost", 2.0)]),
        late,
        space_of("high", 70.0, quickest_s=2.0),
    ]
    search = Tabled(asked(latency_s=2.0), members, None)
    assert [space.name for space in search._by_ceiling()] == ["high", "inner", "inmost", "low"]
    assert late not in search.opened and empty not in search.opened
    assert "late" in [space.name for space in Tabled(asked(), members, None)._by_ceiling()]
    assert search.size == 3 + 2


def test_the_grid_ends_after_many_spaces_in_a_row_that_bring_nothing_better():
    """The best one is the fortieth; those after it are no worse by their ceilings."""
    members = [space_of(str(number)) for number in range(150)]
    search = Tabled(asked(), members, Told(profile(), None, RateBounds(1.0)))
    search.tables = {space: {(0,): 0.5} for space in members} | {members[39]: {(0,): 1.0}}
    (best,) = search.grid()
    assert best.space is members[39]
    assert 40 + PATIENCE <= len(search.opened) <= 40 + PATIENCE + 1


def test_contenders_that_do_not_hold_with_more_requests_fall_behind():
    space = space_of("one", sizes=(9, 9))
    search = Tabled(asked(), [space], Told(profile(), None, RateBounds(1.0)))
    table = dict.fromkeys(itertools.product(range(9), range(9)), 0.1) | {(1, 1): 0.5, (5, 5): 0.9}
    search.tables = {space: table}
    contenders = [Lead(space, point, None, 2.0, seen) for point, seen in (((1, 1), 1.0), ((5, 5), 0.9))]
    (best, *_) = search.refined(contenders)
    assert best.point == (5, 5) and best.goodput == pytest.approx(0.9, rel=2 * PRECISION)
    (fallen,) = search.refined(contenders[:1])
    assert fallen.point == (1, 1) and fallen.goodput == pytest.approx(0.5, rel=2 * PRECISION)


def test_a_climb_ends_at_a_point_that_no_neighbour_betters():
    space = space_of("hill", sizes=(9, 9))
    search = Tabled(asked(), [space], Told(profile(), None, RateBounds(1.0)))
    search.tables = {space: {(a, b): 1.0 / (1 + (a - 6) ** 2 + (b - 3) ** 2) for a in range(9) for b in range(9)}}
    (best, *_) = search.refined([Lead(space, (2, 2), None, 2.0, 0.05)])
    assert best.point == (6, 3)


class Filled(Told):
    """Uses no more than so many of a batch."""

    def used(self, schedule, rate, count):
        return SimpleNamespace(batch=3, fits=lambda schedule: True)


def test_a_climb_starts_from_the_batch_that_is_used():
    """Those above do the same, and their neighbours too."""
    space = space_of("even", sizes=(9, 1))
    space.variables = (Variable("batch", (1, 2, 4, 8, 16, 32, 64, 128, 256)), Variable("other", (1,)))
    search = Tabled(asked(), [space], Filled(profile(), None, RateBounds(1.0)))
    search.tables = {space: {(place, 0): {1: 0.6}.get(place, 0.5) for place in range(9)}}
    (best, began) = search.refined([Lead(space, (8, 0), None, 2.0, 0.5)])
    assert (best.point, began.point) == ((1, 0), (8, 0))
    search.tables = {space: {(place, 0): 0.5 for place in range(9)}}
    (best,) = search.refined([Lead(space, (8, 0), None, 2.0, 0.5)])
    assert best.point == (8, 0), "with room to spare where that is no worse"


def test_points_as_good_as_one_another_are_not_exchanged():
    """A climb over even ground would not end, and of all points the first stays."""
    space = space_of("plain", sizes=(5, 5))
    search = Tabled(asked(), [space], Told(profile(), None, RateBounds(1.0)))
    search.tables = {space: {point: 1.0 - 1e-4 * sum(point) for point in itertools.product(range(5), range(5))}}
    (best,) = search.refined([Lead(space, (2, 2), None, 2.0, 0.9)])
    assert best.point == (2, 2)
    assert search.exhaustive(10).point == (0, 0)


def test_at_last_neighbours_along_one_variable_are_tried_that_may_be_better():
    """The steady throughput is reached within 3 %; the highest batch doesn't fit."""
    space = space_of("last", sizes=(9, 9))
    search = Roomy(asked(), [space], None)
    search.most = 4
    search.schedule = lambda space, point: point
    steady = dict.fromkeys(itertools.product(range(9), range(9)), 2.0) | {(3, 4): 0.98, (4, 5): 0.96}
    search._steady = lambda space, point: steady[point]
    found = search.around(Lead(space, (4, 4), None, 2.0, 1.0))
    assert {lead.point: (lead.steady, lead.goodput) for lead in found} == {(3, 4): (0.98, 1.0), (4, 3): (2.0, 1.0)}


class Measured(Told):
    """Schedules are their goodputs, which it knows; remembers which were measured."""

    def sustains(self, schedule, rate, count=0):
        return rate <= schedule

    def goodput(self, schedule, steady, count=0, start=None, precision=PRECISION):
        measured.append(schedule)
        return Goodput(schedule, schedule)


measured: list = []


def test_only_leads_that_are_better_by_more_than_the_precision_are_measured(monkeypatch):
    """A measurement takes many replays, a glance at a rate just above the best one."""
    monkeypatch.setattr("xscheduler.open_tune._sustained", lambda lead, reached, meter: (lead.schedule, reached.low))
    measured.clear()
    space = space_of("leads", sizes=(9,))
    search = Tabled(asked(), [space], Measured(profile(), None, RateBounds(1.0)))
    rates = (1.0, 1.002, 1.01, 0.9)
    leads = [Lead(space, (place,), rate, 2.0, rate) for place, rate in enumerate(rates)]
    assert _best([*leads, leads[2]], search, 10) == (1.01, 1.01)
    assert measured == [1.0, 1.01]
