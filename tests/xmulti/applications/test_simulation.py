"""Applications on a shared LLM: all end exactly once, nothing leaks, and orders and prewarming do what they are for."""

import heapq
import itertools
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xmulti.applications import step_by_step
from xcore.applications.demand import ApplicationDemand, ServiceRates
from xcore.errors import InputError
from xmulti.applications.application_progress import DemandEstimates
from xmulti.applications.llm_backend import LLMLimits
from xmulti.applications.orders import (
    ApplicationSlack,
    ByApplication,
    ByRequest,
    EarliestDeadline,
    LowestMean,
    Oracle,
    VirtualTokens,
    application_gittins,
)
from xmulti.applications.simulation import Prewarming, simulate
from xmulti.applications.submission import Call, Submission
from xmulti.applications.warm_cache import POLICIES, WarmCache
from xmulti.files.call_log import LoggedCall, learn

RATES = ServiceRates(0.0001, 0.05)
SMALL = LLMLimits(RATES, batch=4, kv_tokens=2000)
ORDERS = {
    "request": ByRequest,
    "application": ByApplication,
    "vtc": VirtualTokens,
    "edf": EarliestDeadline,
    "gittins": application_gittins,
    "slack": ApplicationSlack,
    "mean": LowestMean,
    "oracle": lambda: Oracle(RATES),
}


def workload(seed, count=12, adapters=6, least_output=0):
    """Of two kinds: short ones, and ones that think and search in turns with parallel requests."""
    drawn = random.Random(seed)
    applications = []
    for index in range(count):
        kind = drawn.choice(("short", "react"))
        calls = [Call("think", "llm", drawn.randint(1, 300), drawn.randint(1, 60), drawn.randint(1, 3))]
        while kind == "react" and drawn.random() < 0.7:
            calls.append(Call("search", "docker", seconds=drawn.uniform(0.1, 5)))
            calls.append(
                Call("think", "llm", drawn.randint(1, 300), drawn.randint(least_output, 60), drawn.randint(1, 6))
            )
        arrival_s = drawn.uniform(0, 20)
        deadline_s = drawn.choice((None, arrival_s + drawn.uniform(1, 60)))
        adapter = drawn.randrange(adapters)
        applications.append(Submission(index, kind, arrival_s, tuple(calls), deadline_s, adapter))
    return applications


def estimates(refine=True):
    """Learned from other runs."""
    logged = []
    for application in workload(99, count=80):
        units = [call.unit for call in application.calls[1:]] + ["end"]
        for call, following in zip(application.calls, units, strict=True):
            demand = (call.input_tokens, call.output_tokens, call.parallel) if call.on_llm else (None, None, 1)
            seconds = None if call.on_llm else call.seconds
            backend = None if call.on_llm else call.backend
            logged.append(
                LoggedCall(application.name, application.index, call.unit, following, *demand, seconds, backend)
            )
    return DemandEstimates({graph.application: ApplicationDemand(graph, RATES) for graph in learn(logged)}, refine)


LEARNED = {refine: estimates(refine) for refine in (True, False)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(sorted(ORDERS)), st.sampled_from((None, *POLICIES)), st.booleans())
def test_all_end_exactly_once_and_nothing_leaks(seed, order, policy, contexts):
    """`simulate` itself asserts that places, blocks and slots are free at the end."""
    applications = workload(seed)
    slots = 400 * SMALL.kv_bytes_per_token if contexts else 2
    cache = WarmCache(slots, lambda size: 0.4, policy, contexts) if policy else None
    start_up_s, prewarming = {"docker": 1.5}, Prewarming(0.3)
    run = simulate(applications, ORDERS[order](), SMALL, LEARNED[True], cache, start_up_s, prewarming)
    assert len(run.completion_s) == len(applications)
    for application, completion_s in zip(applications, run.completion_s, strict=True):
        alone_s = sum(c.seconds if not c.on_llm else c.output_tokens * RATES.decode_s for c in application.calls)
        assert completion_s >= alone_s - 1e-9
    assert len(run.in_time) == sum(a.deadline_s is not None for a in applications)
    if cache:
        needed = sum(c.on_llm for a in applications for c in a.calls)
        turns = run.hits + run.misses
        assert turns <= needed - len(applications) if contexts else turns == needed
        assert cache.pins == 0 and cache.used <= cache.capacity


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(sorted(set(ORDERS) - {"vtc"})))
def test_request_by_request_it_comes_to_the_same(seed, order):
    """VTC's new clients begin at others' counters, which the oracle doesn't know. Calls without output free their
    places with their prompts here, an iteration later there.
    """
    applications = workload(seed, 20, least_output=1)
    followed = step_by_step.completion_s(applications, ORDERS[order](), SMALL, LEARNED[True], preempts=False)
    assert simulate(applications, ORDERS[order](), SMALL, LEARNED[True]).completion_s == pytest.approx(followed)


