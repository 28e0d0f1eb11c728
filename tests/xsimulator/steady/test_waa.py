"""WAA's steady state against a Monte Carlo of its decoding side, and against the event simulator."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from tests.xcore.small_specs import schedule, with_gib
from tests.xsimulator.steady.test_saturation import side
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.request_times import steady_tokens_s
from xcore.specs.schedule import BLOCK_SIZE
from xcore.specs.workload import LengthDistribution, Workload, task
from xprofiler.roofline import roofline_profile
from xsimulator import estimate
from xsimulator.replay.event_simulator import replay
from xsimulator.steady import decoding_cycle
from xsimulator.steady.pipeline import iteration_times
from xsimulator.steady.scenario import Scenario
from xsimulator.steady.waa import WAA

A40 = with_gib(parse_cluster("4xA40"), 48)
OPT, T5 = builtin_model("opt-13b"), builtin_model("t5-3b")
PROFILES = {model.name: roofline_profile(model, A40, overhead_s=2e-3) for model in (OPT, T5)}


def waa_schedule(model, workload, batch, micro_batches=1, split=((1, 1), (1, 2)), cluster=A40):
    (encoders, encode_tp), (decoders, decode_tp) = split
    stages = side(model, "encode", 0, encoders, encode_tp)
    stages += side(model, "decode", encoders * encode_tp, decoders, decode_tp)
    return schedule(
        "waa-c",
        model,
        workload.without_requests,
        cluster=cluster,
        stages=stages,
        kv_blocks=100_000,
        dtype="fp16",
        kv_dtype="fp16",
        encode_batch=batch,
        micro_batches=micro_batches,
    )


def scenario_of(plan):
    return Scenario.of(plan, PROFILES[plan.model.spec.name], None, "exact", False)


def decoding_side(outputs, blocks, period, seconds):
    """What becomes of batches of output lengths [transfers, B_E], each holding `blocks` of the same shape, transferred
    every `period` seconds, if an iteration of n sequences takes `seconds[n]`: the mean of the residents over time, just
    after each KV transfer their number and their blocks, and when the last iteration ends.

    Joins at iterations' ends; a decoder-only model's first token is there already.
    """
    left, held = np.zeros(0, dtype=int), np.zeros(0, dtype=int)
    now, area, peaks, following = 0.0, 0.0, [], 0
    while following < len(outputs) or len(left):
        if following < len(outputs) and following * period <= now:
            while following < len(outputs) and following * period <= now:
                left = np.concatenate([left, outputs[following] - 1])
                held = np.concatenate([held, blocks[following]])
                following += 1
            left, held = left[left > 0], held[left > 0]
            peaks.append((len(left), held.sum()))
        if not len(left):
            now = following * period
            continue
        took = seconds[len(left)]
        if following < len(outputs):
            area += len(left) * took
        now, held, left = now + took, held[left > 1], left[left > 1] - 1
    return area / (len(outputs) * period), np.array(peaks[len(peaks) // 20 :]).T, now


@pytest.mark.parametrize(
    ("batch", "split"), [(16, ((1, 2), (1, 2))), (4, ((1, 1), (1, 2))), (3, ((1, 2), (1, 2))), (2, ((1, 2), (1, 2)))]
)
def test_the_fixed_point_is_what_a_simulated_decoding_side_settles_at(batch, split):
    """Mean residents, and their number and blocks after a KV transfer, under the same seconds per iteration."""
    workload, rng, transfers = task("S"), np.random.default_rng(3), 8000
    scenario = scenario_of(waa_schedule(OPT, workload, batch, split=split))
    period = WAA(scenario, 1).encoding(batch).period
    fixed = decoding_cycle.fixed_point(scenario, batch, 1, period)
    assert fixed.period == pytest.approx(period)
    numbers = np.arange(200.0)
    context = np.full(200, workload.input.mean + workload.output.mean / 2)
    seconds, _ = decoding_cycle.iteration(scenario, numbers, context, 1, np.zeros((200, 1)))
    inputs, outputs = (
        distribution.sample(transfers * batch, rng).reshape(-1, batch)
        for distribution in (workload.input, workload.output)
    )
    blocks = -(-(inputs + outputs - 1) // BLOCK_SIZE)
    mean, (resident, held), end = decoding_side(outputs, blocks, period, seconds)
    assert end == pytest.approx(transfers * period, rel=0.01)  # it keeps up
    need, p = scenario.load.iterations
    # Little: as many as arrive in the time that one of them stays
    assert float(p @ fixed.lived(need)) * batch / period == pytest.approx(mean, rel=0.03)
    assert WAA(scenario, 1).flow(batch).resident == pytest.approx(resident.mean(), rel=0.03)
    assert WAA(scenario, 1).blocks(batch, fixed.stride, 0.0) == pytest.approx(np.quantile(held, 0.999), rel=0.05)


@pytest.mark.parametrize("stride", [1, 3, 7, 40])
def test_the_peak_after_a_kv_transfer_is_b_e_times_the_transfers_that_a_query_stays(stride):
    workload = task("S")
    scenario = scenario_of(waa_schedule(OPT, workload, 4))
    need, p = scenario.load.iterations
    assert scenario.load.steady(stride).batch_ratio == pytest.approx(float(p @ np.ceil(need / stride)))


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
def test_it_is_the_smallest_fixed_point(batch):
    """No quicker cycle lasts as long as the encoding side takes for a batch."""
    scenario = scenario_of(waa_schedule(OPT, task("S"), batch))
    period = WAA(scenario, 1).encoding(batch).period
    fixed = decoding_cycle.fixed_point(scenario, batch, 1, period)
    strides = np.arange(1, int(fixed.fast.stride)) if fixed.fast.stride >= 1 else np.geomspace(fixed.fast.stride, 1, 40)
    cycles = [decoding_cycle.cycle(scenario, batch, 1, float(k)).period for k in strides]
    if fixed.fast.stride >= 1:
        assert all(cycle < period for cycle in cycles)
    else:
        assert cycles[0] == pytest.approx(period, rel=0.01)


@pytest.mark.parametrize("period", [0.002, 0.02, 0.3, 0.9, 40.0])
def test_the_bracket_is_what_looking_at_every_stride_finds(period):
    scenario = scenario_of(waa_schedule(OPT, task("S"), 8))
    longest = int(scenario.load.iterations[0].max())
    cycles = {k: decoding_cycle.cycle(scenario, 8, 1, float(k)).period for k in range(1, longest + 1)}
    fixed = decoding_cycle.fixed_point(scenario, 8, 1, period)
    within = [k for k, seconds in cycles.items() if seconds <= period]
    if not within:
        assert fixed.stride < 1
        assert fixed.period == pytest.approx(period, rel=0.002) or fixed.stride == 1 / decoding_cycle.MOST_JOINED
    elif cycles[longest] <= period:
        assert fixed.fast.stride == fixed.slow.stride == longest
    else:
        assert (fixed.fast.stride, fixed.slow.stride) == (max(within), max(within) + 1)
        assert fixed.period == pytest.approx(period)


@pytest.mark.parametrize("model", [OPT, T5])
@pytest.mark.parametrize(
    ("name", "split"), [("T", ((1, 2), (1, 2))), ("S", ((3, 1), (1, 1))), ("C1", ((2, 1), (2, 1)))]
)
def test_no_smaller_batch_is_above_the_crest_and_no_larger_one_better_where_throughput_falls(name, split, model):
    batches = (1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32, 48, 64)
    scenario = scenario_of(waa_schedule(model, task(name), 1, 1, split))
    flows = [WAA(scenario, 1).flow(batch) for batch in batches]
    for place, flow in enumerate(flows):
        assert max(f.throughput for f in flows[: place + 1]) <= max(flow.throughput, flow.best_below) * (1 + 1e-6)
        if flow.no_better_above:
            assert max(f.throughput for f in flows[place:]) <= flow.throughput * (1 + 1e-6)
    assert any(flow.no_better_above for flow in flows) == any(flow.waits for flow in flows)


@functools.cache
def requests_of(name, n):
    """Drawn requests and their own empirical workload, so that the draw's luck is in both sides."""
    drawn = task(name).draw(n, seed=1)
    return drawn, Workload.from_requests(name, drawn)


