"""Replicas of a plan's models: the dispatcher beside a reference, and what plans may say about replicas."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.cli.plan_tables import plan_table
from tests.xmulti.sharing.test_plan_replay import PROFILE, sharing
from tests.xsimulator.replay.test_event_simulator import schedule
from xcore import document
from xcore.batching.dispatch import fewest_requests
from xcore.errors import InputError
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import Plan, Share, joined
from xcore.specs.workload import RequestLengths
from xmulti.sharing import plan_replay
from xmulti.sharing.plan_engines import PlanEngines
from xmulti.sharing.plan_replay import replay_plan

CLUSTER = parse_cluster("4xA40")
SHARE = Share("priority", pool="merged")


def on(name, device, share=None, **changes):
    model = sharing(name, share)
    return replace(model, devices=(device,), schedule=replace(model.schedule, **changes))


def plan_of(*models):
    return Plan(Plan.VERSION, "seallm", CLUSTER, models)


PLANS = st.sampled_from(
    [
        plan_of(on("a", 0), on("a", 1)),
        plan_of(on("a", 0, SHARE), on("a", 1), on("b", 0, SHARE)),
        plan_of(on("a", 2, SHARE), on("a", 0), on("b", 2, SHARE), on("b", 1, SHARE), on("c", 1, SHARE), on("d", 3)),
    ]
)
ROWS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 30), st.floats(0, 0.5, exclude_min=True)), min_size=1, max_size=12
)


@settings(deadline=None, max_examples=25)
@given(PLANS, st.fixed_dictionaries(dict.fromkeys("abcd", ROWS)))
def test_nothing_is_lost_and_each_request_goes_where_the_fewest_are(plan, rows):
    """The reference knows where and when all earlier requests ended, and counts those that hadn't."""
    requests = {name: [RequestLengths(*row) for row in rows[name]] for name in plan.replicas}
    engines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_replay, "PlanEngines", lambda *a: engines.append(PlanEngines(*a)) or engines[-1])
        replays = replay_plan(plan, lambda model: PROFILE, requests)
    sent = {key: engine.unit for each in engines for key, engine in each.dispatcher.sent.items()}
    ends = {(name, s.index): s for name, of_model in replays.items() for s in of_model.served}
    asked = {(name, i): row for name, of_model in requests.items() for i, row in enumerate(of_model)}
    assert ends.keys() == asked.keys() and sent.keys() == {key for key in asked if key[0] != "d"}
    assert all((ends[key].input_tokens, ends[key].output_tokens) == (r.input, r.output) for key, r in asked.items())
    order = sorted(sent, key=lambda key: (asked[key].arrival_s, *key))
    for number, key in enumerate(order):
        now = asked[key].arrival_s
        hosts = [unit for unit in plan.units if any(model.name == key[0] for model in unit)]
        counts = [sum(sent[b] == unit and ends[b].finish_s >= now for b in order[:number]) for unit in hosts]
        assert hosts.index(sent[key]) == counts.index(min(counts))


def test_equal_replicas_take_turns_while_nothing_ends_and_the_first_goes_first():
    assert [fewest_requests(counts) for counts in ([0, 0], [1, 0], [2, 2, 1], [3, 1, 1])] == [0, 1, 2, 1]
    plan = plan_of(on("a", 0), on("a", 1))
    both = replay_plan(plan, lambda model: PROFILE, {"a": [RequestLengths(9, 5)] * 8}, timeline=True)["a"]
    one = replay_plan(plan_of(on("a", 0)), lambda model: PROFILE, {"a": [RequestLengths(9, 5)] * 4})["a"]
    ends = sorted(served.finish_s for served in both.served)
    assert ends[::2] == ends[1::2] == pytest.approx(sorted(served.finish_s for served in one.served))
    assert {span.device for span in both.spans} == {0, 1} and both.sent == (4, 4)


def test_a_plans_table_has_a_row_for_each_replica():
    columns, rows, title = plan_table(plan_of(on("a", 0, SHARE), on("a", 2), on("b", 0, SHARE)))
    assert "2 models on 4xA40" in title
    shown = [[row[columns.index(name)] for name in ("model", "devices", "shared by")] for row in rows]
    assert shown == [["a", "0", "priority"], ["  replica 2", "2", "–"], ["b", "0", "priority"]]


def test_units_are_joined_by_the_replicas_that_they_have():
    plan = plan_of(on("a", 0), on("b", 2, SHARE), on("c", 2, SHARE), on("c", 1), on("d", 3))
    names = [[[model.name for model in unit] for unit in units] for units in joined(plan.units)]
    assert names == [[["a"]], [["b", "c"], ["c"]], [["d"]]]
    chain = plan_of(on("a", 0, SHARE), on("b", 1, SHARE), on("b", 0, SHARE), on("c", 2), on("c", 1, SHARE))
    assert len(joined(chain.units)) == 1 and chain.replicas["b"] == (chain.models[1], chain.models[2])


def test_plans_with_replicas_are_written_and_read_and_those_that_contradict_themselves_refused(tmp_path):
    plan = plan_of(on("a", 0, SHARE), on("a", 1), on("b", 0, SHARE))
    document.write(tmp_path / "plan.json", plan)
    assert document.read(Plan, tmp_path / "plan.json") == plan
    with pytest.raises(InputError, match=r"has model 'a' twice on the devices \[0\]"):
        plan_of(on("a", 0, SHARE), on("a", 0, SHARE))
    with pytest.raises(InputError, match="replicas of model 'a' differ in the model, the latency bound, the rate"):
        plan_of(on("a", 0), replace(on("a", 1), rate_seq_s=2.0))
    with pytest.raises(InputError, match="a device may belong to only one model"):
        plan_of(on("a", 0), on("b", 0))
    assert schedule("orca").latency_bound_s is None
    with pytest.raises(InputError, match="replicas of model 'a' differ"):
        plan_of(on("a", 0), on("a", 1, latency_bound_s=3.0))
