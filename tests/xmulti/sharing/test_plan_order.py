"""Orders of a plan's requests: scores of different rankers on one scale, and replays between FCFS and the oracle."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xmulti.sharing.test_simulated_unit import MODELS, loads, times
from tests.xsimulator.replay.test_event_simulator import PROFILE, schedule
from xcore.batching import Hints, Sequence
from xcore.errors import InputError
from xcore.orders.scored_length import ScoredLength
from xcore.orders.shortest import SJF
from xcore.policies.priority_sharing import PrioritySharing
from xcore.policies.sharing import TimeSharing
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.request_times import summarise
from xcore.specs.workload import LengthDistribution, RequestLengths
from xmulti.sharing.plan_order import PlanOrder, replayed_order
from xmulti.sharing.plan_replay import replay_plan
from xmulti.sharing.replay import replay_unit

SCORES = st.lists(st.floats(-5, 5), min_size=1, max_size=30)
LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=20).map(LengthDistribution.from_samples)
GROWING = [lambda x: 7 * x - 40, np.exp, lambda x: np.arctan(x) * 1e3, lambda x: x**3 + x]


def waiting(scores):
    return [Sequence(i, 4, 9, i / 8, hints=Hints(score=float(score))) for i, score in enumerate(scores)]


@given(SCORES, SCORES, SCORES, LENGTHS, LENGTHS, st.sampled_from(GROWING))
def test_an_increasing_change_of_one_models_scores_changes_nothing(known, asked, of_other, outputs, others, change):
    """The order within the model, the order over both models and the lengths stay."""
    known, asked = np.round(known, 3), np.round(asked, 3)  # so that different scores stay different
    other = ScoredLength("other", [0.0, 0.5], others)
    before, after = ScoredLength("changed", known, outputs), ScoredLength("changed", change(known), outputs)
    assert [before.length(s) for s in asked] == [after.length(s) for s in change(asked)]

    def over_both(changed, scores):
        keyed = [(changed.key(s, 0.0), "changed", s.index) for s in waiting(scores)]
        keyed += [(other.key(s, 0.0), "other", s.index) for s in waiting(of_other)]
        return [(model, index) for _, model, index in sorted(keyed)]

    assert over_both(before, asked) == over_both(after, change(asked))


@given(SCORES, SCORES, LENGTHS)
def test_a_score_stands_for_the_quantile_of_the_outputs_and_orders_its_model(known, asked, outputs):
    order = ScoredLength("m", known, outputs)
    for score in asked:
        below, ties = sum(k < score for k in known), sum(k == score for k in known)
        place = (below + ties / 2) / len(known)
        assert order.length(score) == outputs.quantile(1 - place)
    by_key = sorted(waiting(asked), key=lambda s: order.key(s, 0.0))
    assert [s.index for s in by_key] == sorted(range(len(asked)), key=lambda i: (-asked[i], i))


def test_equal_scales_take_models_by_their_lengths():
    """Even the longest chat answer is expected to be shorter than the shortest report."""
    chat = ScoredLength("chat", [1.0, 2.0, 3.0], LengthDistribution.from_samples([5, 10, 20]))
    report = ScoredLength("report", [100.0, 200.0, 300.0], LengthDistribution.from_samples([50, 100, 200]))
    assert chat.length(0.5) == 20 and report.length(400.0) == 50
    (low,), (high,) = waiting([0.5]), waiting([400.0])
    assert chat.key(low, 0.0) < report.key(high, 0.0)


def test_scores_need_a_scale():
    with pytest.raises(InputError, match="model 'm' has no scores to compare with"):
        ScoredLength("m", (), LengthDistribution.fixed(3))


def plan_of(*models):
    devices = max(device for model in models for device in model.devices) + 1
    return Plan(Plan.VERSION, "exegpt", parse_cluster(f"{devices}xA40"), models)


def planned(name, share, outputs, device=0):
    workload = replace(schedule("orca").workload, output=LengthDistribution.from_samples(outputs), requests=None)
    control = replace(schedule("orca").control, max_num_seqs=8)
    grows = replace(schedule("orca"), admission="grow", kv_blocks=400, workload=workload, control=control)
    return PlannedModel(name, (device,), grows, summarise((), 0.0), share=share)


def load(count=250):
    """Return requests of two models at a higher rate than they can serve; `long` has outputs four times as long."""
    rng = np.random.default_rng(5)
    of_models = {}
    for name, mean in (("short", 3.0), ("long", 4.4)):
        outputs = np.clip(np.rint(rng.lognormal(mean, 0.8, count)), 1, 400).astype(int).tolist()
        arrivals = np.cumsum(rng.exponential(ARRIVES_S, count)).tolist()
        of_models[name] = [RequestLengths(12, o, a) for o, a in zip(outputs, arrivals, strict=True)]
    return of_models


ARRIVES_S = 0.02
PLANS = {
    "time, quotas": (Share("time"), 0),
    "time, merged": (Share("time", pool="merged"), 0),
    "priority": (Share("priority", pool="merged"), 0),
    "space": (Share("space", 0.5), 0),
    "alone": (None, 1),
}


def per_token_s(plan, requests, order):
    replays = replay_plan(plan, lambda model: PROFILE, requests, order=order)
    for name, rows in requests.items():
        assert sorted(s.index for s in replays[name].served) == [*range(len(rows))], "nothing is lost"
        assert all(s.output_tokens == rows[s.index].output for s in replays[name].served)
    served = [s for of_model in replays.values() for s in of_model.served]
    return float(np.mean([(s.finish_s - s.arrival_s) / s.output_tokens for s in served]))


@pytest.mark.parametrize("how", PLANS)
def test_the_learned_order_lies_between_fcfs_and_the_oracle(how):
    """The mean latency per token is compared, under overload."""
    share, other = PLANS[how]
    requests = load()
    models = [planned(n, share, [r.output for r in rows], i * other) for i, (n, rows) in enumerate(requests.items())]
    plan = plan_of(*models)
    latencies = {
        name: per_token_s(plan, requests, replayed_order(name, tau, requests))
        for name, tau in (("fcfs", None), ("learned", 0.62), ("sjf", None))
    }
    print(how, {name: round(value, 4) for name, value in latencies.items()})
    assert latencies["learned"] < 0.8 * latencies["fcfs"]
    assert 0.97 * latencies["sjf"] < latencies["learned"]


@pytest.mark.parametrize("share", [Share("time"), Share("priority", pool="merged"), None])
def test_fcfs_is_by_arrival_as_plans_without_priority_are(share):
    requests = load(80)
    models = [planned(n, share, [9], i * (share is None)) for i, n in enumerate(requests)]
    plan = plan_of(*models)
    usual, asked = (per_token_s(plan, requests, order) for order in (None, PlanOrder("fcfs")))
    assert (usual == asked) == (share is None or share.by == "time")


@settings(deadline=None, max_examples=30)
@given(st.permutations(range(12)))
def test_perfect_scores_on_the_outputs_own_scale_are_the_oracle(places):
    """Scores in the exact order, with the distribution of the real lengths, give shortest first over both models."""
    requests = {
        "short": [RequestLengths(8, 2 + 3 * place, 0.01 * i) for i, place in enumerate(places[:6])],
        "long": [RequestLengths(8, 2 + 3 * place, 0.01 * i) for i, place in enumerate(places[6:])],
    }
    plan = plan_of(
        *(planned(n, Share("priority", pool="merged"), [r.output for r in rs]) for n, rs in requests.items())
    )
    learned, oracle = (replayed_order(name, tau, requests) for name, tau in (("learned", 1.0), ("sjf", None)))
    assert per_token_s(plan, requests, learned) == pytest.approx(per_token_s(plan, requests, oracle))


@settings(deadline=None, max_examples=60)
@given(MODELS, st.sampled_from(["sjf", "learned"]), st.booleans())
def test_rows_are_iterations_one_by_one(models, name, by_priority):
    """A row lasts until a request ends or arrives, if the order's keys are constant."""
    how, rule = [], PrioritySharing(prompts_first=True) if by_priority else TimeSharing(in_order=False)
    for load in loads(models):
        scores = [-(r.output % 7) for r in load.requests]
        scale = ScoredLength(load.name, scores, LengthDistribution.from_samples([r.output for r in load.requests]))
        hints = [Hints(output_tokens=r.output, score=s) for r, s in zip(load.requests, scores, strict=True)]
        how.append(replace(load, order=scale if name == "learned" else SJF(), hints=hints))
    rows, single = replay_unit(how, rule), replay_unit([*map(fresh, how, loads(models))], rule, step_by_step=True)
    assert rows.preemptions == single.preemptions
    for model, one_by_one in times(single).items():
        assert np.allclose(times(rows)[model], one_by_one, rtol=1e-9)


def fresh(load, other):
    """Return the load with the empty pool of another one."""
    return replace(load, pool=other.pool)


def test_requests_that_go_to_replicas_keep_their_order():
    requests = load(120)
    outputs = {name: [r.output for r in rows] for name, rows in requests.items()}
    share = Share("time")
    models = [planned(name, share, outputs[name], device) for device in (0, 1) for name in outputs]
    plan = plan_of(*sorted(models, key=lambda model: model.name))
    by = {n: per_token_s(plan, requests, replayed_order(n, None, requests)) for n in ("fcfs", "learned", "sjf")}
    assert 0.97 * by["sjf"] < by["learned"] < 0.9 * by["fcfs"]


def test_other_orders_and_rankers_without_the_learned_one_are_refused():
    with pytest.raises(InputError, match="--order gittins does not order the requests of a plan here: use one of fcfs"):
        replayed_order("gittins", None, {})
    with pytest.raises(
        InputError, match=r"--ranker-tau 0\.6 is only for --order learned, but the order is that of the"
    ):
        replayed_order(None, 0.6, {})
    assert replayed_order(None, None, {}) is None
