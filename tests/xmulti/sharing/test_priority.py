"""SeaLLM's rule of sharing: the product of time and service time first, beside every other order of two services."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.xmulti.sharing.test_simulated_unit import MODELS, Cost, loads, times
from xcore.batching import BlockPool, Hints
from xcore.orders import fcfs
from xcore.orders.doubling_budget import DoublingBudget
from xcore.orders.mlfq import SkipJoinMLFQ
from xcore.orders.product import Product
from xcore.policies.one_phase import OnePhasePolicy as Limits
from xcore.policies.priority_sharing import PrioritySharing
from xcore.specs.workload import RequestLengths
from xmulti.sharing.replay import ModelLoad, replay_unit


class Shortest:
    """By output, then arrival; the same for all models."""

    changes = False

    def key(self, sequence, now):
        return sequence.ends - sequence.generated, sequence.arrival_s, sequence.index


ORDER = Shortest()


def ordered(models):
    return [ModelLoad(o.name, o.cost, o.requests, o.pool, o.limits, ORDER) for o in loads(models)]


@settings(deadline=None, max_examples=80)
@given(MODELS)
@example([([(1, 1, 1.625), (14, 9, 1.4375), (18, 13, 1.375)], 0.3)])
def test_rows_are_iterations_one_by_one_and_nothing_is_lost(models):
    rows = replay_unit(ordered(models), PrioritySharing(prompts_first=False))
    single = replay_unit(ordered(models), PrioritySharing(prompts_first=False), step_by_step=True)
    for name, one_by_one in times(single).items():
        assert np.allclose(times(rows)[name], one_by_one, rtol=1e-9)
    for place, (requests, _) in enumerate(models):
        assert [row[1] for row in times(rows)[f"m{place}"]] == [output for _, output, _ in requests]


def known(models, order):
    """Loads with times of their services, under one kind of order: times that no sum of iterations comes to exactly,
    where rounding would decide.
    """
    return [
        replace(
            load,
            order=order,
            hints=[
                Hints(service_time_s=0.1037 + place / 8, service_sd_s=0.0513, prefill_s=0.01 + r.input / 1000)
                for r in load.requests
            ],
        )
        for place, load in enumerate(loads(models))
    ]


@settings(deadline=None, max_examples=150)
@given(
    MODELS,
    st.sampled_from(
        [lambda: DoublingBudget(1.7, executed=True), lambda: SkipJoinMLFQ(0.0101731, executed=True), lambda: fcfs]
    ),
    st.booleans(),
)
@example(  # the second starves while it waits for blocks, and the third, which waits too, could have had its own
    [([(14, 10, 0.9375), (20, 6, 1.0), (6, 2, 1.0)], 0.5)], lambda: DoublingBudget(1.7, executed=True), True
)
def test_rows_under_budgets_and_levels_are_iterations_one_by_one(models, order, prompts_first):
    """Whose keys change as they run, or as they starve: a row ends where another could come first."""
    rows = replay_unit(known(models, order()), PrioritySharing(prompts_first))
    single = replay_unit(known(models, order()), PrioritySharing(prompts_first), step_by_step=True)
    assert rows.preemptions == single.preemptions
    for name, one_by_one in times(single).items():
        assert np.allclose(times(rows)[name], one_by_one, rtol=1e-9)


@pytest.mark.parametrize("prompts_first", [False, True])
def test_prompts_wait_for_residents_of_their_own_service_only_by_the_letter(prompts_first):
    hints = [Hints(service_time_s=5.0, service_sd_s=1.0)] * 2
    requests = [RequestLengths(4, 40), RequestLengths(4, 40, 0.1)]
    order = DoublingBudget(executed=True)
    run = replay_unit(
        [ModelLoad("m", Cost(), requests, BlockPool(40, 4), Limits(), order, hints)], PrioritySharing(prompts_first)
    )
    first, second = sorted(run.served["m"], key=lambda served: served.index)
    assert (second.start_s < first.finish_s) == prompts_first


def test_whoever_has_starved_comes_first_and_stays_first():
    """A long service beside short requests that never end: it starves after 3 L̂, and then runs to its end."""
    short = Hints(service_time_s=0.1, service_sd_s=0.0)
    long = Hints(service_time_s=0.5, service_sd_s=0.0)
    stream = [RequestLengths(4, 3, 0.05 * place) for place in range(100)]
    some = [
        ModelLoad("short", Cost(), stream, BlockPool(90, 4), Limits(1, 25), DoublingBudget(3.0, True), [short] * 100),
        ModelLoad(
            "long",
            Cost(),
            [RequestLengths(4, 20)],
            BlockPool(90, 4),
            Limits(),
            DoublingBudget(3.0, True),
            [long],
        ),
    ]
    run = replay_unit(some, PrioritySharing(prompts_first=False), timeline=True)
    (served,) = run.served["long"]
    assert 1.5 <= served.start_s < 1.6
    others = [span for span in run.spans if span.stage == 0 and served.start_s < span.start_s < served.finish_s]
    assert not [span for span in others if span.start_s > served.start_s + 1.0]
    assert served.finish_s < max(s.finish_s for s in run.served["short"])


@pytest.mark.parametrize("outputs", list(itertools.permutations([3, 6, 9])))
def test_the_first_by_key_runs_first_whichever_model_it_asks_for(outputs):
    one_at_a_time = Limits(max_num_seqs=1, max_num_batched_tokens=4)
    some = [ModelLoad(f"m{n}", Cost(), [RequestLengths(4, n)], BlockPool(12, 4), one_at_a_time, ORDER) for n in outputs]
    run = replay_unit(some, PrioritySharing(prompts_first=False))
    ends = [run.served[f"m{n}"][0].finish_s for n in sorted(outputs)]
    assert ends == sorted(ends)


def test_a_short_request_overtakes_a_long_one_that_runs():
    long = ModelLoad("long", Cost(), [RequestLengths(4, 40)], BlockPool(12, 4), Limits(), ORDER)
    short = ModelLoad("short", Cost(), [RequestLengths(4, 3, 0.3)], BlockPool(12, 4), Limits(), ORDER)
    run = replay_unit([long, short], PrioritySharing(prompts_first=False))
    alone = Cost().prefill_seconds([4], 1.0) + Cost().decode_seconds(1, np.array([5.0, 6.0]), 1.0).sum()
    iteration = Cost().decode_seconds(1, np.array([40.0]), 1.0)[0]
    assert run.served["short"][0].finish_s - 0.3 <= alone + iteration


def product_and_all_orders(outputs, counts):
    """Mean normalised latency by T'·L̂, and by every order: two services of equal times each, one request at a time."""
    names = ("a", "b")
    alone = {
        name: float(Cost().prefill_seconds([4], 1.0)) + decoding(n) for name, n in zip(names, outputs, strict=True)
    }

    def mean_normalised(order):
        some = [
            ModelLoad(
                name,
                Cost(),
                [RequestLengths(4, output)] * count,
                BlockPool(12, 4),
                Limits(max_num_seqs=1, max_num_batched_tokens=4),
                order,
                [Hints(output_tokens=output, time_s=alone[name], service_time_s=alone[name], service=name)] * count,
            )
            for name, output, count in zip(names, outputs, counts, strict=True)
        ]
        run = replay_unit(some, PrioritySharing(prompts_first=False))
        return np.mean([s.finish_s / alone[name] for name, served in run.served.items() for s in served])

    turns = set(itertools.permutations([name for name, count in zip(names, counts, strict=True) for _ in range(count)]))
    return mean_normalised(Product()), [mean_normalised(Fixed(of_names)) for of_names in turns]