def test_one_application_alone_takes_its_own_time():
    calls = (Call("a", "llm", 100, 20, 2), Call("b", "docker", seconds=3.0), Call("c", "llm", 50, 10))
    run = simulate([Submission(0, "x", 5.0, calls)], ByRequest(), SMALL, start_up_s={"docker": 1.5})
    assert run.completion_s[0] == pytest.approx(200 * 1e-4 + 20 * 0.05 + 1.5 + 3.0 + 50 * 1e-4 + 10 * 0.05)


def test_the_batch_and_the_cache_limit_what_runs_at_once():
    calls = (Call("a", "llm", 0, 100, 8),)
    alone_s = 100 * RATES.decode_s
    halves = simulate([Submission(0, "x", 0.0, calls)], ByRequest(), LLMLimits(RATES, 4, 2000))
    quarters = simulate([Submission(0, "x", 0.0, calls)], ByRequest(), LLMLimits(RATES, 8, 200))
    assert halves.completion_s[0] == pytest.approx(2 * alone_s)
    assert quarters.completion_s[0] == pytest.approx(4 * alone_s)
    with pytest.raises(InputError, match="a call of 100 tokens, but the LLM's cache has only 99"):
        simulate([Submission(0, "x", 0.0, calls)], ByRequest(), LLMLimits(RATES, 8, 99))


def test_a_call_may_fill_the_cache_and_end_on_its_deadline():
    calls = (Call("a", "llm", 50, 50),)
    exact = LLMLimits(RATES, 1, 100)
    (completion_s,) = simulate([Submission(0, "x", 0.0, calls)], ByRequest(), exact).completion_s
    for deadline_s, kept in ((completion_s, True), (completion_s - 1e-6, False)):
        run = simulate([Submission(0, "x", 0.0, calls, deadline_s)], ByRequest(), exact)
        assert run.in_time == (kept,)


def job(index, tokens, arrival_s=0.0, name="short", calls=1, **more):
    return Submission(index, name, arrival_s, (Call("think", "llm", 0, tokens),) * calls, **more)


ONE = LLMLimits(RATES, batch=1, kv_tokens=10_000)


def ends(applications, order):
    run = simulate(applications, order, ONE, LEARNED[True])
    order_s = {a.index: a.arrival_s + c for a, c in zip(applications, run.completion_s, strict=True)}
    return sorted(order_s, key=lambda index: order_s[index])


def test_orders_by_arrival_differ_on_second_calls():
    """The first application's second call comes after the other's first."""
    pair = [job(0, 100, calls=2), job(1, 100, 1.0)]
    assert ends(pair, ByRequest()) == [1, 0]
    assert ends(pair, ByApplication()) == [0, 1]


def test_edf_the_oracle_and_vtc():
    first = job(9, 20)
    assert ends([first, job(0, 50, 0.1, deadline_s=90.0), job(1, 50, 0.2, deadline_s=9.0)], EarliestDeadline()) == [
        9,
        1,
        0,
    ]
    assert ends([first, job(0, 500, 0.1), job(1, 50, 0.2)], Oracle(RATES)) == [9, 1, 0]
    greedy = [first, job(0, 50, 0.1, calls=3), job(1, 40, 0.2, calls=2)]
    assert ends(greedy, VirtualTokens()) == [9, 1, 0]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_known_of_demands_shortens_completion(seed):
    """Under load: the oracle below Gittins below first come, first served."""
    applications = workload(seed, count=80)
    mean_s = {
        name: statistics.fmean(simulate(applications, ORDERS[name](), SMALL, LEARNED[True]).completion_s)
        for name in ("oracle", "gittins", "application", "request")
    }
    assert mean_s["oracle"] < mean_s["gittins"] < 0.95 * min(mean_s["application"], mean_s["request"])


