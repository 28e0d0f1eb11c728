"""Branch and bound against its oracle, the exhaustive search, on spaces that are monotone, nearly so, or odd."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.monotonicity import violations
from benchmarks.spaces import LARGE, SMALL, random_space
from xcore.errors import InputError
from xscheduler.bnb import _split
from xscheduler.search import black_box, search
from xscheduler.space import Constraint, Evaluation, Incumbent, Space, Variable


def best(make, **how):
    """Branch and bound's and the exhaustive search's answers on two equal spaces."""
    return search([make()], "bnb", **how), search([make()], "exhaustive")


def line(throughputs, latencies, limit, name="line", slack=0.0):
    """A space of one variable."""
    return Space(
        name,
        (Variable("x", tuple(range(len(throughputs)))),),
        (Constraint("latency", limit, (True,), slack),),
        lambda at: Evaluation(float(throughputs[at[0]]), (float(latencies[at[0]]),)),
    )


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_exact_on_monotone_spaces(seed, opposed):
    found, oracle = best(lambda: random_space(seed, (1, 300), opposed=opposed))
    assert found.throughput == oracle.throughput
    assert found.search.evaluations <= found.search.space
    if found.space:
        assert found.space.meets(found.point)


@pytest.mark.parametrize("opposed", [False, True])
def test_exact_on_the_benchmarks_spaces_with_few_points_simulated(opposed):
    simulated = points = 0
    for seed in range(20):
        found, oracle = best(lambda s=seed: random_space(s, LARGE if s % 2 else SMALL, opposed=opposed))
        assert found.throughput == oracle.throughput, f"seed {seed}"
        if seed % 2:
            simulated += found.search.evaluations
            points += found.search.space
    assert simulated <= 0.05 * points


def test_tolerance_makes_up_for_noise():
    """Values up to 2 % off break monotonicity by up to 4 %: with that tolerance nothing is lost beyond the noise."""
    shares = []
    for seed in range(30):
        found, oracle = best(lambda s=seed: random_space(s, SMALL, noise=0.02), tolerance=0.041)
        if oracle.space:
            shares.append(found.throughput / oracle.throughput)
            assert found.space and found.space.meets(found.point)
    assert len(shares) > 20
    assert min(shares) >= 0.99
    assert max(shares) <= 1.0


@given(st.integers(0, 2**32 - 1))
def test_exact_where_throughput_does_not_rise_along_a_variable_that_says_so(seed):
    """As along N_D on a pipeline: throughput rises along all variables but the last, where its order is shuffled."""

    def make():
        space = random_space(seed, (20, 300))
        inner, *others, last = space.simulate, *space.variables
        shuffled = np.random.default_rng(seed).permutation(len(last.values))
        space.variables = (*others, replace(last, throughput_rises=False))
        space.simulate = lambda at: replace(inner(at), throughput=inner((*at[:-1], int(shuffled[at[-1]]))).throughput)
        return space

    found, oracle = best(make)
    assert found.throughput == oracle.throughput


@pytest.mark.parametrize(
    ("first", "second", "limit", "rises", "axis"),
    [
        (5.0, 4.0, 9, True, 0),
        (4.0, 5.0, 9, True, 1),
        (5.0, 4.0, 7, True, 1),  # the better one takes 8 s
        (5.0, 4.0, 3, True, 1),  # neither is feasible: the longest side
        (5.0, 4.0, 9, False, 1),  # whose throughput isn't trusted
    ],
)
def test_a_box_is_cut_where_the_better_feasible_neighbour_of_its_best_corner_lies(first, second, limit, rises, axis):
    """Boxes of nine by eleven values; a neighbour has one variable at its lowest, the other at its highest."""
    variables = Variable("x", range(9)), Variable("y", range(11), rises)
    rates, times = {(0, 10): first, (8, 0): second}, {(0, 10): 8.0, (8, 0): 6.0}
    space = Space(
        "box",
        variables,
        (Constraint("latency", limit, (True, True)),),
        lambda at: Evaluation(rates.get(at, 1.0), (times.get(at, 1.0),)),
    )
    incumbent = Incumbent()
    lower, upper = _split(space, ((0, 0), (8, 10)), incumbent)
    cut = (4, 10) if axis == 0 else (8, 5)
    assert lower == ((0, 0), cut)
    assert upper == (((5, 0) if axis == 0 else (0, 6)), (8, 10))
    if rises:  # what was looked at counts
        feasible = [rate for at, rate in rates.items() if times[at] <= limit]
        assert incumbent.throughput == max(feasible, default=0.0)


def test_a_single_point_is_an_answer_where_it_is_feasible():
    assert search([line([3], [1], limit=1)]).point == (0,)
    assert search([line([3], [2], limit=1)]).space is None


def test_nothing_feasible():
    found = search([random_space(1, SMALL)], floor=float("inf"))
    assert found.space is None
    assert found.throughput == 0.0
    none = search([line([1, 2, 3], [5, 6, 7], limit=4)])
    assert none.space is None
    assert none.search.evaluations == 1  # the lowest corner tells


def test_a_box_whose_figure_may_fall_is_kept_as_far_as_its_slack():
    """From the second batch on prompts take one iteration more, from the eighth on one less."""
    latencies = [1.0, *[2.1] * 6, *[1.2] * 3, 5.0]
    assert search([line(range(1, 12), latencies, limit=1.3)]).point == (0,)
    assert search([line(range(1, 12), latencies, limit=1.3, slack=0.5)]).point == (9,)
    beyond = search([line(range(1, 12), [3.0] * 11, limit=1.3, slack=0.5)])
    assert beyond.space is None and beyond.search.evaluations == 1


def test_the_only_feasible_point_is_the_lowest_corner():
    """The paper's listing never tries it."""
    assert search([line([1, 2, 3], [4, 6, 7], limit=4)]).point == (0,)


