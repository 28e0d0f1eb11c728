"""The event simulator: by hand for one request, and nothing lost or overlapping for many."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import MODEL, profile, schedule
from xcore.batching import MicroBatch, Sequence, deal
from xcore.errors import InputError
from xcore.policies.from_schedule import make_ledger
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.profile import Table
from xcore.specs.schedule import Stage
from xcore.specs.workload import RequestLengths, Workload
from xprofiler.roofline import roofline_profile
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.cost.decode_cache import DecodeStepCache
from xsimulator.cost.stage import Chunks
from xsimulator.replay.cells import _shape
from xsimulator.replay.event_simulator import in_turn, replay
from xsimulator.steady import rra
from xsimulator.steady.scenario import Scenario

PROFILE = profile()
POLICIES = ("rra", "static", "hybrid", "orca", "chunked")
DISAGGREGATED = ("waa-c", "waa-m")
T5 = builtin_model("t5-small")
T5_PROFILE = roofline_profile(T5, parse_cluster("4xA40"), overhead_s=1e-4)


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


def costs():
    return ReplicaCost.of(schedule(), PROFILE).encode.costs[0]


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
    chunks = [Chunks([64], [0], 0), Chunks([36], [64], 1)]
    assert run.seconds == pytest.approx(sum(costs().step(chunk, 0, 0.0) for chunk in chunks))


def test_tokens_that_are_computed_again_see_all_before_them():
    """A preempted sequence of an encoder-decoder decodes three tokens and one more, beside a sequence of 40 tokens."""
    again, other = Sequence(0, 7, 9, cached=7, behind=3), Sequence(1, 40, 9, cached=40)
    seen = [8, 9, 10, 11, 41]
    assert _shape(MicroBatch(0, (), (again, other))) == (None, len(seen), pytest.approx(sum(seen) / len(seen)))


def disaggregated(model=MODEL, **changes):
    """A WAA schedule, of one stage a side where not said otherwise."""
    stages = stages_of(model, "encode", 0, 1) + stages_of(model, "decode", 1, 1)
    return schedule("waa-c", model, **({"stages": stages, "cluster": parse_cluster("4xA40")} | changes))


def test_waa_transfers_kv_between_its_sides():
    """Two prompts encoded together; the first token comes from the encoding side, the others after the transfer."""
    made = disaggregated()
    replica = ReplicaCost.of(made, PROFILE)
    run = replay(made, PROFILE, [RequestLengths(20, 3), RequestLengths(30, 1)])
    (encoder,), (decoder,) = replica.encode.costs, replica.decode.costs
    first = encoder.step(Chunks([20, 30], [0, 0], 2), 0, 0.0)
    finish = first + replica.kv_transfer_seconds(50) + decoder.step(None, 1, 21) + decoder.step(None, 1, 22)
    times = {s.index: (s.start_s, s.first_token_s, s.finish_s) for s in run.served}
    assert times[1] == (0.0, pytest.approx(first), pytest.approx(first))
    assert times[0] == (0.0, pytest.approx(first), pytest.approx(finish))


def test_waa_joins_at_the_end_of_an_iteration():
    """The second batch is encoded while the first decodes, and joins at the first iteration after its transfer."""
    made = disaggregated(encode_batch=1, micro_batches=1)
    replica = ReplicaCost.of(made, PROFILE)
    run = replay(made, PROFILE, [RequestLengths(20, 300), RequestLengths(400, 4)])
    (encoder,), (decoder,) = replica.encode.costs, replica.decode.costs
    encoded = [encoder.step(Chunks([n], [0], 1), 0, 0.0) for n in (20, 400)]
    now = encoded[0] + replica.kv_transfer_seconds(20)
    ready = sum(encoded) + replica.kv_transfer_seconds(400)
    context, joined, finish = 21, 0, {}
    while len(finish) < 2:
        if joined == 0 and now >= ready:
            joined = 401
        contexts = [context] * (0 not in finish) + [joined] * (joined > 0 and 1 not in finish)
        now += decoder.step(None, len(contexts), sum(contexts) / len(contexts))
        if joined and joined == 403:
            finish[1] = now
        joined += joined > 0
        if context == 20 + 299:
            finish[0] = now
        context += 1
    assert {s.index: s.finish_s for s in run.served} == pytest.approx(finish)


def test_waa_joins_what_arrives_in_the_midst_of_decoding():
    requests = [RequestLengths(20, 300), RequestLengths(20, 4, 0.05)]
    quick, slow = (
        replay(disaggregated(), PROFILE, requests),
        replay(disaggregated(), PROFILE, requests, step_by_step=True),
    )
    assert [s.finish_s for s in quick.served] == pytest.approx([s.finish_s for s in slow.served])
    assert [s.index for s in quick.served] == [1, 0]


def test_waa_transfers_take_turns():
    """Where batches come faster than they are transferred, one is on its way down while the next is on its way up."""
    slow = replace(PROFILE, host_copy=Table(("bytes",), ((1.0,),), (0.5,)))
    run = replay(disaggregated(encode_batch=1), slow, [RequestLengths(20, 2)] * 4)
    replica = ReplicaCost.of(disaggregated(), PROFILE)
    encoded = replica.encode.costs[0].step(Chunks([20], [0], 1), 0, 0.0)
    iteration = replica.decode.costs[0].step(None, 1, 21)
    ends = [encoded + 1.0 + 0.5 * i + iteration for i in range(4)]
    assert [s.finish_s for s in run.served] == pytest.approx(ends)


def test_waa_lets_one_batch_wait_before_every_stage():
    """Many batches at once before a slow last stage: the encoding side has five under way on three stages, no more."""
    stages = stages_of(MODEL, "encode", 0, 3) + stages_of(MODEL, "decode", 3, 1)
    stages = (*stages[:2], replace(stages[2], decoder_layers=(2, 12)), stages[3])
    made = disaggregated(stages=stages, encode_batch=1)
    run = replay(made, PROFILE, [RequestLengths(50, 1)] * 30)
    starts, ends = sorted(s.start_s for s in run.served), sorted(s.first_token_s for s in run.served)
    under_way = [sum(end > start for end in ends[:i]) for i, start in enumerate(starts)]
    assert max(under_way) == 4  # beside the one that starts


def test_waa_encoder_decoders_make_keys_and_values_on_the_decoding_side():
    made = disaggregated(T5)
    replica = ReplicaCost.of(made, T5_PROFILE)
    (served,) = replay(made, T5_PROFILE, [RequestLengths(20, 2)]).served
    (encoder,), (decoder,) = replica.encode.costs, replica.decode.costs
    first = encoder.step(Chunks([20], [0], 1), 0, 0.0) + replica.kv_transfer_seconds(20)
    first += float(decoder.cross_projection(20)) + decoder.step(None, 1, 21)
    assert float(decoder.cross_projection(20)) > 0
    assert served.first_token_s == pytest.approx(first)
    assert served.finish_s == pytest.approx(first + decoder.step(None, 1, 22))


@pytest.mark.parametrize(("stages", "encode_count"), [(1, 1), (2, 2), (3, 3), (3, 6), (2, 8)])
def test_alike_requests_go_through_the_pipelines_exact_recurrence(stages, encode_count):
    """RRA with requests of one length: once settled, phases are those of the steady state's recurrence."""
    workload = Workload.fixed(40, 9)  # D = 8 = two phases of 4
    layers = stages_of(MODEL, "both", 0, stages)
    own = {"encode_batch": 24, "decode_batch": 48, "decode_iterations": 4, "encode_micro_batches": encode_count}
    made = schedule("rra", workload=workload, stages=layers, cluster=parse_cluster(f"{stages}xA40"), **own)
    run = replay(made, PROFILE, [RequestLengths(40, 9)] * 24 * 40)
    starts = sorted({s.start_s for s in run.served})
    period = (starts[30] - starts[18]) / 12  # a cycle may span several phases
    times = rra.phase(Scenario.of(made, PROFILE, None, "exact", True), 24, 4, encode_count).times
    assert period == pytest.approx(times.period, rel=1e-9)
    assert len(starts) == 40