def test_least_slack_keeps_deadlines_that_edf_misses():
    """Two places: the long one's calls follow each other, so it must begin at once, though it may end last."""
    applications = [job(i, 20, deadline_s=7.9) for i in range(7)]
    applications += [job(9, 20, 0.0, "react", calls=7, deadline_s=8.0)]
    pair = LLMLimits(RATES, batch=2, kv_tokens=10_000)
    assert simulate(applications, EarliestDeadline(), pair).in_time == (*[True] * 7, False)
    assert all(simulate(applications, ApplicationSlack(), pair, LEARNED[True]).in_time)


def test_those_that_are_too_late_anyway_may_wait_for_others():
    """The long one's deadline is gone before it could end: only where it is demoted does the short one end in time."""
    applications = [job(0, 20, 0.0, "react", calls=7, deadline_s=0.001), job(1, 20, deadline_s=1.5)]
    in_time = [simulate(applications, ApplicationSlack(demote), ONE, LEARNED[True]).in_time for demote in (False, True)]
    assert in_time == [(False, False), (False, True)]


@pytest.mark.parametrize("seed", range(3))
def test_a_smaller_knob_saves_more_start_up_and_wastes_more(seed):
    """Golden direction of Hermes' Fig. 14, in the whole simulation; nobody waits for the LLM, for queues change with
    each container's start."""
    applications, idle = workload(seed, count=40), LLMLimits(ServiceRates(0.0, 0.05), 10_000, 10**7)
    runs = [
        simulate(applications, ByApplication(), idle, LEARNED[True], None, {"docker": 1.5}, Prewarming(knob))
        for knob in (0.1, 0.4, 0.9)
    ]
    assert [run.saved_s for run in runs] == sorted((run.saved_s for run in runs), reverse=True)
    assert [run.wasted_s for run in runs] == sorted((run.wasted_s for run in runs), reverse=True)
    assert runs[0].saved_s > runs[-1].saved_s
    literal = [
        simulate(applications, ByApplication(), idle, LEARNED[True], None, {"docker": 1.5}, Prewarming(knob, True))
        for knob in (0.1, 0.4)
    ]
    assert literal[0].saved_s < literal[1].saved_s and literal[0].wasted_s < literal[1].wasted_s
    never = simulate(applications, ByApplication(), idle, LEARNED[True], None, {"docker": 1.5})
    assert (never.saved_s, never.wasted_s) == (0.0, 0.0)


@pytest.mark.parametrize(("active", "together"), [(None, 2), (2, 2), (1, 1)])
def test_calls_that_run_have_so_many_adapters_at_most(active, together):
    """Two slots, two adapters that lie there from calls before: both calls run at once only if both may be active."""
    pair = [job(0, 10, adapter=0), job(1, 10, adapter=1), job(2, 10, 50.0, adapter=0), job(3, 10, 50.0, adapter=1)]
    cache = WarmCache(2, lambda size: 0.5, "lru", active=active)
    run = simulate(pair, ByRequest(), SMALL, None, cache)
    ends_s = sorted(each.arrival_s + s for each, s in zip(pair, run.completion_s, strict=True))[2:]
    alone_s = 10 * RATES.decode_s
    assert ends_s == pytest.approx([50 + alone_s, 50 + alone_s * (3 - together)])
    assert (run.hits, run.misses) == (2, 2), "the second one's turn comes when it may run, and its adapter lies there"


def test_calls_of_an_active_adapter_run_beside_each_other():
    cache = WarmCache(2, lambda size: 0.5, "lru", active=1)
    alike = [job(0, 10, adapter=0), job(1, 10, adapter=0)]
    run = simulate(alike, ByRequest(), SMALL, None, cache)
    assert run.completion_s == pytest.approx([0.5 + 10 * RATES.decode_s] * 2)


