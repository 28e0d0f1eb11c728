"""Promises of models that take turns: after its slack, a request comes before those of every model that came later."""

from itertools import count

import pytest

from tests.xmulti.sharing.test_simulated_unit import loads
from xcore.batching import Hints, Ledger, Sequence
from xcore.orders.promised import Promised
from xcore.orders.scored_length import ScoredLength
from xcore.policies.sharing import TimeSharing
from xcore.specs.workload import LengthDistribution
from xmulti.sharing.simulated_unit import SimulatedUnit
from xmulti.sharing.tenant import SimulatedTenant
from xsimulator.replay.event_queue import run
from xsimulator.replay.record import Record

OUTPUTS = LengthDistribution.from_samples([5, 10, 20])
BY_SCORE = {5: 2.0, 10: 1.0, 20: 0.0}
"""The score of each length: the higher, the shorter."""


def starts(requests, together=True):
    """The order in which requests (model, output tokens, arrival, slack) are prefilled, one at a time, by index."""
    arrivals, made = count(), loads([([(1, 1, 0.0)], 0.5)] * 2, seqs=2)
    records = [Record(len(requests), lambda _: 0, False) for _ in made]
    tenants = []
    for load, record in zip(made, records, strict=True):
        order = Promised(ScoredLength(load.name, list(BY_SCORE.values()), OUTPUTS), arrivals if together else None)
        tenants.append(
            SimulatedTenant(load.name, Ledger(load.pool, order, admission="grow"), load.cost, load.limits, record)
        )
    unit = SimulatedUnit(tenants, TimeSharing(in_order=True))
    for index, (model, output, arrival_s, slack_s) in enumerate(requests):
        run([unit], arrival_s)
        hints = Hints(score=BY_SCORE[output], slack_s=slack_s)
        unit.submit(tenants[model], Sequence(index, 4, output, arrival_s, output, hints=hints))
    run([unit])
    began = [(records[model].start_of(index), index) for index, (model, *_) in enumerate(requests)]
    return [index for _, index in sorted(began)]


BUSY = [(0, 20, 0.0, 0.0)]
"""A request whose prefill runs while the others arrive."""


@pytest.mark.parametrize("first", [0, 1])
def test_with_slack_the_shorter_one_comes_first_whatever_its_model(first):
    assert starts([*BUSY, (first, 20, 0.001, 1e9), (1 - first, 5, 0.002, 1e9)]) == [0, 2, 1]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("slack_s", [0.0, 1e9])
def test_without_slack_the_earlier_one_comes_first_whatever_its_model(first, slack_s):
    """The one that arrived later is shorter, and of the other model."""
    assert starts([*BUSY, (first, 20, 0.001, 0.0), (1 - first, 5, 0.002, slack_s)]) == [0, 1, 2]


def test_models_that_number_their_own_requests_would_disagree():
    """The second request is the first one of its model."""
    requests = [(0, 20, 0.0, 0.0), (0, 20, 0.001, 0.0), (1, 5, 0.002, 0.0)]
    assert starts(requests) == [0, 1, 2] and starts(requests, together=False) == [0, 2, 1]