def test_a_loose_bound_is_answered_by_the_highest_corner_alone():
    found = search([line(range(1, 1001), range(1000), limit=1e9)])
    assert found.point == (999,)
    assert found.search.evaluations <= 2


def test_the_seconds_are_those_of_the_search():
    started = time.perf_counter()
    found = search([random_space(3, SMALL)])
    assert 0 < found.search.seconds <= time.perf_counter() - started


def test_each_point_is_simulated_once():
    asked = []
    space = random_space(3, SMALL)
    inner = space.simulate
    space.simulate = lambda at: (asked.append(at), inner(at))[1]
    search([space], "bnb", tolerance=0.1)
    search([space], "exhaustive")
    assert len(asked) == len(set(asked)) == space.size


def test_the_incumbent_of_one_space_ends_the_search_of_another():
    good, poor = line([10.0] * 50, range(50), limit=30, name="good"), line(range(1, 10), range(9), limit=4, name="poor")
    found = search([good, poor])
    assert found.space is good
    assert len(poor.known) <= 2  # its corners: the highest is below the incumbent
    assert search([poor], floor=9.0).space is None


def test_what_can_at_best_be_as_good_is_not_looked_at():
    first, second = line([10.0] * 9, range(9), limit=9), line([10.0] * 9, range(9), limit=9)
    first.ceiling = second.ceiling = 10.0
    found = search([first, second])
    assert (found.space, found.throughput) == (first, 10.0)
    assert not second.known
    assert search([first], floor=10.0).space is None


def test_the_first_of_equally_good_points_stays():
    space = line([1.0, 5.0, 5.0], [0, 0, 0], limit=1)
    incumbent = Incumbent()
    for point in ((0,), (2,), (1,)):
        incumbent.offer(space, point)
    assert incumbent.point == (2,)


@pytest.mark.parametrize("seed", range(4))
def test_optuna_returns_feasible_points_no_better_than_the_optimum(seed, monkeypatch):
    monkeypatch.setattr("xscheduler.search.TRIALS", 40)
    spaces = [random_space(seed, SMALL), random_space(seed + 100, SMALL, opposed=True)]
    incumbent = Incumbent()
    black_box(spaces, incumbent)
    oracle = search([random_space(seed, SMALL), random_space(seed + 100, SMALL, opposed=True)], "exhaustive")
    assert sum(len(space.known) for space in spaces) <= 40
    assert incumbent.throughput <= oracle.throughput
    if incumbent.space:
        assert incumbent.space.meets(incumbent.point)


def test_optuna_tries_two_hundred_points_of_more():
    class Counting(Incumbent):
        offers = 0

        def offer(self, space, point):
            self.offers += 1
            super().offer(space, point)

    few, many = Counting(), Counting()
    black_box([line(list(range(1, 31)), [0] * 30, limit=1)], few)
    black_box([line(list(range(1, 401)), [0] * 400, limit=1)], many)
    assert (few.offers, many.offers) == (30, 200)


def test_an_unknown_method_is_refused_by_name():
    with pytest.raises(InputError, match="no search method 'magic': use bnb, exhaustive or optuna"):
        search([line([1], [1], limit=1)], "magic")


def test_monotonicity_is_counted_by_pairs_of_neighbours():
    clean = line([1, 2, 3], [1, 2, 3], limit=3)
    assert violations(clean, 0.0)[0].throughput == 0.0
    dented = line([1.0, 2.0, 1.9, 3.0, 4.0], [1.0, 2.0, 3.0, 2.0, 4.0], limit=3)
    found = violations(dented, 0.0)[0]
    assert found.throughput == pytest.approx(1 / 4)
    assert found.figures == pytest.approx((1 / 4,))
    assert violations(dented, 0.06)[0].throughput == 0.0
    assert violations(random_space(0, SMALL, opposed=True), 0.0)[-1].figures == (0.0, 0.0)
