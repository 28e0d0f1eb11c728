"""The search at a rate of arrival, step by step: what is asked of the event simulator, and what it is spared."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xcore.small_specs import profile
from tests.xscheduler.test_rates import Tabled, Told, asked, space_of
from xcore.specs.workload import Workload
from xscheduler.candidates import Candidates, Size
from xscheduler.goodput import BEYOND, LEAST_LOAD, PRECISION, RateBounds
from xscheduler.open_search import GLANCE, Lead, OpenSearch, coarse, neighbours
from xscheduler.space import Variable
from xscheduler.spaces.chunked import FINE_TOKEN_BUDGETS


class Remembered(Told):
    """Schedules are their goodputs, which it knows; remembers what it was asked."""

    def __post_init__(self):
        super().__post_init__()
        self.seen = []

    def holds(self, schedule, rate, count=0):
        self.seen.append((schedule, rate, count))
        return super().holds(schedule, rate, count)


class Steady(Tabled):
    """Of known steady throughputs too, where they are given."""

    steady: dict = {}  # noqa: RUF012

    def _steady(self, space, point):
        return self.steady.get(point, super()._steady(space, point))


def search_of(tables, steady=None):
    """A search over spaces whose points' goodputs are known, and its meter."""
    meter = Remembered(profile(), None, RateBounds(1.0))
    search = Steady(asked(), list(tables), meter)
    search.tables, search.steady = tables, steady or {}
    return search, meter


def test_the_grids_leads_are_those_near_the_best_which_comes_first():
    """Goodputs on the grid are known to 2 %; within 5 % of the best they are looked at again."""
    spaces = [space_of(str(number)) for number in range(4)]
    search, _ = search_of(
        {space: {(0,): goodput} for space, goodput in zip(spaces, (0.9, 0.975, 1.0, 0.5), strict=True)}
    )
    leads = search.grid()
    assert [lead.space for lead in leads] == [spaces[2], spaces[1]]
    for lead, goodput in zip(leads, (1.0, 0.975), strict=True):
        assert goodput / 1.02 <= lead.goodput <= goodput


def test_behind_a_floor_there_are_no_leads():
    space = space_of("one")
    for floor, count in ((0.0, 1), (1.02, 1), (1.1, 0), (2.0, 0)):
        search, _ = search_of({space: {(0,): 1.0}})
        assert len(search.grid(floor)) == count


def test_spaces_whose_ceilings_are_below_the_best_are_not_replayed():
    """Ten tokens a request: a ceiling of 9.9 tokens/s is 0.99 requests/s, which replays exceed by 3 % at most."""
    best, close, low = space_of("best", 100.0), space_of("close", 9.9), space_of("low", 9.4)
    search, meter = search_of({best: {(0,): 1.0}, close: {(0,): 0.9}, low: {(0,): 0.8}})
    search.grid()
    assert {goodput for goodput, *_ in meter.seen} == {1.0, 0.9}


def test_the_grid_takes_batches_that_double_and_other_variables_in_steps_of_a_quarter():
    space = space_of("grid", sizes=(64,))
    halved = {(place,): 1.0 / (place + 1) for place in range(64)}
    search, meter = search_of({space: halved}, dict.fromkeys(halved, 9.0))
    search.grid()
    batches = [round(1 / goodput) for goodput in dict.fromkeys(goodput for goodput, *_ in meter.seen)]
    assert batches == [64, 32, 16, 8, 4, 2, 1]
    budgets = space_of("budgets", sizes=(1,))
    budgets.variables = (*budgets.variables, Variable("budget", FINE_TOKEN_BUDGETS))
    search, meter = search_of({budgets: {(0, place): 1.0 + 1e-9 * place for place in range(len(FINE_TOKEN_BUDGETS))}})
    search.grid()
    places = sorted({round((goodput - 1.0) / 1e-9) for goodput, *_ in meter.seen})
    ratios = [FINE_TOKEN_BUDGETS[b] / FINE_TOKEN_BUDGETS[a] for a, b in itertools.pairwise(places)]
    assert len(places) > 25 and all(1.2 < ratio < 1.4 for ratio in ratios[:-1]) and ratios[-1] < 1.4
    assert coarse([5], 2.0) == [0]


