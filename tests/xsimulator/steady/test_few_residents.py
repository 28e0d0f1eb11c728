"""Closed forms of few residents beside a saturated replay, and what holds between an estimate's figures."""

import functools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import schedule
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import ENGINES
from xcore.specs.request_times import RequestTimesColumns
from xcore.specs.workload import LengthDistribution, Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xsimulator import estimate
from xsimulator.replay.compiled import Replicas, RequestArrays

H100 = parse_cluster("1xH100-SXM")
LLAMA = builtin_model("llama-3.1-8b")
KINDS = {
    "orca": lambda n: {"max_num_seqs": n, "prefills_per_step": 1},
    "chunked": lambda n: {"max_num_seqs": n, "max_num_batched_tokens": 2048},
    "static": lambda n: {"encode_batch": n},
    "rra": lambda n: {"encode_batch": n, "decode_iterations": 8},
    "hybrid": lambda n: {"encode_batch": n, "micro_batches": 1},
}


@functools.cache
def profile_of(engine="none", cluster=H100):
    return roofline_profile(LLAMA, cluster, "bf16", engine=ENGINES[engine])


def plan_of(policy, workload, n, cluster=H100, model=LLAMA, **changes):
    stages = uniform_stages(model, cluster, 1)
    fields = {"cluster": cluster, "stages": stages, "kv_blocks": 10**6, "dtype": "bf16", "kv_dtype": "bf16"}
    return schedule(policy, model, workload.without_requests, **fields | KINDS[policy](n) | changes)