@pytest.mark.parametrize(
    ("name", "batch", "micro_batches", "model", "split", "requests"),
    [
        ("T", 8, 1, OPT, ((1, 2), (1, 2)), 2000),  # decoding is slower, and memory full
        ("T", 4, 1, OPT, ((2, 1), (1, 1)), 2000),
        ("S", 8, 1, OPT, ((3, 1), (1, 1)), 2000),  # several encoding stages
        ("C1", 8, 1, OPT, ((3, 1), (1, 1)), 2000),
        ("S", 8, 1, T5, ((2, 1), (1, 1)), 4000),  # decoders make the keys and values of prompts
        ("T", 8, 1, T5, ((2, 1), (1, 1)), 4000),
        ("S", 8, 1, T5, ((2, 1), (2, 1)), 9000),  # one micro-batch on two stages
    ],
)
def test_a_full_memory_is_what_the_replay_meets(name, batch, micro_batches, model, split, requests):
    drawn, workload = requests_of(name, requests)
    plan = waa_schedule(model, workload, batch, micro_batches, split)
    flow = WAA(scenario_of(plan), micro_batches).flow(batch)
    assert flow.waits
    predicted = estimate(plan, PROFILES[model.name], variation=False)
    run = replay(replace(plan, kv_blocks=flow.blocks), PROFILES[model.name], drawn, timeline=False)
    assert predicted.throughput_tok_s == pytest.approx(steady_tokens_s(run.served), rel=0.03)
    middle = run.served[len(run.served) // 3 : -len(run.served) // 3]
    half = [s.finish_s - s.start_s for s in middle if abs(s.output_tokens - workload.output.quantile(0.5)) <= 2]
    assert predicted.latency_p50_s == pytest.approx(np.mean(half), rel=0.05)
    assert predicted.ttft_s == pytest.approx(np.mean([s.first_token_s - s.start_s for s in middle]), rel=0.25)


@pytest.mark.parametrize("model", [OPT, T5])
def test_outputs_of_one_token_are_never_decoded_where_encoding_makes_them(model):
    workload = Workload.fixed(64, 1)
    plan = waa_schedule(model, workload, 8, split=((1, 1), (1, 1)))
    flow = WAA(scenario_of(plan), 1).flow(8)
    assert flow.throughput == pytest.approx(8 / flow.encoder.period)
    assert flow.resident == (8.0 if model.encoder_layers else 0.0)
    predicted = estimate(plan, PROFILES[model.name], variation=False)
    run = replay(plan, PROFILES[model.name], workload.draw(400), timeline=False)
    assert predicted.throughput_tok_s == pytest.approx(steady_tokens_s(run.served), rel=0.02)
    assert predicted.tpot_s is None
    if not model.encoder_layers:
        assert predicted.latency_s == predicted.ttft_s == pytest.approx(flow.encoder.traversal)


def test_one_token_for_more_prompts_than_memory_holds_is_infeasible():
    plan = waa_schedule(OPT, Workload.fixed(900, 1), 400, split=((1, 1), (1, 1)))
    assert "KV blocks are needed" in estimate(plan, PROFILES["opt-13b"]).violations[0]


@pytest.mark.parametrize("batch", [1, 2, 12])
def test_a_decoding_side_that_no_batch_lets_keep_up_has_a_full_memory(batch):
    """Its latency is that of those who fit, not of endless batches."""
    predicted = estimate(
        waa_schedule(T5, task("T"), batch, split=((1, 1), (2, 1)), cluster=parse_cluster("3xA40")), PROFILES["t5-3b"]
    )
    assert predicted.latency_s < 100
    assert predicted.feasible


def test_a_query_decodes_while_it_is_there_whoever_has_left():
    """Handovers are rare: the longest queries are alone for most of their iterations."""
    workload = Workload("long in", LengthDistribution.fixed(1500), task("S").output, 63)
    plan = waa_schedule(OPT, workload, 8)
    scenario = scenario_of(plan)
    assert WAA(scenario, 1).flow(8).decoder.fast.stride > 70
    run = replay(plan, PROFILES["opt-13b"], workload.draw(600, seed=1), timeline=False)
    for tokens in (32, 63):
        lived = [s.finish_s - s.start_s for s in run.served if abs(s.output_tokens - tokens) <= 1]
        predicted = WAA(scenario, 1).outcome(8).lifetime(np.array([float(tokens)])).seconds[0]
        assert predicted == pytest.approx(np.mean(lived), rel=0.02)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_more_micro_batches_than_stages_never_shorten_an_iteration(stages):
    model = OPT
    plan = waa_schedule(model, task("S"), 4, split=((1, 1), (stages, 1)), cluster=parse_cluster("8xA40"))
    scenario = scenario_of(plan)
    batch, context = np.array([1.0, 24.0, 200.0]), np.full(3, 270.0)
    seconds = [decoding_cycle.iteration(scenario, batch, context, n, 0.0)[0] for n in (stages, stages + 1, 2 * stages)]
    assert (seconds[1] >= seconds[0]).all()
    assert (seconds[2] >= seconds[1]).all()


def test_an_iteration_with_equal_micro_batches_is_the_pipelines_recurrence():
    plan = waa_schedule(OPT, task("S"), 4, split=((1, 1), (3, 1)))
    scenario = scenario_of(plan)
    for parts in (1, 2, 3, 5):
        batch = np.array([30.0])
        (seconds,), (cells,) = decoding_cycle.iteration(scenario, batch, np.array([270.0]), parts, 0.0)
        cells = np.broadcast_to(cells, (200, parts, 3))
        _, ends = iteration_times(cells, scenario.replica.decode.hops(30 / parts))
        assert seconds == pytest.approx((ends[-1, -1, -1] - ends[100, -1, -1]) / 99, rel=1e-6)
