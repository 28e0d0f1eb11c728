"""Models that share devices in simulated time: rows of iterations beside iterations one by one, and who waits."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xcore.batching import BlockPool, Ledger
from xcore.batching.shared_pool import QuotaPool, Store
from xcore.policies.one_phase import OnePhasePolicy as Limits
from xcore.policies.sharing import FirstComeSharing, TimeSharing
from xcore.specs.workload import RequestLengths
from xmulti.sharing.replay import ModelLoad, replay_unit
from xmulti.sharing.tenant import SimulatedTenant

BLOCK = 4
REQUESTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.floats(0, 3)), min_size=1, max_size=10)
MODELS = st.lists(st.tuples(REQUESTS, st.sampled_from([0.3, 0.5, 0.9])), min_size=1, max_size=4)


class Cost:
    """Prompts by their tokens over their share; decoding by sequences and contexts."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def prefill_seconds(self, tokens, share):
        return self.scale * (0.01 + 0.001 * sum(tokens)) / share

    def decode_seconds(self, sequences, contexts, share):
        return self.scale * (0.02 + 0.001 * sequences + 0.0001 * contexts) * max(1.0, 0.4 / share)


def loads(models, blocks=12, seqs=3, switch_s=0.0):
    store = Store(blocks * len(models))
    return [
        ModelLoad(
            f"m{place}",
            Cost(1 + place / 10),
            [RequestLengths(i, o, a) for i, o, a in rows],
            QuotaPool(store, 1, BLOCK, blocks),
            Limits(seqs, 25, decode_share=share),
            switch_s=switch_s * place,
        )
        for place, (rows, share) in enumerate(models)
    ]


def times(run):
    return {
        name: [(s.index, s.output_tokens, s.start_s, s.first_token_s, s.finish_s) for s in sorted(served, key=index)]
        for name, served in run.served.items()
    }


def index(served):
    return served.index


@settings(deadline=None, max_examples=150)
@given(MODELS, st.sampled_from(["space", "time"]), st.sampled_from([1.0, 1.3]))
@example([([(1, 4, 1.875)], 0.3), ([(13, 1, 1.9375), (14, 20, 1.28125)], 0.3)], "space", 1.0)
@example(  # two jobs end together
    [
        ([(14, 3, 1.125), (19, 6, 1.0625)], 0.3),
        ([(1, 3, 1.125)], 0.9),
        ([(1, 6, 1.0625)], 0.3),
        ([(1, 1, 1.21875), (19, 13, 0.8205206899700064)], 0.5),
    ],
    "space",
    1.0,
)
def test_rows_are_iterations_one_by_one_and_nothing_is_lost(models, sharing, contention):
    rows = replay_unit(loads(models), sharing, contention)
    single = replay_unit(loads(models), sharing, contention, step_by_step=True)
    assert rows.preemptions == single.preemptions
    for name, one_by_one in times(single).items():
        assert np.allclose(times(rows)[name], one_by_one, rtol=1e-9)
    for place, (requests, _) in enumerate(models):
        of_model = times(rows)[f"m{place}"]
        assert [row[:2] for row in of_model] == [(i, output) for i, (_, output, _) in enumerate(requests)]


@settings(deadline=None, max_examples=60)
@given(MODELS, st.sampled_from(["space", "time"]), st.integers(1, 4))
def test_a_replay_that_is_stopped_has_served_what_it_would_have_served_by_then(models, sharing, most):
    whole, seen = replay_unit(loads(models), sharing), []

    def stop(served, now):
        seen.append(now)
        return sum(map(len, served.values())) >= most

    part = replay_unit(loads(models), sharing, stop=stop)
    for name, served in part.served.items():
        assert served == tuple(s for s in whole.served[name] if s.finish_s <= seen[-1])


@settings(deadline=None, max_examples=60)
@given(MODELS)
def test_time_sharing_runs_one_job_at_a_time(models):
    run = replay_unit(loads(models), "time", timeline=True)
    spans = sorted(run.spans, key=lambda span: span.start_s)
    assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(spans))
    assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(sum(run.busy_s.values()))


