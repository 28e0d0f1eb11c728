"""The search for a list of requests, against replays of every point of small spaces."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.xscheduler.test_rates import space_of
from xcore.quantity import percent_text
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import RequestLengths, Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler import list_search
from xscheduler.candidates import CandidateFamily
from xscheduler.list_meter import ListMeter, Played
from xscheduler.list_search import ListLead, ListSearch, tune_list
from xscheduler.open_search import neighbours
from xscheduler.search_problem import Limits
from xscheduler.setting_search import search_schedule
from xscheduler.settings import Setting
from xscheduler.spaces import spaces
from xsimulator.replay.event_simulator import replay

MODEL = builtin_model("opt-13b")
POLICIES = ("static", "orca", "chunked", "rra")
UNBOUNDED = Limits()


def skewed(count: int, seed: int, arrival_s: float = 0.0) -> list[RequestLengths]:
    """Lengths with a heavy tail, and random arrivals if a mean gap is given."""
    rng = np.random.default_rng(seed)
    inputs, outputs = 1 + np.minimum(rng.pareto(1.2, (2, count)) * [[60], [12]], [[900], [150]]).astype(int)
    arrivals = rng.exponential(arrival_s, count).cumsum() if arrival_s else np.zeros(count)
    return [RequestLengths(int(i), int(o), float(a)) for i, o, a in zip(inputs, outputs, arrivals, strict=True)]


def setting_of(requests: list[RequestLengths], cluster: str = "1xA40") -> Setting:
    where = parse_cluster(cluster)
    workload = Workload.from_requests("list", requests)
    return Setting(MODEL, where, workload, roofline_profile(MODEL, where, overhead_s=2e-3), "bf16", ())


def tuned(requests, limits=UNBOUNDED, cluster="1xA40", policies=POLICIES, fixed=None, **options):
    setting = setting_of(requests, cluster)
    steady = search_schedule(setting, limits.latency_s, policies=policies, fixed=fixed)
    answer = tune_list(setting, steady, requests, limits, policies=policies, fixed=fixed, **options)
    return setting, steady, answer


def best_of_all(search: ListSearch) -> tuple[float, float]:
    """The excess and the seconds of the best of all points that differ in their effect on the list."""
    played, search.replays = [], 10**9
    for space in spaces(search.policy, search.problem):
        useful = (range(search._useful(space, v.name, v.values)) for v in space.variables)
        leads = [search._lead(space, point) for point in itertools.product(*useful)]
        played += [(lead.played.excess, lead.played.seconds) for lead in leads if lead]
    return min(played)


@pytest.fixture
def searches(monkeypatch):
    """Each policy's search of the last call, with its result."""
    kept, best = {}, ListSearch.best

    def keep(self, steady):
        kept[self.policy] = (self, best(self, steady))
        return kept[self.policy][1]

    monkeypatch.setattr(ListSearch, "best", keep)
    return kept


