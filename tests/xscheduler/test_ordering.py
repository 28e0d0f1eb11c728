"""The choice of an order: what it needs, and what nothing uses, is said."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from tests.xcore import small_specs
from xcore.batching import Hints
from xcore.errors import InputError
from xcore.orders import ORDERS
from xcore.requests.request import Request
from xcore.specs.workload import RequestLengths, Workload
from xscheduler.ordering import SERVED, OrderChoice, check_served, served_hints, times_hints, usual_swap_blocks
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


def request(prompt, **fields):
    return Request("r", prompt, 10, **fields)


def test_a_servers_hints_are_the_times_alone_of_the_prompt_and_of_the_mean_request():
    """Beside replays of a request alone: of one token for the prompt, of the workload's lengths for the mean."""
    plan, profile = small_specs.schedule("orca", workload=Workload.fixed(30, 12)), small_specs.profile()
    hints = served_hints(OrderChoice.of("fcfs", False), plan, profile, None, lambda: 7.5)
    for tokens in (5, 60):
        found = hints(request(list(range(tokens)), slack_s=1.5))
        (alone,) = replay(plan, profile, [RequestLengths(tokens, 1)]).served
        assert found.prefill_s == pytest.approx(alone.finish_s, rel=0.02)
        assert found.service_time_s == pytest.approx(replay(plan, profile, [RequestLengths(30, 12)]).seconds, rel=0.02)
        assert found.slack_s == 1.5 and found.score is None and found.output_tokens is None


def test_a_server_follows_orders_that_need_prompts_and_labels_alone():
    """One of the others needs output lengths, or the whole list of requests."""
    for name, kind in ORDERS.items():
        if kind.ranked is not None:
            continue
        choice = OrderChoice(name, ranker=Path("missing.npz"))
        if name == "fcfs":
            check_served(choice, 5.0)
        elif name == "learned":
            with pytest.raises(InputError, match=r"missing\.npz"):
                check_served(choice, None)
        elif name in SERVED:
            assert not kind.oracle
            check_served(choice, 5.0)
        else:
            with pytest.raises(InputError, match=f"--order {name} needs request data that a server does not receive"):
                check_served(choice, None)
    assert {name for name, kind in ORDERS.items() if kind.oracle}.isdisjoint(SERVED)
    with pytest.raises(InputError, match="--order learned needs --ranker FILE"):
        check_served(OrderChoice("learned"), None)


@pytest.mark.parametrize("changes", [{"preempt": "recompute"}, {"warm": "prewarm"}])
def test_with_a_latency_bound_running_requests_and_warm_prefixes_stay(changes):
    choice = OrderChoice("mlfq", **changes)
    for no_bound in (None, inf):
        check_served(choice, no_bound)
    with pytest.raises(InputError, match="leave out --latency-bound, or --preempt and --warm-prefixes"):
        check_served(choice, 5.0)


def test_options_of_an_order_are_named_where_they_differ_from_the_usual():
    assert OrderChoice().plain and OrderChoice().options == ()
    options = {
        "--order": OrderChoice("sjf"),
        "--starvation-guard": OrderChoice(guarded=True),
        "--warm-prefixes": OrderChoice(warm="prewarm"),
        "--preempt": OrderChoice(preempt="swap"),
    }
    for option, choice in options.items():
        assert choice.options == (option,) and not choice.plain
    for made, why in (
        ({"ranker": Path("r.npz")}, "--ranker r.npz is only for --order learned, but the order is sjf"),
        ({"tau": 0.5}, "--ranker-tau 0.5 is only for --order learned"),
        ({"knob": 0.5}, "--knob 0.5 is only for --warm-prefixes prewarm"),
        ({"swap_blocks": 3, "preempt": "recompute"}, "--swap-blocks 3 is only for --preempt swap"),
        ({"swap_blocks": 3}, "--swap-blocks 3 is only for --preempt swap"),
    ):
        with pytest.raises(InputError, match=why):
            OrderChoice.of("sjf", False, **made)


@pytest.mark.parametrize(
    ("kv_blocks", "layers", "block_size", "blocks"),
    [(100, 12, 16, 100), (10**6, 12, 16, 3640), (10**6, 6, 16, 7281), (10**6, 12, 32, 1820), (5, 12, 2**22, 1)],
)
def test_swapped_requests_have_as_many_blocks_as_the_cache_within_four_gib(kv_blocks, layers, block_size, blocks):
    """GPT-2's layers have keys and values of 2 × 768 numbers of four bytes for each token: 73,728 bytes in twelve."""
    made = small_specs.schedule("orca", kv_blocks=kv_blocks, block_size=block_size)
    stage = replace(made.stages[0], decoder_layers=(0, layers))
    made = replace(made, stages=(stage, replace(stage, decoder_layers=(layers, 12)))[: 1 + (layers < 12)])
    assert usual_swap_blocks(made) == blocks