def test_replicas_take_turns():
    requests = [RequestLengths(10 + i, 5, 0.1 * i) for i in range(9)]
    run = replay(schedule(replicas=2), PROFILE, requests)
    for r in range(2):
        alone = replay(schedule(), PROFILE, requests[r::2])
        own = {s.index // 2: s.finish_s for s in run.served if s.index % 2 == r}
        assert own == {s.index: s.finish_s for s in alone.served}
    assert {span.device for span in run.timeline.spans} == {0, 1}


def test_the_work_of_a_tensor_parallel_group_is_shown_on_its_first_device():
    (degree,) = PROFILE.degrees
    tables = replace(PROFILE, degrees=(degree, replace(degree, tp=2)))
    stages = (Stage((0, 1), 2, "both", None, (0, 6)), Stage((2,), 1, "both", None, (6, 12)))
    run = replay(
        schedule(stages=stages, cluster=parse_cluster("6xA40"), replicas=2), tables, [RequestLengths(20, 5)] * 4
    )
    assert {(span.stage, span.device) for span in run.timeline.spans} == {(0, 0), (1, 2), (0, 3), (1, 5)}


def test_a_table_of_one_context_costs_the_same_at_all():
    (degree,) = PROFILE.degrees
    flat = Table(("batch", "context"), ((1.0, 64.0), (100.0,)), (1e-5, 2e-5))
    decoder = replace(degree.decoder, decode_attention=flat)
    cost = ReplicaCost.of(schedule(), replace(PROFILE, degrees=(replace(degree, decoder=decoder),))).decode.costs[0]
    contexts = np.array([1.0, 100.0, 101.0, 900.0])
    assert DecodeStepCache.of(cost)(5, contexts) == pytest.approx([cost.step(None, 5, context) for context in contexts])


def test_no_requests_take_no_time():
    run = replay(schedule(), PROFILE, [])
    assert (run.served, run.seconds, run.estimate.utilisation) == ((), 0.0, (0.0,))


def test_a_request_larger_than_the_cache_is_refused():
    with pytest.raises(InputError, match="Request 1 needs 8 KV blocks"):
        replay(schedule(kv_blocks=4, replicas=2), PROFILE, [RequestLengths(10, 4), RequestLengths(100, 20)])


ARRIVALS = st.sampled_from([0.0, 0.0, 0.003, 0.011, 0.05, 0.2, 5.0])
REQUESTS = st.lists(
    st.builds(
        RequestLengths,
        st.integers(1, 90),
        st.integers(1, 40),
        st.sampled_from([0.0, 0.0, 0.003, 0.011, 0.05, 0.2, 5.0]),
    ),
    min_size=1,
    max_size=25,
)


@st.composite
def plans(draw, policies=(*POLICIES, *DISAGGREGATED), models=(MODEL, T5)):
    """A schedule of any policy on one to three stages a side, and the profile that goes with it."""
    policy = draw(st.sampled_from(policies))
    model = MODEL if policy == "chunked" else draw(st.sampled_from(models))
    stages = stages_of(model, "both", 0, draw(st.integers(1, 3)))
    if policy in DISAGGREGATED:
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
        kv_blocks=draw(st.integers(9, 60)),
        replicas=draw(st.sampled_from([1, 1, 2])),
        **changes,
    )
    return made, T5_PROFILE if model is T5 else PROFILE