def replayed(plan, profile, requests):
    """Times of the requests between a fifth and four fifths, all there from the start; throughput; residents."""
    nothing = np.zeros(len(requests))
    inputs, outputs = (np.array([getattr(r, side) for r in requests], dtype=np.float64) for side in ("input", "output"))
    times = Replicas(profile).serve(plan, RequestArrays(nothing, inputs, outputs, nothing))
    kept = slice(len(requests) // 5, -(len(requests) // 5))
    columns = RequestTimesColumns(
        outputs[kept], nothing[kept], times.started[kept], times.first[kept], times.finished[kept]
    )
    ends = np.sort(times.finished)[kept]
    overlap = np.minimum(times.finished, ends[-1]) - np.maximum(times.started, ends[0])
    residents = float(np.maximum(overlap, 0.0).sum() / (ends[-1] - ends[0]))
    return columns.latencies("start"), (len(ends) - 1) / (ends[-1] - ends[0]), residents


def skewed(count):
    """Requests whose lengths vary as conversations' do, and their own workload."""
    rng = np.random.default_rng(3)
    inputs, outputs = (np.maximum(rng.lognormal(mean, 1.0, count), 1).astype(int) for mean in (6.5, 4.8))
    return Workload("skewed", *map(LengthDistribution.from_samples, (inputs.tolist(), outputs.tolist())), 1)


WORKLOADS = {
    "32000/300": Workload.fixed(32000, 300),
    "32000/2": Workload.fixed(32000, 2),
    "2048/256": Workload.fixed(2048, 256),
    "1024/1024": Workload.fixed(1024, 1024),
    "128/2048": Workload.fixed(128, 2048),
    "skewed": skewed(400),
}


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("policy", ["orca", "chunked"])
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_few_residents_are_predicted_as_they_are_replayed(name, policy, n):
    requests = WORKLOADS[name].draw(20_000 if name == "skewed" else 200 * n + 200, seed=1)
    workload = Workload.from_requests(name, requests)
    plan, profile = plan_of(policy, workload, n), profile_of()
    times, rate, residents = replayed(plan, profile, requests)
    predicted = estimate(plan, profile)
    assert predicted.latency_mean_s == pytest.approx(times["latency"].mean(), rel=0.03)
    assert predicted.ttft_s == pytest.approx(times["ttft"].mean(), rel=0.03)
    assert predicted.tpot_s == pytest.approx(times["tpot"].mean(), rel=0.03)
    assert predicted.throughput_seq_s == pytest.approx(rate, rel=0.03)
    assert predicted.residents == pytest.approx(residents, rel=0.03)
    tails = {"latency": predicted.latency_p99_s, "ttft": predicted.ttft_p99_s, "tpot": predicted.tpot_p99_s}
    assert tails == pytest.approx({key: np.percentile(times[key], 99) for key in tails}, rel=0.08)


@pytest.mark.parametrize("output", [1, 2, 3])
@pytest.mark.parametrize("n, prefills", [(20, 3), (20, 15), (33, 32), (16, 16)])
def test_short_outputs_with_several_prefills_per_step_are_predicted(output, n, prefills):
    """A round of residents need not end with an iteration: 20 prompts, 15 at a time."""
    workload = Workload.fixed(100, output)
    plan, profile = plan_of("orca", workload, n, prefills_per_step=prefills), profile_of()
    times, rate, residents = replayed(plan, profile, workload.draw(4000, seed=1))
    predicted = estimate(plan, profile)
    assert predicted.throughput_seq_s == pytest.approx(rate, rel=0.03)
    assert predicted.latency_mean_s == pytest.approx(times["latency"].mean(), rel=0.03)
    assert predicted.residents == pytest.approx(residents, rel=0.03)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("policy", ["orca", "chunked"])
@pytest.mark.parametrize("lengths_of", [(100, 40), (1024, 16)])
def test_one_resident_of_a_pipeline_waits_for_no_other(lengths_of, policy, devices):
    cluster, workload = parse_cluster(f"{devices}xH100-SXM"), Workload.fixed(*lengths_of)
    plan, profile = plan_of(policy, workload, 1, cluster), roofline_profile(LLAMA, cluster, "bf16")
    times, *_ = replayed(plan, profile, workload.draw(100))
    predicted = estimate(plan, profile)
    assert predicted.ttft_s == pytest.approx(times["ttft"].mean(), rel=0.05)
    assert predicted.ttft_p99_s == pytest.approx(np.percentile(times["ttft"], 99), rel=0.05)


lengths = st.lists(st.integers(1, 600), min_size=1, max_size=5, unique=True).map(sorted)


@st.composite
def workloads(draw):
    sides = []
    for _ in range(2):
        values = draw(lengths)
        weights = np.array(draw(st.lists(st.integers(1, 9), min_size=len(values), max_size=len(values))), dtype=float)
        sides.append(LengthDistribution(tuple(values), tuple((weights / weights.sum()).tolist())))
    return Workload("drawn", *sides, sides[1].quantile(0.99))


def answers_of(*tokens):
    """Prompts of one token, and as many answers of one length as of another."""
    return Workload("drawn", *(LengthDistribution(s, (1 / len(s),) * len(s)) for s in ((1,), tokens)), tokens[-1])


@settings(max_examples=60, deadline=None)
@given(
    workloads(),
    st.sampled_from(["orca", "chunked", "static", "rra"]),
    st.integers(1, 64),
    st.sampled_from(["none", "vllm"]),
)
@example(answers_of(1, 3), "static", 1, "none")
@example(answers_of(1, 2), "rra", 1, "none")
@example(answers_of(1, 2, 25), "rra", 1, "none")
def test_throughput_times_latency_is_the_residents(workload, policy, n, engine):
    profile = profile_of(engine)
    predicted = estimate(plan_of(policy, workload, n), profile)
    inside = predicted.latency_mean_s - profile.front_end_s  # the front end's time takes no place in the engine
    assert predicted.throughput_seq_s * inside == pytest.approx(predicted.residents, rel=0.01)
    if policy != "rra":  # whose batch is what enters, not what is resident
        assert predicted.residents <= n * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(workloads(), st.sampled_from(["static", "orca", "chunked"]))
def test_one_sequence_at_a_time_takes_the_time_between_two(workload, policy):
    predicted = estimate(plan_of(policy, workload, 1), profile_of())
    assert predicted.latency_mean_s == pytest.approx(1 / predicted.throughput_seq_s, rel=0.01)


@pytest.mark.parametrize(("policy", "n"), [("static", 8), ("rra", 2), ("orca", 12), ("chunked", 12)])
def test_residents_are_a_replays_time_average(policy, n):
    requests = task("S").draw(3000, seed=1)
    workload = Workload.from_requests("S", requests)
    plan = plan_of(policy, workload, n)
    *_, residents = replayed(plan, profile_of(), requests)
    assert estimate(plan, profile_of()).residents == pytest.approx(residents, rel=0.03)


def geometric(mean, longest):
    """Outputs of which few are long."""
    weights = (1 - 1 / mean) ** np.arange(longest)
    return LengthDistribution(tuple(range(1, longest + 1)), tuple((weights / weights.sum()).tolist()))


@pytest.mark.parametrize(("devices", "n"), [(2, 2), (2, 8), (4, 4), (4, 16)])
@pytest.mark.parametrize("iterations", [60, 400])
def test_rra_on_a_pipeline_goes_all_the_way_round_for_few_sequences(devices, n, iterations):
    """Towards a phase's end only some micro-batches are left: an iteration of one is as long as one of all."""
    cluster, workload = (
        parse_cluster(f"{devices}xH100-SXM"),
        Workload("g", LengthDistribution.fixed(500), geometric(60, 400), 1),
    )
    plan, profile = (
        plan_of("rra", workload, n, cluster, decode_iterations=iterations),
        roofline_profile(LLAMA, cluster, "bf16"),
    )
    times, rate, residents = replayed(plan, profile, workload.draw(2000, seed=1))
    predicted = estimate(plan, profile)
    assert predicted.throughput_seq_s == pytest.approx(rate, rel=0.04)
    assert predicted.latency_mean_s == pytest.approx(times["latency"].mean(), rel=0.04)
    assert predicted.residents == pytest.approx(residents, rel=0.04)


@pytest.mark.parametrize("policy", ["hybrid", "rra"])
@pytest.mark.parametrize("outputs", [LengthDistribution.fixed(1), LengthDistribution((1, 40), (0.75, 0.25))])
def test_a_single_token_is_out_with_its_own_micro_batch(policy, outputs):
    """Those that decode wait for the others' prefill: their times per token depend on the micro-batch too."""
    requests = Workload("few", LengthDistribution.fixed(1000), outputs, 1).draw(4000, seed=1)
    plan = plan_of(policy, Workload.from_requests("few", requests), 8, encode_micro_batches=4)
    times, _, residents = replayed(plan, profile_of(), requests)
    predicted = estimate(plan, profile_of())
    assert predicted.latency_mean_s == pytest.approx(times["latency"].mean(), rel=0.03)
    assert predicted.residents == pytest.approx(residents, rel=0.03)
    assert predicted.ttft_p99_s == pytest.approx(np.percentile(times["ttft"], 99), rel=0.01)
    assert predicted.latency_p99_s == pytest.approx(np.percentile(times["latency"], 99), rel=0.05)
    if outputs.max > 1:
        assert predicted.tpot_p99_s == pytest.approx(np.nanpercentile(times["tpot"], 99), rel=0.05)


@pytest.mark.parametrize("devices", [2, 4])
def test_micro_batches_of_a_static_batch_end_one_after_the_other(devices):
    """The first ones wait longer for their second token, and have their last one earlier than the last ones."""
    cluster, workload = parse_cluster(f"{devices}xH100-SXM"), Workload.fixed(1000, 5)
    plan, profile = plan_of("static", workload, 16, cluster), roofline_profile(LLAMA, cluster, "bf16")
    times, *_ = replayed(plan, profile, workload.draw(2000))
    predicted = estimate(plan, profile)
    assert predicted.latency_mean_s == pytest.approx(times["latency"].mean(), rel=0.01)
    assert predicted.tpot_s == pytest.approx(times["tpot"].mean(), rel=0.02)
    assert predicted.tpot_p99_s == pytest.approx(times["tpot"].max(), rel=0.02)


@pytest.mark.parametrize("policy", ["static", "rra"])
@pytest.mark.parametrize(("name", "outputs"), [("t5-11b", 64), ("t5-11b", 200), ("opt-13b", 64), ("opt-13b", 200)])
def test_tails_allow_for_iterations_that_vary_with_their_batch(name, outputs, policy):
    """A batch of long prompts decodes slowly until all have left, and so does one with more sequences."""
    rng = np.random.default_rng(5)
    inputs = np.clip(rng.lognormal(6.2, 0.9, 500), 1, 1500).astype(int)
    lengths = LengthDistribution.fixed(outputs) if outputs == 64 else geometric(outputs / 4, outputs)
    requests = Workload("varied", LengthDistribution.from_samples(inputs), lengths, 1).draw(4000, seed=1)
    model, cluster = builtin_model(name), parse_cluster("1xA40")
    profile = roofline_profile(model, cluster, "bf16")
    plan = plan_of(policy, Workload.from_requests("varied", requests), 8, cluster, model=model)
    times, *_ = replayed(plan, profile, requests)
    predicted = estimate(plan, profile)
    assert predicted.latency_p99_s == pytest.approx(np.percentile(times["latency"], 99), rel=0.06)
    assert predicted.tpot_p99_s == pytest.approx(np.nanpercentile(times["tpot"], 99), rel=0.07)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("policy", ["static", "rra"])
def test_micro_batches_are_encoded_in_any_order(policy, devices):
    """Not shortest first, which would bring most first tokens early."""
    requests, cluster = task("S").draw(4000, seed=1), parse_cluster(f"{devices}xH100-SXM")
    plan = plan_of(policy, Workload.from_requests("S", requests), 16, cluster)
    times, *_ = replayed(plan, roofline_profile(LLAMA, cluster, "bf16"), requests)
    assert estimate(plan, roofline_profile(LLAMA, cluster, "bf16")).ttft_s == pytest.approx(
        times["ttft"].mean(), rel=0.09
    )