@pytest.mark.parametrize(
    "count, policies",
    [
        (1, POLICIES),
        (5, POLICIES),
        (41, ("orca", "static")),
        (11, ("rra",)),
        pytest.param(41, ("rra",), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("bound_s", [None, 9.0, 3.0])
def test_no_point_of_the_spaces_completes_a_list_more_than_one_percent_sooner(searches, count, policies, bound_s):
    tuned(skewed(count, count), Limits(bound_s), policies=policies)
    for search, lead in searches.values():
        excess, seconds = best_of_all(search)
        assert lead.played.excess == pytest.approx(excess, abs=0.01)
        assert lead.played.seconds <= seconds * 1.01


def test_a_list_of_300_requests_is_served_as_soon_as_by_a_dense_grid(searches):
    tuned(skewed(300, 2), Limits(20.0), policies=("static", "chunked"))
    search, lead = searches["static"]
    assert (lead.played.excess, lead.played.seconds) <= best_of_all(search)
    search, lead = searches["chunked"]
    (space,), search.replays = spaces("chunked", search.problem), 10**9
    grid = itertools.product(range(0, 96, 3), range(0, len(space.variables[1].values), 4))
    best = min(found.played for point in grid if (found := search._lead(space, point)))
    assert lead.played.excess <= best.excess and lead.played.seconds <= best.seconds * 1.01


@pytest.mark.parametrize("cluster", ["1xA40", "2xA40"])
@pytest.mark.parametrize("limits", [UNBOUNDED, Limits(9.0), Limits(12.0, ttft_s=3.0, tpot_s=0.1)])
def test_it_is_never_later_than_the_steady_states_best_schedules(cluster, limits):
    requests = task("T").draw(41, seed=3)
    policies = ("static", "orca", "rra", "waa-c")
    setting, steady, answer = tuned(requests, limits, cluster, policies)
    meter = ListMeter(setting.profile, requests, limits)
    assert {a.policy for a in answer.alternatives} == set(policies)
    for before, after in zip(steady.alternatives, answer.alternatives, strict=True):
        if before.schedule and not (played := meter.play(before.schedule)).excess:
            assert after.schedule and meter.play(after.schedule) <= played
    if answer.schedule and steady.schedule:
        assert meter.play(answer.schedule).excess <= meter.play(steady.schedule).excess


def test_estimates_are_those_of_the_replay_and_the_cache_holds_the_list():
    requests = skewed(10, 4)
    setting, _, answer = tuned(requests, Limits(20.0))
    for alternative in answer.alternatives:
        run = replay(alternative.schedule, setting.profile, requests)
        assert alternative.estimate.throughput_tok_s == pytest.approx(run.estimate.throughput_tok_s)
        assert alternative.estimate.latency_s == pytest.approx(run.estimate.latency_s)
        assert run.estimate.latency_s <= 20.0
        assert alternative.estimate.kv_blocks == alternative.schedule.kv_blocks
    best = min(answer.alternatives, key=lambda a: -a.estimate.throughput_tok_s)
    assert answer.estimate.throughput_tok_s >= best.estimate.throughput_tok_s * (1 - list_search.TIE)
    assert answer.search.replays > 0


def test_requests_that_arrive_over_time_are_replayed_with_their_arrivals():
    requests = skewed(60, 5, arrival_s=0.2)
    setting, _, answer = tuned(requests, Limits(9.0), policies=("orca",))
    run = replay(answer.schedule, setting.profile, requests)
    assert run.estimate.latency_from == "arrival" and run.estimate.latency_s <= 9.0
    assert answer.estimate.latency_s == pytest.approx(run.estimate.latency_s)


def test_the_same_list_gets_the_same_schedule_with_a_fixed_number_of_replays():
    requests = skewed(12, 6)
    first, second = (tuned(requests, Limits(8.0), policies=("rra",))[2] for _ in range(2))
    assert first.schedule == second.schedule and first.search.replays == second.search.replays


def test_fixed_variables_and_the_run_s_own_cache_are_kept():
    requests = skewed(30, 7)

    def cached(schedule):
        return replace(schedule, prefix_caching=True, kv_blocks=500)

    options = {"policies": ("orca",), "fixed": {"max_num_seqs": 7}, "adapt": cached}
    prompts = [[1] * request.input for request in requests]
    _, _, answer = tuned(requests, prompts=prompts, **options)
    assert answer.schedule.control.max_num_seqs == 7
    assert answer.schedule.prefix_caching and answer.schedule.kv_blocks == 500


def test_bounds_that_no_replay_keeps_leave_the_answer_infeasible():
    requests = skewed(20, 8)
    _, steady, answer = tuned(requests, Limits(0.01))
    assert answer.schedule is None and answer.lowest_latency_s == steady.lowest_latency_s


def test_a_bound_that_only_the_list_keeps_is_feasible():
    """A steady state has the longest request among others; this list has one request."""
    alone = [RequestLengths(100, 40)]
    setting = setting_of(skewed(200, 9))
    bound_s = 1.2 * min(
        replay(a.schedule, setting.profile, alone).estimate.latency_s
        for a in search_schedule(setting, None, policies=("orca",)).alternatives
    )
    steady = search_schedule(setting, bound_s, policies=("orca",))
    assert steady.schedule is None
    answer = tune_list(setting, steady, alone, Limits(bound_s), policies=("orca",))
    assert answer.schedule and answer.estimate.latency_s <= bound_s


def test_a_long_list_is_left_to_the_steady_state(monkeypatch):
    monkeypatch.setattr(list_search, "MOST", 19)
    _, steady, answer = tuned(skewed(20, 3), policies=("orca",))
    assert answer is steady


def test_each_policy_says_how_much_longer_it_takes_than_the_best():
    """Beside replays of all of their schedules."""
    requests = skewed(20, 5)
    setting, _, answer = tuned(requests, UNBOUNDED, policies=("static", "chunked"))
    seconds = [replay(each.schedule, setting.profile, requests).seconds for each in answer.alternatives]
    for each, taken in zip(answer.alternatives, seconds, strict=True):
        longer = taken / min(seconds) - 1
        said = f"takes {percent_text(longer)} longer" if longer > 0 else "completes the 20 requests first"
        assert each.reason.startswith(said)
    assert max(seconds) > 1.05 * min(seconds)


def test_each_policy_tells_how_much_longer_it_takes_or_how_far_it_exceeds_the_bounds():
    """Four policies whose replays are known; behind a bound that one of them misses by a quarter."""
    played = {"static": (0.0, 12.0), "orca": (0.0, 10.0), "chunked": (0.0, 10.0 * (1 + 0.5 * list_search.TIE))}
    missing = {"rra": (0.25, 9.0)}
    requests, setting = skewed(3, 1), setting_of(skewed(3, 1))
    meter = ListMeter(setting.profile, requests, UNBOUNDED)
    answer = search_schedule(setting, None, policies=("orca",), fixed={"max_num_seqs": 2})

    def told(*names):
        known = {name: (played | missing)[name] for name in names}
        leads = {name: ListLead(Played(*of_it, 1.0), answer.schedule) for name, of_it in known.items()}
        return {name: list_search._alternative(name, leads, meter, None) for name in (*names, "hybrid")}

    found = told("static", "orca", "chunked", "rra")
    assert found["static"].reason == "takes 20% longer than the best policy to complete the 3 requests"
    soonest = "completes the 3 requests first, or as early as any other policy"
    assert found["orca"].reason == found["chunked"].reason == soonest
    late = "its times exceed the bounds by at least 25% in replays of the 3 requests"
    assert found["rra"].reason == late and found["rra"].schedule is None and found["rra"].estimate is None
    assert found["hybrid"].reason == "none of its schedules fits in memory" and found["hybrid"].schedule is None
    assert all(found[name].schedule == answer.schedule for name in played)
    alone = told("rra")["rra"]
    assert alone.reason == late and alone.schedule == answer.schedule, "nothing keeps the bounds"


@pytest.mark.parametrize(
    ("requests", "policies", "replays"), [(1, 1, 11_960), (300, 1, 6000), (300, 4, 1500), (900, 2, 1500)]
)
def test_longer_lists_and_more_policies_have_fewer_replays_each(requests, policies, replays):
    """Twelve thousand of a very short list, half as many of one of 300 requests."""
    assert list_search._replays(requests, policies) == replays


def test_spaces_are_opened_in_an_order_whatever_family_holds_them():
    """The oracle sorts all spaces. A family's spaces come no earlier than the family's ceiling allows."""
    rng = np.random.default_rng(3)
    alone = [space_of(f"alone {i}", rng.uniform(1, 100)) for i in range(20)]
    families = []
    for name in range(5):
        inside = [space_of(f"{name}.{i}", rng.uniform(1, 100)) for i in range(9)]
        families.append(
            (inside, CandidateFamily(f"family {name}", max(s.ceiling for s in inside), 9, lambda i=inside: i))
        )
    every = [*alone, *(space for inside, _ in families for space in inside)]
    found = list_search._first([*alone, *(family for _, family in families)], lambda member: -member.ceiling)
    assert found == sorted(every, key=lambda space: -space.ceiling)[: list_search.SPACES]
    assert list_search._first(alone[:3], lambda member: member.ceiling) == sorted(alone[:3], key=lambda s: s.ceiling)


@pytest.mark.parametrize(
    ("batch", "equal"),
    [(20, {21, 14, 11}), (21, {41, 21, 14}), (41, {41, 21}), (1, {2})],
)
def test_a_climb_tries_the_next_batches_that_divide_the_list_equally(batch, equal):
    """A list of 41 requests fits into one batch of 41, two of 21, three of 14, four of 11, and so on."""
    line = space_of("batches", sizes=(64,))
    space = SimpleNamespace(variables=line.variables, values=line.values, where=SimpleNamespace(replicas=1))
    search = ListSearch("orca", None, SimpleNamespace(together=lambda replicas: 41), lambda schedule: schedule, 9)
    points = list(search._around(ListLead(Played(0.0, 1.0, 1.0), None, space, (batch - 1,)), 1.25))
    beside = set(neighbours(space, (batch - 1,), 1.25))
    found = {space.values(point)[0] for point in points[: len(points) - len(beside)]}
    assert set(points[len(points) - len(beside) :]) == beside and found >= equal - {batch}
    assert all(-(-41 // -(-41 // size)) == size for size in found), "no part is larger than another by more than one"
