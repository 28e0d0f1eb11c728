"""SeaLLM's rule of sharing: the product of time and service time first, beside every other order of two services."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings

from exegpt.batching import BlockPool, Hints
from exegpt.orders.product import Product
from exegpt.policies.priority_sharing import PrioritySharing
from exegpt.workload import RequestLengths
from tests.xsimulator.multimodel.test_unit import MODELS, Cost, loads, times
from xsimulator.multimodel.replay import Load, replay_unit
from xsimulator.multimodel.tenant import Limits


class Shortest:
    """By output, then arrival; the same for all models."""

    changes = False

    def key(self, sequence, now):
        return sequence.ends - sequence.generated, sequence.arrival_s, sequence.index


ORDER = Shortest()


def ordered(models):
    return [Load(o.name, o.cost, o.requests, o.pool, o.limits, ORDER) for o in loads(models)]


@settings(deadline=None, max_examples=80)
@given(MODELS)
@example([([(1, 1, 1.625), (14, 9, 1.4375), (18, 13, 1.375)], 0.3)])
def test_rows_are_iterations_one_by_one_and_nothing_is_lost(models):
    rows = replay_unit(ordered(models), PrioritySharing())
    single = replay_unit(ordered(models), PrioritySharing(), step_by_step=True)
    for name, one_by_one in times(single).items():
        assert np.allclose(times(rows)[name], one_by_one, rtol=1e-9)
    for place, (requests, _) in enumerate(models):
        assert [row[1] for row in times(rows)[f"m{place}"]] == [output for _, output, _ in requests]


@pytest.mark.parametrize("outputs", list(itertools.permutations([3, 6, 9])))
def test_the_first_by_key_runs_first_whichever_model_it_asks_for(outputs):
    one_at_a_time = Limits(max_num_seqs=1, max_num_batched_tokens=4)
    some = [Load(f"m{n}", Cost(), [RequestLengths(4, n)], BlockPool(12, 4), one_at_a_time, ORDER) for n in outputs]
    run = replay_unit(some, PrioritySharing())
    ends = [run.served[f"m{n}"][0].finish_s for n in sorted(outputs)]
    assert ends == sorted(ends)


def test_a_short_request_overtakes_a_long_one_that_runs():
    long = Load("long", Cost(), [RequestLengths(4, 40)], BlockPool(12, 4), Limits(), ORDER)
    short = Load("short", Cost(), [RequestLengths(4, 3, 0.3)], BlockPool(12, 4), Limits(), ORDER)
    run = replay_unit([long, short], PrioritySharing())
    alone = Cost().prefill_seconds([4], 1.0) + Cost().decode_seconds(1, np.array([5.0, 6.0]), 1.0).sum()
    iteration = Cost().decode_seconds(1, np.array([40.0]), 1.0)[0]
    assert run.served["short"][0].finish_s - 0.3 <= alone + iteration


def test_the_product_of_time_and_service_time_gives_the_least_normalised_latency_of_all_orders():
    """Two services of equal times each, one request at a time (SeaLLM's Theorem 1): T'·L̂ beside all orders."""
    outputs = {"short": 3, "long": 9}
    alone = {n: Cost().prefill_seconds([4], 1.0) + decoding(output) for n, output in outputs.items()}

    def mean_normalised(order):
        some = [
            Load(
                name,
                Cost(),
                [RequestLengths(4, output)] * 2,
                BlockPool(12, 4),
                Limits(max_num_seqs=1, max_num_batched_tokens=4),
                order,
                [Hints(output_tokens=output, time_s=alone[name], service_time_s=alone[name], service=name)] * 2,
            )
            for name, output in outputs.items()
        ]
        run = replay_unit(some, PrioritySharing())
        return np.mean([s.finish_s / alone[name] for name, served in run.served.items() for s in served])

    every = [
        mean_normalised(Fixed(turns))
        for turns in itertools.permutations([("short", 0), ("short", 1), ("long", 0), ("long", 1)])
    ]
    assert mean_normalised(Product()) == pytest.approx(min(every))
    assert max(every) > 1.2 * min(every)


def decoding(output):
    return float(Cost().decode_seconds(1, 5.0 + np.arange(output - 1.0), 1.0).sum())


class Fixed:
    """As given, by service and index."""

    changes = False

    def __init__(self, turns):
        self.turns = turns

    def key(self, sequence, now):
        return self.turns.index((sequence.hints.service, sequence.index))