@settings(deadline=None, max_examples=30)
@given(st.tuples(st.integers(2, 12), st.integers(2, 12)), st.tuples(st.integers(1, 3), st.integers(1, 3)))
@example((3, 9), (2, 2))
def test_the_product_of_time_and_service_time_gives_the_least_normalised_latency_of_all_orders(outputs, counts):
    """SeaLLM's Theorem 1, by brute force."""
    product, every = product_and_all_orders(outputs, counts)
    assert product == pytest.approx(min(every))


def test_the_order_matters():
    product, every = product_and_all_orders((3, 9), (2, 2))
    assert max(every) > 1.2 * product


def decoding(output):
    return float(Cost().decode_seconds(1, 5.0 + np.arange(output - 1.0), 1.0).sum())


class Fixed:
    """Services in these turns, each service's requests by index."""

    changes = False

    def __init__(self, turns):
        self.places = {name: [place for place, n in enumerate(turns) if n == name] for name in set(turns)}

    def key(self, sequence, now):
        return self.places[sequence.hints.service][sequence.index]


class Preempted:
    """Models that would decode, and whose residents are all preempted when they should."""

    def __init__(self, *keys):
        order = SimpleNamespace(key=lambda sequence, now: sequence, changes=True)
        self.running, self.asked = (), []
        self.tenants = [
            SimpleNamespace(
                job=None,
                ledger=SimpleNamespace(decoding=[key], waiting=SimpleNamespace(order=order)),
                can_prefill=lambda now: False,
                can_decode=lambda now: True,
            )
            for key in keys
        ]

    def decode(self, tenant, most):
        self.asked.append((self.tenants.index(tenant), most))


def test_the_next_model_runs_where_the_first_ones_residents_are_preempted():
    """By orders that don't know for how long a resident stays the first: one iteration at a time."""
    unit = Preempted(3, 1, 2)
    PrioritySharing(prompts_first=False).start(unit, 0.0)
    assert unit.asked == [(1, 1), (2, 1), (0, 1)]
