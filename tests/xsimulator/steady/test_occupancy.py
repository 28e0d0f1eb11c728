"""Admission by *grow* in the steady state: the blocks that residents hold, and what the event simulator makes of it.

Nothing in the formulas was fitted. They leave out how old a request is when it is preempted, and the cohorts in which
prompts come then: the tolerances allow for that.
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.xcore.small_specs import changed, schedule
from xcore.policies.rra import RRAControl
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.request_times import steady_tokens_s
from xcore.specs.schedule import BLOCK_SIZE
from xcore.specs.workload import LengthDistribution, Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xsimulator import estimate, has_steady_state
from xsimulator.replay.event_simulator import replay
from xsimulator.steady.load import Load
from xsimulator.steady.occupancy import RESERVED, Occupancy, Pool

VARIABLES = {"orca": {"prefills_per_step": 4}, "chunked": {"max_num_batched_tokens": 1024}}


def long_tails():
    """Lengths of many short requests and a few long ones."""
    rng = np.random.default_rng(5)
    inputs, outputs = (
        LengthDistribution.from_samples(np.clip(rng.lognormal(mean, deviation, 20_000).astype(int), 1, most))
        for mean, deviation, most in ((5.0, 1.0, 2500), (4.6, 0.9, 1500))
    )
    return Workload("long tails", inputs, outputs, outputs.quantile(0.99))


WORKLOADS = {name: task(name) for name in ("S", "T", "G", "C2")} | {"long tails": long_tails()}


def engine(model, cluster, tp, policy, workload, residents, kv_blocks, admission="grow"):
    """A schedule and its profile."""
    model, cluster = builtin_model(model), parse_cluster(cluster)
    plan = schedule(
        policy,
        model,
        workload.without_requests,
        cluster=cluster,
        stages=uniform_stages(model, cluster, tp),
        kv_blocks=kv_blocks,
        dtype="fp16",
        kv_dtype="fp16",
        max_num_seqs=residents,
        admission=admission,
        **VARIABLES[policy],
    )
    return plan, roofline_profile(model, cluster, overhead_s=2e-3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_residents_hold_the_blocks_of_a_uniform_age(name):
    """Slots that are refilled at once, each looked at at some moment."""
    workload, rng, n = WORKLOADS[name], np.random.default_rng(2), 400_000
    inputs, outputs = (lengths.sample(n, rng) for lengths in (workload.input, workload.output))
    drawn = rng.choice(n, n, p=outputs / outputs.sum())  # as often as it stays
    held = -(-(inputs[drawn] + rng.integers(0, outputs[drawn])) // BLOCK_SIZE)
    blocks = Load(workload, False).resident_blocks("grow")
    assert blocks.mean == pytest.approx(held.mean(), rel=0.005)
    assert blocks.variance == pytest.approx(held.var(), rel=0.02)
    assert blocks.third == pytest.approx(((held - held.mean()) ** 3).mean(), rel=0.05, abs=0.02 * held.std() ** 3)
    assert blocks.mean < Load(workload, False).resident_blocks("reserve").mean


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("residents", [20, 200])
def test_a_pool_is_the_percentile_of_what_residents_hold(name, residents):
    workload, rng, n = WORKLOADS[name], np.random.default_rng(3), 4000 * residents
    inputs, outputs = workload.input.sample(n, rng), workload.output.sample(4 * n, rng)
    drawn = rng.choice(outputs, n, p=outputs / outputs.sum())
    held = -(-(inputs + rng.integers(0, drawn)) // BLOCK_SIZE)
    together = held.reshape(-1, residents).sum(axis=1)
    assert Load(workload, False).pool_blocks("grow", residents) == pytest.approx(np.quantile(together, 0.95), rel=0.015)


@pytest.mark.parametrize(
    ("model", "cluster", "tp", "policy", "name", "residents", "share"),
    [
        ("opt-13b", "4xA40", 4, "orca", "T", 24, 1.0),
        ("opt-13b", "4xA40", 4, "chunked", "C2", 128, 1.0),
        ("llama-3.1-8b", "1xH100-SXM", 1, "chunked", "G", 128, 1.0),
        ("llama-3.1-8b", "1xH100-SXM", 1, "orca", "S", 128, 0.9),
        ("llama-3.1-8b", "1xH100-SXM", 1, "chunked", "long tails", 24, 0.6),
        ("llama-3.1-8b", "1xH100-SXM", 1, "orca", "C2", 128, 0.6),
        ("opt-13b", "2xA40", 1, "orca", "T", 128, 0.6),
        ("opt-13b", "2xA40", 1, "chunked", "G", 24, 0.9),
        ("t5-3b", "1xA40", 1, "orca", "T", 128, 1.0),
        ("t5-3b", "2xA40", 1, "orca", "S", 24, 0.6),
    ],
)
def test_the_event_simulator_meets_it(model, cluster, tp, policy, name, residents, share):
    """A pool of the size that a search gives it (`share` 1), or less, where memory decides how many are resident."""
    requests = [replace(request, arrival_s=0.0) for request in WORKLOADS[name].draw(2000, seed=1)]
    workload = Workload.from_requests(name, requests)
    blocks = int(share * Load(workload, builtin_model(model).encoder_layers > 0).pool_blocks("grow", residents))
    plan, profile = engine(model, cluster, tp, policy, workload, residents, blocks)
    predicted, run = estimate(plan, profile, variation=False), replay(plan, profile, requests, timeline=False)
    middle = run.served[len(run.served) // 4 : -len(run.served) // 4]
    median = workload.output.quantile(0.5)
    latency_s = np.mean([s.finish_s - s.start_s for s in middle if abs(s.output_tokens - median) <= 0.05 * median])
    tokens_s, preemptions = steady_tokens_s(run.served), run.preemptions / len(requests)
    print(f"{model} {policy} {name} x {share}, predicted and replayed:")  # with -s
    print(f"  {predicted.throughput_tok_s:,.0f} and {tokens_s:,.0f} output tokens/s")
    print(f"  {predicted.latency_p50_s:.2f} and {latency_s:.2f} s")
    print(f"  {predicted.preemptions_per_request:.3f} and {preemptions:.3f} preemptions a request")
    assert predicted.throughput_tok_s == pytest.approx(tokens_s, rel=0.04)
    assert predicted.latency_p50_s == pytest.approx(latency_s, rel=0.06)
    assert preemptions / 2 - 0.03 < predicted.preemptions_per_request < 2 * preemptions + 0.03


@pytest.mark.parametrize("policy", VARIABLES)
def test_without_pressure_both_rules_are_one(policy):
    plan, profile = engine("opt-13b", "4xA40", 4, policy, task("T"), 16, 10_000)
    grow, reserve = estimate(plan, profile), estimate(replace(plan, admission="reserve"), profile)
    assert grow.preemptions_per_request < 1e-12 and reserve.preemptions_per_request == 0.0
    assert grow.throughput_tok_s == pytest.approx(reserve.throughput_tok_s)
    assert max(grow.memory_bytes) < max(reserve.memory_bytes)


@pytest.mark.parametrize("policy", VARIABLES)
def test_more_residents_than_memory_holds_only_preempt(policy):
    means = []
    for residents in (32, 48, 64, 256):
        plan, profile = engine("opt-13b", "4xA40", 4, policy, task("T"), residents, 400)
        means.append(estimate(plan, profile))
    preempted = [round(e.preemptions_per_request, 12) for e in means]  # where memory binds: equal, up to rounding
    assert preempted == sorted(preempted)
    assert means[-1].preemptions_per_request > 0.3
    assert means[-1].throughput_tok_s == pytest.approx(means[-2].throughput_tok_s, rel=0.02)
    assert all(e.feasible for e in means)


def test_residents_that_never_outgrow_their_prompts_are_never_preempted():
    load = Load(Workload.fixed(256, 1), False)
    occupancy = Pool(grows=True, blocks=160).occupancy(load, 40, 1.0, 100.0)
    assert occupancy.preemptions == 0.0
    assert occupancy.residents < 11  # of sixteen blocks each
    assert RESERVED.occupancy(load, 40, 1.0, 100.0).residents == 40


def test_a_policy_without_a_formula_for_it_is_replayed():
    plan, profile = engine("opt-13b", "4xA40", 4, "orca", task("T"), 16, 400)
    variables = {"encode_batch": 4, "decode_batch": 16, "decode_iterations": 40}
    rra = replace(plan, policy="rra", control=RRAControl(**variables))
    assert has_steady_state(plan) and not has_steady_state(rra) and has_steady_state(replace(rra, admission="reserve"))
    predicted = estimate(rra, profile)
    done = replay(rra, profile, rra.workload.draw(4000, seed=7), timeline=False)
    ends = [request.finish_s for request in done.served[800:3200]]
    assert predicted.throughput_seq_s == pytest.approx(len(ends) / (ends[-1] - ends[0]), rel=0.04)


def slots(residents, outputs, idle, iterations=60_000):
    """Sequences that enter an iteration, counted: each slot runs a prompt's iteration and one for each output, then
    stays empty for `idle` more, and iterations in which all slots are empty don't run.
    """
    rng, left = np.random.default_rng(3), np.zeros(residents, dtype=int)
    entered = ran = 0
    for _ in range(iterations):
        fresh = left <= 0
        entered += int(fresh.sum())
        left[fresh] = 1 + rng.choice(outputs, int(fresh.sum())) + idle
        ran += bool((left > idle).any())
        left -= 1
    return entered / ran


@pytest.mark.parametrize("residents", [1, 2, 7])
@pytest.mark.parametrize("outputs", [(1, 3), (2, 9, 20)])
def test_slots_that_wait_an_iteration_for_their_next_sequence(residents, outputs):
    runs = 1 + float(np.mean(outputs))
    assert Occupancy(residents, 0).entering(runs, 0) == pytest.approx(residents / runs)
    assert Occupancy(residents, 0).entering(runs, 1) == pytest.approx(slots(residents, outputs, 1), rel=0.02)


@pytest.mark.parametrize("policy", VARIABLES)
def test_two_iterations_in_flight_leave_slots_empty_and_change_no_life_of_one_sequence(policy):
    workload, most = task("C1"), 64
    plan, profile = engine("llama-3.1-8b", "1xH100-SXM", 1, policy, workload, most, 100_000, "reserve")
    ahead = replace(profile, in_flight=2)
    one, two = (estimate(changed(plan, max_num_seqs=1), p) for p in (profile, ahead))
    for name in ("throughput_seq_s", "latency_s", "ttft_s", "tpot_s", "tpot_p99_s"):  # nothing runs beside it
        assert getattr(two, name) == pytest.approx(getattr(one, name))
    one, two = (estimate(plan, p) for p in (profile, ahead))
    assert 0.99 < two.throughput_seq_s / one.throughput_seq_s < 1.0 and two.tpot_s < one.tpot_s


@pytest.mark.parametrize("policy", VARIABLES)
def test_front_end_time_adds_to_latencies_and_first_tokens_alone(policy):
    plan, profile = engine("llama-3.1-8b", "1xH100-SXM", 1, policy, task("S"), 8, 100_000, "reserve")
    one, late = (estimate(plan, p) for p in (profile, replace(profile, front_end_s=13e-3)))
    for name in ("latency_s", "latency_mean_s", "latency_p50_s", "latency_p99_s", "ttft_s", "ttft_p99_s"):
        assert getattr(late, name) == pytest.approx(getattr(one, name) + 13e-3)
    same = ("throughput_seq_s", "tpot_s", "tpot_p99_s", "utilisation", "memory_bytes")
    assert [getattr(late, name) for name in same] == [getattr(one, name) for name in same]


@pytest.mark.parametrize("workload", [Workload.fixed(4096, 64), task("S")], ids=["fixed", "S"])
def test_growing_is_as_reserving_where_memory_does_not_bind(workload):
    """With a budget that does, grow counted up to 10 % fewer residents: those who wait for it had no slot."""
    load = Load(workload, False)
    for most, stay, rate in ((64, 100.0, 0.3), (64, 100.0, 10.0)):
        plenty = Pool(grows=True, blocks=10**6).occupancy(load, most, stay, rate)
        assert plenty.residents == Pool().occupancy(load, most, stay, rate).residents == most
        full = Pool(grows=True, blocks=load.pool_blocks("grow", 8)).occupancy(load, most, stay, rate)
        assert full.residents < 12