@settings(deadline=None, max_examples=60)
@given(MODELS)
def test_shares_never_exceed_the_devices_and_their_overlap(models):
    run = replay_unit(loads(models), "space", timeline=True)
    limits = {place: Limits(decode_share=share) for place, (_, share) in enumerate(models)}
    for span in run.spans:
        at = [s for s in run.spans if s.start_s <= span.start_s < s.end_s]
        shares = [1.0 if s.phase == "encode" else limits[s.stage].decode_share for s in at]
        assert len(at) == 1 or sum(shares) <= 1.3 + 1e-9
        assert sum(s.phase == "encode" for s in at) <= 1
        assert len({s.stage for s in at}) == len(at)


FIRST_COME = FirstComeSharing()


@settings(deadline=None, max_examples=100)
@given(MODELS)
def test_first_come_first_served_by_rows_is_iterations_one_by_one(models):
    rows = replay_unit(loads(models, switch_s=0.01), FIRST_COME)
    single = replay_unit(loads(models, switch_s=0.01), FIRST_COME, step_by_step=True)
    assert rows.preemptions == single.preemptions
    for name, one_by_one in times(single).items():
        assert np.allclose(times(rows)[name], one_by_one, rtol=1e-9)


@pytest.mark.parametrize("turns", [True, False])
def test_who_decodes_next(turns):
    """Two models whose prompts come at once: by turns they decode one token each; else the first's until it is done."""
    rule = TimeSharing(in_order=False) if turns else FIRST_COME
    pair = [
        ModelLoad(name, Cost(), [RequestLengths(4, 5, at)], BlockPool(12, BLOCK))
        for name, at in (("a", 0.001), ("b", 0.0))
    ]
    run = replay_unit(pair, rule, timeline=True)
    decoded = [span.stage for span in run.spans if span.phase == "decode" for _ in range(span.tokens)]
    assert decoded == ([1, 0] * 4 if turns else [1] * 4 + [0] * 4)


def test_an_iteration_after_another_models_takes_longer():
    """By turns every row's first does; not the very first, which is after nobody's."""
    pair = [
        ModelLoad(name, Cost(), [RequestLengths(4, output)], BlockPool(12, BLOCK), switch_s=switch_s)
        for name, output, switch_s in (("a", 3, 0.5), ("b", 5, 0.1))
    ]
    run, usual = replay_unit(pair, TimeSharing(in_order=False), timeline=True), Cost()
    longer = []
    for span in run.spans:
        decode_s = usual.decode_seconds(1, 5.0, 1.0) * span.tokens
        alone = usual.prefill_seconds([4], 1.0) if span.phase == "encode" else decode_s
        longer.append((span.stage, round(span.end_s - span.start_s - alone, 2)))
    assert longer == [(0, 0.0), (1, 0.1), (0, 0.5), (1, 0.1), (0, 0.5), (1, 0.1)], "the last row has three iterations"


@pytest.mark.parametrize("strict", [True, False])
def test_a_prompt_at_its_models_limit_holds_all_later_ones_back(strict):
    """Model a decodes one sequence at a time: its second prompt waits; first come, first served, b's later one too."""
    rule = FIRST_COME if strict else TimeSharing(in_order=True)
    requests = {"a": [RequestLengths(4, 6), RequestLengths(4, 2, 0.001)], "b": [RequestLengths(4, 2, 0.002)]}
    pair = [ModelLoad(name, Cost(), rows, BlockPool(12, BLOCK), Limits(1)) for name, rows in requests.items()]
    run = replay_unit(pair, rule)
    first, second = run.served["a"]
    (other,) = run.served["b"]
    assert (other.start_s >= second.start_s >= first.finish_s) == strict
    assert (other.start_s < first.finish_s) != strict


