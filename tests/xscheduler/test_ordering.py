"""The choice of an order: what it needs, and what nothing uses, is said."""

from pathlib import Path

import pytest

from tests.xcore import small_specs
from xcore.batching import Hints
from xcore.errors import InputError
from xcore.orders import ORDERS
from xcore.specs.workload import RequestLengths
from xscheduler.ordering import OrderChoice, times_hints
from xsimulator.replay.event_simulator import replay


@pytest.mark.parametrize("name", ORDERS)
def test_demand_graphs_are_for_orders_that_rank_them(name):
    graphs = Path("graphs.json")
    ranks = ORDERS[name].ranked is not None
    needing, other = (None, graphs) if ranks else (graphs, None)
    assert OrderChoice.of(name, False, graphs=other).graphs == other
    with pytest.raises(InputError, match="needs --graphs FILE" if ranks else "graphs.json is only for --order"):
        OrderChoice.of(name, False, graphs=needing)


def test_prewarming_needs_demand_graphs_whatever_the_order():
    with pytest.raises(InputError, match="--warm-prefixes prewarm needs --graphs FILE"):
        OrderChoice.of("fcfs", False, warm="prewarm")
    assert OrderChoice.of("fcfs", False, graphs=Path("graphs.json"), warm="prewarm").warm == "prewarm"


def test_each_request_has_its_own_time_alone_where_outputs_are_known_and_else_the_mean():
    """Beside a replay of each request alone."""
    lengths = [RequestLengths(20, 5), RequestLengths(40, 30)]
    plan, profile = small_specs.schedule(), small_specs.profile()
    alone = [replay(plan, profile, [row]).seconds for row in lengths]
    known, unknown = (times_hints([Hints(), Hints()], lengths, plan, profile, known) for known in (True, False))
    assert [hints.time_s for hints in known] == pytest.approx(alone, rel=0.02)
    assert [hints.output_tokens for hints in known] == [5, 30]
    assert [(hints.time_s, hints.output_tokens) for hints in unknown] == [(None, None)] * 2
    for hints in (*known, *unknown):
        assert hints.service_time_s == pytest.approx(sum(alone) / 2, rel=0.02)