@settings(max_examples=150)
@given(plans(), REQUESTS)
def test_everybody_is_served_once_and_in_time(plan, requests):
    run = replay(*plan, requests)
    assert sorted(s.index for s in run.served) == list(range(len(requests)))
    assert run.reused == 0 or plan[0].prefix_caching
    for s in run.served:
        asked = requests[s.index]
        assert (s.input_tokens, s.output_tokens, s.arrival_s) == (asked.input, asked.output, asked.arrival_s)
        assert asked.arrival_s <= s.start_s < s.first_token_s <= s.finish_s <= run.seconds
        assert (s.first_token_s == s.finish_s) == (asked.output == 1)
    assert [s.finish_s for s in run.served] == sorted(s.finish_s for s in run.served)
    assert all(0 <= share <= 1 + 1e-9 for share in run.estimate.utilisation)
    assert len(run.estimate.utilisation) == len(plan[0].stages) * plan[0].replicas + plan[0].idle


@settings(max_examples=150)
@given(plans(), REQUESTS)
def test_cells_keep_the_recurrence(plan, requests):
    """A stage does one micro-batch after the other, and tokens are computed once on every stage."""
    made, tables = plan
    spans = replay(made, tables, requests).timeline.spans
    until = {}
    for span in spans:
        assert span.start_s >= until.get(span.device, 0.0) - 1e-12
        until[span.device] = span.end_s
    decoder_only = made.model.spec is MODEL
    own = [requests[i] for i in deal([(r.input, r.output) for r in requests], made.replicas)[0]]
    for stage in made.stages:
        tokens = sum(
            r.input * (stage.phase != "decode") + (r.output - decoder_only) * (stage.phase != "encode") for r in own
        )
        done = sum(span.tokens for span in spans if span.device == stage.devices[0])
        assert done >= tokens if made.policy in ("static", "hybrid") else done == tokens