def test_prefetching_and_prewarming_hit_more_than_lru():
    applications = workload(1, count=60, adapters=12)
    hits = {}
    for policy in POLICIES:
        cache = WarmCache(4, lambda size: 0.3, policy)
        run = simulate(applications, ByApplication(), SMALL, LEARNED[True], cache, {}, Prewarming(0.1))
        hits[policy] = run.hits
    assert hits["lru"] < hits["epwq"] <= hits["prewarm"]


def by_iteration(applications, limits, key):
    """When applications end: the LLM one iteration after the other, other backends beside it. Waiting calls by `key` of
    the application's and the call's arrival.
    """
    ends, waiting, running, numbers = {}, [], [], itertools.count()
    begins = sorted((a.arrival_s, next(numbers), a, 0) for a in applications)
    now, prefilled = 0.0, False
    while begins or waiting or running:
        while begins and begins[0][0] <= now:
            at, _, application, position = heapq.heappop(begins)
            call = application.calls[position] if position < len(application.calls) else None
            if call is None:
                ends[application.index] = at
            elif call.on_llm:
                waiting.append([key(application.arrival_s, at), next(numbers), call.parallel, application, position])
            else:
                heapq.heappush(begins, (at + call.seconds, next(numbers), application, position + 1))
        admitted = [] if prefilled else first_requests(waiting, running, limits)
        prefilled = bool(admitted)
        if admitted:
            now += sum(a.calls[p].input_tokens for *_, a, p in admitted) * limits.rates.prefill_s
            running += [[a.calls[p].output_tokens, number, a, p] for number, a, p in admitted]
        elif running:
            now += limits.rates.decode_s
            for request in running:
                request[0] -= 1
            alive = {number for left, number, *_ in running if left} | {number for _, number, *_ in waiting}
            over = {number: (a, p) for left, number, a, p in running if not left and number not in alive}
            running = [request for request in running if request[0]]
            for _, (a, p) in sorted(over.items()):
                heapq.heappush(begins, (now, next(numbers), a, p + 1))
        elif begins:
            now = begins[0][0]
    return [ends[a.index] - a.arrival_s for a in applications]


def first_requests(waiting, running, limits):
    """Those that begin, in order, until one doesn't fit: their calls."""
    admitted, places = [], limits.batch - len(running)
    held = sum(a.calls[p].input_tokens + a.calls[p].output_tokens for *_, a, p in running)
    for entry in sorted(waiting, key=lambda entry: entry[:2]):
        _, number, _, application, position = entry
        call = application.calls[position]
        while entry[2]:
            held += call.input_tokens + call.output_tokens
            if held > limits.kv_tokens or len(admitted) == places:
                return admitted
            entry[2] -= 1
            admitted.append((number, application, position))
        waiting.remove(entry)
    return admitted


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([ByRequest, ByApplication]), st.sampled_from([4, 40]))
def test_rows_are_iterations_one_by_one(seed, order, batch):
    """Of calls that make a token at least."""
    applications = [
        replace(a, calls=tuple(replace(c, output_tokens=max(1, c.output_tokens)) for c in a.calls))
        for a in workload(seed, count=30)
    ]
    limits = LLMLimits(RATES, batch, kv_tokens=2000)
    key = {ByRequest: lambda application_s, call_s: call_s, ByApplication: lambda application_s, call_s: application_s}
    expected = by_iteration(applications, limits, key[order])
    assert simulate(applications, order(), limits).completion_s == pytest.approx(expected, rel=1e-9)


def test_what_comes_in_the_midst_of_an_iteration_comes_before_what_ends_with_it():
    """One place. The second application comes in the last iteration of the first one's first call, whose second call so
    waits behind it: where all are equal, the order of arrival decides.
    """

    class Alike:
        def key(self, call, now):
            return (call.index,)

    applications = [job(0, 4, calls=2), job(1, 4, 3.5 * RATES.decode_s)]
    run = simulate(applications, Alike(), ONE)
    assert run.completion_s == pytest.approx([12 * RATES.decode_s, 4.5 * RATES.decode_s])