def test_of_batches_the_best_leads_and_smaller_ones_are_spared_that_can_not_better_it():
    space = space_of("batches", sizes=(4,))
    best = {(3,): 1.0, (1,): 1.5, (0,): 1.2}
    search, _ = search_of({space: best}, dict.fromkeys(best, 9.0))
    (lead,) = search.grid()
    assert lead.point == (1,) and 1.5 / 1.02 <= lead.goodput <= 1.5
    search, meter = search_of({space: best}, {(3,): 9.0, (1,): 0.99 * 0.98 / BEYOND})
    (lead,) = search.grid()
    assert lead.point == (3,) and {goodput for goodput, *_ in meter.seen} == {1.0}


def test_a_point_that_misses_the_bounds_nearly_idle_is_asked_for_few_requests():
    space = space_of("one")
    search, meter = search_of({space: {(0,): 1.0}}, {(0,): 100.0})
    assert search._lead(space, (0,), 0.0, 5000, 0.02) is None
    assert meter.seen == [(1.0, LEAST_LOAD * 100.0, GLANCE)]
    search, meter = search_of({space: {(0,): 1.0}}, {(0,): 2.0})
    assert search._lead(space, (0,), 0.0, 5000, 0.02).goodput == pytest.approx(1.0, rel=0.02)
    assert [count for *_, count in meter.seen[:2]] == [GLANCE, 5000]
    search, meter = search_of({space: {(0,): 1.0}}, {(0,): 2.0})
    assert search._lead(space, (0,), 0.5, 5000, 0.02)
    assert meter.seen[0] == (1.0, 0.5, 5000), "that much has been held nearly idle already"
    search, meter = search_of({space: {(0,): 1.0}}, {(0,): 0.5})
    assert search._lead(space, (0,), 0.6, 5000, 0.02) is None and not meter.seen, "more than it ever gives"
    assert search._lead(space, (0,), 0.5 * BEYOND, 5000, 0.02).goodput == 0.5 * BEYOND


def test_two_points_that_differ_in_more_than_their_batches_are_climbed_from():
    """The second best of the grid lies at the foot of the higher hill; beside the best, it would be left out."""
    low, high = space_of("low", sizes=(9,)), space_of("high", sizes=(9,))
    table = {
        low: {(place,): 0.9 - 0.01 * abs(place - 2) for place in range(9)},
        high: {(place,): 0.89 + 0.05 * place for place in range(9)},
    }
    search, _ = search_of(table)
    contenders = [
        Lead(low, (2,), None, 2.0, 0.9),
        Lead(low, (1,), None, 2.0, 0.895),
        Lead(high, (0,), None, 2.0, 0.89),
    ]
    best, *others = search.refined(contenders)
    assert (best.space, best.point) == (high, (8,)) and best.goodput == pytest.approx(1.29, rel=PRECISION)
    assert [lead.space for lead in others] == [low, high]
    assert others[1].point == (0,), "where the climb began"


def test_contenders_a_little_behind_the_best_are_left_out():
    """By more than an eightieth: with more requests goodputs differ less."""
    spaces = [space_of(name) for name in ("best", "near", "far")]
    goodputs = (1.0, 0.995, 0.97)
    search, meter = search_of({space: {(0,): goodput} for space, goodput in zip(spaces, goodputs, strict=True)})
    contenders = [Lead(space, (0,), None, 2.0, 1.0 * goodput) for space, goodput in zip(spaces, goodputs, strict=True)]
    assert [lead.space for lead in search.refined(contenders)] == spaces[:2]
    assert [rate for goodput, rate, _ in meter.seen if goodput == 0.97] == pytest.approx([(1 - 0.05 / 4)], rel=0.01)