@settings(max_examples=200)
@given(plans(), REQUESTS)
def test_following_many_iterations_at_once_is_following_each(plan, requests):
    quick, slow = replay(*plan, requests, timeline=False, lanes=True), replay(*plan, requests, step_by_step=True)
    assert not quick.timeline.spans
    assert [s.index for s in quick.served] == [s.index for s in slow.served]
    for one, other in zip(quick.served, slow.served, strict=True):
        times = [(s.start_s, s.first_token_s, s.finish_s) for s in (one, other)]
        assert times[0] == pytest.approx(times[1], rel=1e-9)
    assert quick.estimate.utilisation == pytest.approx(slow.estimate.utilisation, rel=1e-9)


@settings(max_examples=50)
@given(plans(), REQUESTS, st.sampled_from([1, 2]))
def test_no_block_stays_behind(plan, requests, in_flight):
    ledgers = []

    def watched(*arguments, **keywords):
        ledgers.append(make_ledger(*arguments, **keywords))
        return ledgers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xsimulator.replay.replica.make_ledger", watched)
        replay(plan[0], replace(plan[1], in_flight=in_flight), requests)
    assert len(ledgers) == plan[0].replicas
    for ledger in ledgers:
        ledger.check()
        assert ledger.idle and ledger.pool.available == ledger.pool.total


def test_a_pipeline_works_on_several_micro_batches_at_once():
    """Stages overlap, each does one micro-batch at a time, and no token is begun before its predecessor is out."""
    stages = tuple(Stage((i,), 1, "both", None, (4 * i, 4 * i + 4)) for i in range(3))
    made = schedule("orca", stages=stages, cluster=parse_cluster("3xA40"), max_num_seqs=9, prefills_per_step=3)
    run = replay(made, PROFILE, [RequestLengths(30 + i, 12) for i in range(30)])
    assert sorted(s.index for s in run.served) == list(range(30))
    begun = {}
    for span in run.timeline.spans:
        assert span.start_s >= begun.get(span.stage, 0.0) - 1e-12  # a stage does one micro-batch at a time
        begun[span.stage] = span.end_s
    for micro_batch in range(3):
        own = [span for span in run.timeline.spans if span.micro_batch == micro_batch]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(own))
    assert sum(run.estimate.utilisation) > 1.8


def test_micro_batches_are_those_of_the_list_whatever_the_order_of_arrival():
    """The compiled loop numbers requests by arrival, so that a list in another order is left to the lanes."""
    plan = disaggregated(stages=stages_of(MODEL, "encode", 0, 1) + stages_of(MODEL, "decode", 1, 2))
    rows = [RequestLengths(20 + 9 * i, 5 + 40 * (i % 3), 0.02 * (7 * i % 10)) for i in range(10)]
    quick, slow = (replay(plan, PROFILE, rows, timeline=False, lanes=lanes) for lanes in (False, True))
    assert [s.index for s in quick.served] == [s.index for s in slow.served]
    assert [s.finish_s for s in quick.served] == pytest.approx([s.finish_s for s in slow.served], rel=1e-9)
    assert not in_turn(plan, rows) and in_turn(plan, sorted(rows, key=lambda row: row.arrival_s))
    assert in_turn(schedule("orca"), rows), "one micro-batch has them all"