def test_every_models_blocks_are_checked_at_the_end(monkeypatch):
    checked = []
    check = Ledger.check
    monkeypatch.setattr(Ledger, "check", lambda ledger: (checked.append(ledger), check(ledger)))
    replay_unit(loads([([(1, 2, 0.0)], 0.5), ([(3, 4, 0.0)], 0.5)]), "time")
    assert len(set(checked)) == len(checked) == 2


def test_one_model_alone_takes_the_sum_of_its_iterations():
    cost = Cost()
    run = replay_unit([ModelLoad("m", cost, [RequestLengths(8, 3)], BlockPool(12, BLOCK))], "space")
    (served,) = run.served["m"]
    contexts = np.array([9.0, 10.0])
    assert served.first_token_s == pytest.approx(cost.prefill_seconds([8], 1.0))
    assert served.finish_s == pytest.approx(served.first_token_s + cost.decode_seconds(1, contexts, 1.0).sum())


def test_contention_counts_where_another_job_runs():
    requests = [RequestLengths(8, 12)]
    pair = [ModelLoad(name, Cost(), requests, BlockPool(12, BLOCK), Limits(decode_share=0.5)) for name in "ab"]
    alone, slower = (
        replay_unit(pair, "space").seconds,
        replay_unit(
            [ModelLoad(name, Cost(), requests, BlockPool(12, BLOCK), Limits(decode_share=0.5)) for name in "ab"],
            "space",
            1.5,
        ).seconds,
    )
    assert 1.2 * alone < slower < 1.5 * alone


def test_a_prompt_waits_for_no_more_than_the_iteration_that_runs():
    """Decoding holds back while a prompt waits for multiprocessors."""
    busy = ModelLoad("busy", Cost(), [RequestLengths(4, 40)], BlockPool(12, BLOCK), Limits(decode_share=0.9))
    late = ModelLoad("late", Cost(), [RequestLengths(4, 2, 0.5)], BlockPool(12, BLOCK), Limits(decode_share=0.9))
    run = replay_unit([busy, late], "space")
    (served,) = run.served["late"]
    iteration = float(Cost().decode_seconds(1, np.array([40.0]), 0.9)[0])
    assert 0 < served.start_s - 0.5 < iteration


def test_what_is_asked_for_nothing_takes_no_time_and_spans_are_kept_on_request():
    nothing = ModelLoad("a", Cost(), [], BlockPool(12, BLOCK))
    run = replay_unit([nothing], "time")
    assert run.seconds == 0.0 and run.served == {"a": ()} and run.busy_s == {"a": 0.0}
    some = [ModelLoad("a", Cost(), [RequestLengths(4, 3)], BlockPool(12, BLOCK))]
    assert replay_unit(some, "time").spans == () and replay_unit(some, "time", timeline=True).spans


@pytest.mark.parametrize(("iterations", "blocks"), [(1, 1), (4, 2), (5, 3)])
def test_a_row_lacks_the_blocks_that_its_sequences_do_not_have_yet(iterations, blocks):
    """Blocks of four tokens. Sequences of 4, 2 and 8 cached tokens have 1, 1 and 4: the last has enough."""
    decode = [SimpleNamespace(cached=cached, blocks=range(has)) for cached, has in ((4, 1), (2, 1), (8, 4))]
    ledger = SimpleNamespace(pool=SimpleNamespace(block_size=4))
    tenant = SimulatedTenant("a", ledger, Cost(), Limits(), None)
    assert tenant._missing(SimpleNamespace(decode=decode), iterations) == blocks
    assert tenant.ahead == 0, "nothing runs"
    tenant.job = SimpleNamespace(step=SimpleNamespace(decode=decode), ends=np.arange(1.0, 1.0 + iterations))
    assert tenant.ahead == blocks and tenant._taken(0.5) == 1 == tenant._taken(0.0)
    tenant.job.step = SimpleNamespace(decode=[])
    assert tenant.ahead == tenant._taken(0.5) == 0
