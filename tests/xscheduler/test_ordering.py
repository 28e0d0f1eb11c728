"""The choice of an order: what it needs, and what nothing uses, is said."""

from pathlib import Path

import pytest

from xcore.errors import InputError
from xcore.orders import ORDERS
from xscheduler.ordering import OrderChoice


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