def test_a_climb_ends_within_a_step_of_the_summit():
    """Larger steps first, then of 8 %."""
    space = space_of("hill", sizes=(300,))
    search, _ = search_of({space: {(place,): math.exp(-abs(math.log((place + 1) / 137))) for place in range(300)}})
    best, began = search.refined([Lead(space, (49,), None, 2.0, 0.3)])
    assert began.point == (49,)
    assert best.space.values(best.point)[0] == pytest.approx(137, rel=0.05)


def test_at_last_batches_up_to_a_fifth_larger_and_smaller_are_tried():
    space = space_of("one", sizes=(300,))
    search, _ = search_of({space: {(place,): 1.0 for place in range(300)}})
    around = search.around(Lead(space, (99,), None, 2.0, 1.0))
    assert {space.values(lead.point)[0] for lead in around} == {83, 93, 98, 102, 108, 120}
    assert {space.values(point)[0] for point in neighbours(space, (99,), 1.25)} == {80, 125}


def test_the_steady_throughput_counts_requests():
    variables = (Variable("x", (1,)),)
    size = Size(30.0, (0.0, 0.0), 1, 1)
    space = Candidates("", variables, (), None, policy="chunked", measure=lambda values: size)
    assert OpenSearch(asked(), [], None)._steady(space, (0,)) == 3.0


@pytest.mark.parametrize(
    ("batch", "memory", "share", "fits"),
    [(8, 1.0, 0.9, True), (8, 1.01, 0.1, False), (8, 0.5, 1.1, False), (16, 0.5, 1.0, True), (17, 0.5, 1.0, False)],
)
def test_a_point_fits_whatever_its_times_if_no_batch_exceeds_its_token_budget(batch, memory, share, fits):
    variables = Variable("max_num_seqs", (batch,)), Variable("max_num_batched_tokens", (16,))
    size = Size(1.0, (memory, share), 1, batch)
    space = Candidates("", variables, (), None, policy="chunked", find_shares=lambda values: size.shares)
    assert OpenSearch(asked(), [], None)._fits(space, (0, 0)) == fits


def test_points_are_counted_in_the_spaces_that_were_opened():
    one, other = space_of("one", 90.0, sizes=(3, 4)), space_of("other", 80.0, sizes=(2,))
    search = OpenSearch(asked(), [one, other], None)
    assert next(search._by_ceiling()) is one
    for space, point in ((one, (0, 0)), (one, (1, 1)), (other, (0,))):
        space.size_of(space.values(point))
    assert (search.points, search.size) == (2, 14)


def test_requests_have_the_workloads_mean_output():
    search = OpenSearch(asked(), [], None)
    assert search.problem.load.workload == Workload.fixed(20, 10)
    assert search._rate(45.0) == 4.5


@given(st.lists(st.floats(0.1, 2.0), min_size=6, max_size=6), st.integers(0, 6), st.sampled_from([None, 0.3, 1.2]))
def test_without_a_bound_on_queues_the_largest_batch_that_holds_at_its_throughput_is_tried(steps, held, lead):
    """Larger batches have more throughput and longer tokens; beside every batch."""
    space, steady = space_of("batches", sizes=(6,)), dict(zip(range(6), itertools.accumulate(steps), strict=True))
    goodputs = {(place,): math.inf if place < held else 0.0 for place in range(6)}
    search, meter = search_of({space: goodputs}, {(place,): rate for place, rate in steady.items()})
    known = Lead(space, (2,), None, 9.0, lead) if lead else None
    found = search._saturated(space, 5, (), known)
    assert {rate for _, rate, _ in meter.seen} <= set(steady.values())
    best = max((steady[place] for place in range(held)), default=0.0)
    if best <= (lead or 0.0):
        assert found is known
    else:
        assert (found.point, found.goodput, found.steady) == ((held - 1,), best, best)
