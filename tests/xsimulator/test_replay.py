"""The event simulator: by hand for one request, and nothing lost or overlapping for many."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.builtin_models import builtin_model
from exegpt.cluster import parse_cluster
from exegpt.errors import InputError
from exegpt.policies import make_ledger
from exegpt.schedule import Stage
from exegpt.workload import RequestLengths
from tests.exegpt.nouns import MODEL, profile, schedule
from xprofiler.roofline import roofline_profile
from xsimulator.replay import replay
from xsimulator.stage import Chunks, stage_costs

PROFILE = profile()
POLICIES = ("rra", "static", "hybrid", "orca", "chunked")
APART = ("waa-c", "waa-m")
T5 = builtin_model("t5-small")
T5_PROFILE = roofline_profile(T5, parse_cluster("4xA40"), overhead_s=1e-4)


def costs():
    return stage_costs(schedule().stages, PROFILE, set())[0]


def encode(*lengths):
    return costs().step(Chunks(lengths, [0] * len(lengths), len(lengths)), 0, 0.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_request_is_its_encoding_and_its_iterations(policy):
    run = replay(schedule(policy), PROFILE, [RequestLengths(20, 5, 2.0)])
    (served,) = run.served
    first = 2.0 + encode(20)
    finish = first + sum(costs().step(None, 1, context) for context in (21, 22, 23, 24))
    assert served.start_s == 2.0
    assert served.first_token_s == pytest.approx(first)
    assert served.finish_s == pytest.approx(finish)
    assert run.seconds == pytest.approx(finish)
    assert run.estimate.latency_from == "arrival"


def test_a_static_batch_computes_finished_rows_along():
    run = replay(schedule("static"), PROFILE, [RequestLengths(10, 2), RequestLengths(10, 4), RequestLengths(7, 1)])
    starts = {s.index: s.start_s for s in run.served}
    finish = {s.index: s.finish_s for s in run.served}
    steps = [costs().step(None, 3, context) for context in ((11 + 11 + 7) / 3, (11 + 12 + 7) / 3, (11 + 13 + 7) / 3)]
    assert set(starts.values()) == {0.0}
    assert finish[2] == pytest.approx(encode(10, 10, 7))
    assert finish[0] == pytest.approx(finish[2] + steps[0])
    assert finish[1] == pytest.approx(finish[2] + sum(steps))


def test_a_prompt_in_chunks_asks_for_its_past():
    run = replay(schedule("chunked", max_num_batched_tokens=64), PROFILE, [RequestLengths(100, 1)])
    pieces = [Chunks([64], [0], 0), Chunks([36], [64], 1)]
    assert run.seconds == pytest.approx(sum(costs().step(piece, 0, 0.0) for piece in pieces))


def test_a_request_larger_than_the_cache_is_refused():
    with pytest.raises(InputError, match="Request 1 needs 8 KV blocks"):
        replay(schedule(kv_blocks=4), PROFILE, [RequestLengths(10, 4), RequestLengths(100, 20)])


REQUESTS = st.lists(
    st.builds(RequestLengths, st.integers(1, 90), st.integers(1, 20), st.sampled_from([0.0, 0.0, 0.05, 5.0])),
    min_size=1,
    max_size=25,
)


def stages_of(model, phase, first, count):
    """`count` stages of one device each, from the rank `first` on, which together hold what a phase needs."""
    made = []
    for i in range(count):
        encoder, decoder = (
            (round(i * layers / count), round((i + 1) * layers / count)) if layers else None
            for layers in (model.encoder_layers, model.layers)
        )
        if model.encoder_layers and phase == "encode":
            decoder = None
        if phase == "decode":
            encoder = None
        made.append(Stage((first + i,), 1, phase, encoder, decoder))
    return tuple(made)


@st.composite
def plans(draw, policies=(*POLICIES, *APART), models=(MODEL, T5)):
    """A schedule of any policy on one to three stages a side, and the profile that goes with it."""
    policy, model = draw(st.sampled_from(policies)), draw(st.sampled_from(models))
    stages = stages_of(model, "both", 0, draw(st.integers(1, 3)))
    if policy in APART:
        count = draw(st.integers(1, 2))
        stages = stages_of(model, "encode", 0, count) + stages_of(model, "decode", count, draw(st.integers(1, 2)))
    changes = {}
    if policy in ("rra", "static"):
        changes["encode_micro_batches"] = draw(st.sampled_from([None, 1, 2, 5]))
    made = schedule(
        policy,
        model,
        stages=stages,
        cluster=parse_cluster("4xA40"),
        kv_blocks=draw(st.integers(7, 40)),
        replicas=draw(st.sampled_from([1, 1, 2])),
        **changes,
    )
    return made, T5_PROFILE if model is T5 else PROFILE


@settings(max_examples=150)
@given(plans(), REQUESTS)
def test_everybody_is_served_once_and_in_time(plan, requests):
    run = replay(*plan, requests)
    assert sorted(s.index for s in run.served) == list(range(len(requests)))
    for s in run.served:
        asked = requests[s.index]
        assert (s.input_tokens, s.output_tokens, s.arrival_s) == (asked.input, asked.output, asked.arrival_s)
        assert asked.arrival_s <= s.start_s < s.first_token_s <= s.finish_s <= run.seconds
        assert (s.first_token_s == s.finish_s) == (asked.output == 1)
    assert [s.finish_s for s in run.served] == sorted(s.finish_s for s in run.served)
    assert all(0 <= share <= 1 + 1e-9 for share in run.estimate.utilisation)
    assert len(run.estimate.utilisation) == len(plan[0].stages) * plan[0].replicas


@settings(max_examples=150)
@given(plans(), REQUESTS)
def test_cells_keep_the_recurrence(plan, requests):
    """A stage does one piece after the other, and tokens are computed once on every stage."""
    made, tables = plan
    spans = replay(made, tables, requests).timeline.spans
    until = {}
    for span in spans:
        assert span.start_s >= until.get(span.device, 0.0) - 1e-12
        until[span.device] = span.end_s
    decoder_only = made.model.spec is MODEL
    for stage in made.stages:
        tokens = sum(
            r.input * (stage.phase != "decode") + (r.output - decoder_only) * (stage.phase != "encode")
            for i, r in enumerate(requests)
            if i % made.replicas == 0
        )
        done = sum(span.tokens for span in spans if span.device == stage.devices[0])
        assert done >= tokens if made.policy in ("static", "hybrid") else done == tokens


@settings(max_examples=200)
@given(plans(), REQUESTS)
def test_following_many_iterations_at_once_is_following_each(plan, requests):
    quick, slow = replay(*plan, requests, timeline=False), replay(*plan, requests, step_by_step=True)
    assert not quick.timeline.spans
    assert [s.index for s in quick.served] == [s.index for s in slow.served]
    for one, other in zip(quick.served, slow.served, strict=True):
        times = [(s.start_s, s.first_token_s, s.finish_s) for s in (one, other)]
        assert times[0] == pytest.approx(times[1], rel=1e-9)
    assert quick.estimate.utilisation == pytest.approx(slow.estimate.utilisation, rel=1e-9)


@settings(max_examples=50)
@given(plans(), REQUESTS)
def test_no_block_stays_behind(plan, requests):
    ledgers = []

    def watched(*arguments):
        ledgers.append(make_ledger(*arguments))
        return ledgers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xsimulator.replay.make_ledger", watched)
        replay(*plan, requests)
    assert len(ledgers) == plan[0].replicas
    for ledger in ledgers:
        ledger.check()
        assert ledger.idle and ledger.pool.free == ledger.pool.total


def test_a_pipeline_works_on_several_micro_batches_at_once():
    """Stages overlap, each does one piece at a time, and no token is begun before its predecessor is out."""
    stages = tuple(Stage((i,), 1, "both", None, (4 * i, 4 * i + 4)) for i in range(3))
    made = schedule("orca", stages=stages, cluster=parse_cluster("3xA40"), max_num_seqs=9, prefills_per_step=3)
    run = replay(made, PROFILE, [RequestLengths(30 + i, 12) for i in range(30)])
    assert sorted(s.index for s in run.served) == list(range(30))
    begun = {}
    for span in run.timeline.spans:
        assert span.start_s >= begun.get(span.stage, 0.0) - 1e-12  # a stage does one piece at a time
        begun[span.stage] = span.end_s
    for micro_batch in range(3):
        own = [span for span in run.timeline.spans if span.micro_batch == micro_batch]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(own))
    assert sum(run.estimate.utilisation) > 1.8
