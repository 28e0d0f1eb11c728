"""Clusters of engines: one engine is a unit; replicas, the dispatcher, and engines that are replaced."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xmulti.sharing.test_simulated_unit import MODELS, Cost, times
from xcore.batching import BlockPool
from xcore.policies.one_phase import OnePhasePolicy as Limits
from xcore.policies.sharing import TimeSharing
from xcore.specs.workload import RequestLengths
from xmulti.sharing.cluster_replay import ServiceRequests, SharedEngine, SimulatedCluster, replay_cluster
from xmulti.sharing.replay import SHARINGS, ModelLoad, replay_unit

LIMITS = Limits(3, 25)


def load(name, requests=(), scale=1.0, pool=None):
    return ModelLoad(name, Cost(scale), requests, pool or BlockPool(12, 4), LIMITS)


def engine(first, *names, sharing=SHARINGS["time"]):
    return SharedEngine((first,), tuple(load(name) for name in names), sharing())


def asked(**rows):
    return {name: ServiceRequests(tuple(RequestLengths(*row) for row in of_one)) for name, of_one in rows.items()}


@settings(deadline=None, max_examples=60)
@given(MODELS, st.sampled_from([SHARINGS["time"], SHARINGS["priority"]]))
def test_one_engine_is_a_unit(models, sharing):
    rows = {f"m{place}": requests for place, (requests, _) in enumerate(models)}
    unit = replay_unit([load(n, [RequestLengths(*row) for row in r]) for n, r in rows.items()], sharing())
    cluster = replay_cluster([engine(0, *rows, sharing=sharing)], asked(**rows))
    for name, of_one in times(unit).items():
        assert np.allclose([row[2:] for row in times(cluster)[name]], [row[2:] for row in of_one], rtol=1e-12)
    assert cluster.preemptions == sum(unit.preemptions.values())


@settings(deadline=None, max_examples=80)
@given(MODELS, st.sampled_from([SHARINGS["time"], SHARINGS["priority"]]))
def test_replicas_lose_nothing_and_each_request_goes_where_the_fewest_are(models, sharing):
    """By brute force: whoever ran on an engine, as its own ledger saw it, beside what had arrived and wasn't done."""
    rows = {f"m{place}": requests for place, (requests, _) in enumerate(models)}
    cluster = SimulatedCluster([engine(place, *rows, sharing=sharing) for place in range(3)], asked(**rows))
    where = {}
    for place, running in enumerate(cluster.running):
        for name, tenant in running.tenants.items():
            submit = tenant.ledger.submit

            def noted(sequences, place=place, name=name, submit=submit):
                for sequence in sequences:
                    where[name, sequence.index] = place
                submit(sequences)

            tenant.ledger.submit = noted
    cluster.run()
    result = cluster.result()
    ends = {(name, s.index): s for name, served in result.served.items() for s in served}
    assert len(ends) == sum(map(len, rows.values())) == len(where)
    order = sorted(ends, key=lambda key: (ends[key].arrival_s, *key))
    for number, key in enumerate(order):
        now, counts = ends[key].arrival_s, [0, 0, 0]
        for before in order[:number]:
            counts[where[before]] += ends[before].finish_s > now
        assert counts[where[key]] == min(counts)


def test_services_that_no_engine_has_are_left_out():
    result = replay_cluster([engine(0, "a")], asked(a=[(4, 3, 0.0)], b=[(4, 3, 0.0)]))
    assert len(result.served["a"]) == 1 and not result.served["b"]


def test_overhead_lengthens_every_iteration():
    requests = asked(a=[(4, 9, 0.0)])
    plain = replay_cluster([engine(0, "a")], requests).served["a"][0].finish_s
    slower = (
        replay_cluster([SharedEngine((0,), (load("a"),), TimeSharing(in_order=False), 1.08)], requests)
        .served["a"][0]
        .finish_s
    )
    assert slower == pytest.approx(1.08 * plain)


@settings(deadline=None, max_examples=80)
@given(MODELS, st.floats(0, 4), st.floats(0, 1), st.sampled_from([SHARINGS["time"], SHARINGS["priority"]]))
def test_replacing_engines_loses_nothing_and_leaves_the_past_as_it_was(models, now, stopped_s, sharing):
    rows = {f"m{place}": requests for place, (requests, _) in enumerate(models)}
    names = list(rows)
    before = [engine(0, *names, sharing=sharing), engine(1, names[0], sharing=sharing)]
    after = [engine(0, names[0], sharing=sharing), engine(1, *names, sharing=sharing)]
    untouched = replay_cluster(
        [engine(0, *names, sharing=sharing), engine(1, names[0], sharing=sharing)], asked(**rows)
    )
    cluster = SimulatedCluster(before, asked(**rows))
    resumes_s = cluster.replace(after, now, stopped_s)
    cluster.run()
    result = cluster.result()
    assert resumes_s >= now + stopped_s
    for name, requests in rows.items():
        assert [s.output_tokens for s in result.served[name]] == [output for _, output, _ in requests]
        for was, came in zip(untouched.served[name], result.served[name], strict=True):
            if was.finish_s <= now:
                assert came == was
            elif len(names) > 1:  # else the second engine stays
                assert came.finish_s > now


def test_an_engine_that_stays_runs_on_while_the_others_stop():
    requests = asked(a=[(4, 30, 0.0)], b=[(4, 30, 0.0)])
    alone = replay_cluster([engine(0, "a"), engine(1, "b")], requests)
    stays = engine(0, "a")
    cluster = SimulatedCluster([stays, engine(1, "b")], requests)
    cluster.replace(
        [stays, SharedEngine((1,), (load("b", scale=0.5), load("a")), TimeSharing(in_order=False))], 0.2, 5.0
    )
    cluster.run()
    result = cluster.result()
    assert result.served["a"] == alone.served["a"]
    assert result.served["b"][0].finish_s > 5.2
    assert result.served["b"][0].first_token_s == alone.served["b"][0].first_token_s  # had come already


def test_tokens_that_were_made_are_prefilled_again_and_not_made_again():
    requests = asked(a=[(4, 30, 0.0)])
    cluster = SimulatedCluster([engine(0, "a")], requests)
    over_s = cluster.replace([engine(1, "a")], 0.5)
    cluster.run()
    made = 1 + int(
        np.searchsorted(np.cumsum(Cost().decode_seconds(1, 5.0 + np.arange(29), 1.0)) + 0.014, over_s, "right")
    )
    again = Cost().prefill_seconds([4 + made], 1.0)
    rest = Cost().decode_seconds(1, 4.0 + made + 1 + np.arange(30 - made - 1), 1.0).sum()
    assert cluster.result().served["a"][0].finish_s == pytest.approx(over_s + again + rest)
