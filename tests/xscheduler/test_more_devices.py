"""More devices, more nodes and looser bounds never make an answer worse."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from xcore.specs.bound import BoundMeaning
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import ENGINES
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.goodput import RateBounds
from xscheduler.open_tune import tune_at
from xscheduler.rate_sample import Arrivals
from xscheduler.spaces import POLICIES
from xscheduler.tune import tune
from xsimulator import estimate
from xsimulator.replay.compiled import Replicas, RequestArrays

FALL, GOODPUT_FALL = 0.005, 0.01
"""Shares by which throughput, and goodput, may fall."""
LOOSER = tuple(1.04 * 1.22**step for step in range(5))
"""Bounds over what one sequence takes at a time."""
BOUNDS = ("latency_bound_s", "ttft_s", "tpot_s")
BUDGET = {"fixed": {"max_num_batched_tokens": 1024}}
"""Chunked prefill's searches over all budgets too take seconds each."""
CHAT_MODEL = ("llama-3.1-70b", "H100-SXM", "2048/256", "fp8")


def asked(model, cluster, workload, dtype=None):
    """The arguments of a search."""
    spec, devices = builtin_model(model), parse_cluster(cluster)
    lengths = [int(length) for length in workload.split("/")] if "/" in workload else None
    profile = roofline_profile(spec, devices, **({"dtype": dtype} if dtype else {}))
    return spec, devices, Workload.fixed(*lengths) if lengths else task(workload), profile


def reached(setting, policies, **bounds):
    """Each policy's throughput in tokens/s, and the answer's."""
    tuned = tune(*setting, policies=policies, **bounds)
    figures = {other.policy: other.estimate.throughput_tok_s if other.estimate else 0.0 for other in tuned.alternatives}
    return figures | {"answer": tuned.estimate.throughput_tok_s if tuned.estimate else 0.0}


def falls(rows, share=FALL):
    """The figures that are lower by more than this share than one before."""
    found = []
    for (_, before), (name, after) in itertools.combinations(rows, 2):
        found += [(name, key, before[key], after[key]) for key in after if after[key] < before[key] * (1 - share)]
    return found


def by_devices(model, kind, workload, dtype, policies, most=8, **bounds):
    counts = range(1, most + 1)
    return [(n, reached(asked(model, f"{n}x{kind}", workload, dtype), policies, **bounds)) for n in counts]


def by_nodes(model, kind, workload, dtype, policies, devices, most=4, **bounds):
    clusters = [f"{nodes}x{devices}x{kind}" for nodes in range(1, most + 1)]
    return [(cluster, reached(asked(model, cluster, workload, dtype), policies, **bounds)) for cluster in clusters]


def by_bound(model, cluster, workload, dtype, policies, looser, **bounds):
    """With one bound ever looser, from what one sequence takes at a time."""
    setting = asked(model, cluster, workload, dtype)
    least = alone(setting)[looser]
    return [(by, reached(setting, policies, **bounds | {looser: by * least})) for by in LOOSER]


def alone(setting):
    """What one sequence takes at a time, by the bound; None where the model doesn't fit."""
    estimate = tune(*setting, policies=("orca",), fixed={"max_num_seqs": 1}).estimate
    return estimate and dict(
        zip(BOUNDS, (estimate.latency_s, estimate.ttft_bounded_s, estimate.tpot_bounded_s), strict=True)
    )


@pytest.mark.parametrize(
    ("case", "policies", "bounds"),
    [
        (CHAT_MODEL, ("chunked",), {"ttft_s": 1.0, "tpot_s": 0.04, **BUDGET}),
        pytest.param(CHAT_MODEL, ("chunked",), {"ttft_s": 1.0, "tpot_s": 0.04}, marks=pytest.mark.slow),
        pytest.param(
            ("llama-3.1-8b", "L40S", "1024/128", None),
            ("orca", "waa-m"),
            {"latency_bound_s": 4.0},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_throughput_never_falls_with_more_devices_of_a_node(case, policies, bounds):
    rows = by_devices(*case, policies, **bounds)
    assert falls(rows) == []
    assert rows[-1][1]["answer"] > 1.5 * rows[3][1]["answer"] > 0


@pytest.mark.slow
def test_throughput_never_falls_with_more_nodes():
    """Of nodes of five devices none holds two replicas of four: each node's fifth device stays idle."""
    case = ("llama-3.1-70b", "H100-SXM", "2048/256", "fp8")
    rows = by_nodes(*case, ("chunked",), 5, most=3, ttft_s=0.6, tpot_s=0.03)
    assert falls(rows) == []
    assert rows[-1][1]["answer"] == pytest.approx(3 * rows[0][1]["answer"], rel=0.01)


@pytest.mark.parametrize(
    ("policies", "fixed"),
    [(("chunked",), BUDGET), pytest.param(("chunked", "orca"), {}, marks=pytest.mark.slow)],
    ids=["chunked", "both"],
)
@pytest.mark.parametrize("looser", ["latency_bound_s", "tpot_s", pytest.param("ttft_s", marks=pytest.mark.slow)])
def test_throughput_never_falls_with_a_looser_bound(looser, policies, fixed):
    rows = by_bound("llama-3.1-8b", "2xH100-SXM", "1024/512", None, policies, looser, **fixed)
    assert falls(rows) == []
    assert rows[-1][1]["answer"] > 1.2 * rows[0][1]["answer"]


def drawn(seed):
    """A problem by its number: the model, device kind, workload, dtype, and bounds over what one sequence takes."""
    rng = random.Random(seed)
    model, dtype = rng.choice(
        [("llama-3.1-8b", None), ("qwen3-14b", None), ("qwen3-32b", None), ("llama-3.1-70b", "fp8"), ("opt-13b", None)]
    )
    kind = rng.choice(["H100-SXM", "H200-SXM", "L40S", "B200"] + ["A100-80GB"] * (dtype is None))
    workload = rng.choice(["S", "T", "C1"] if model == "opt-13b" else ["2048/256", "1024/512", "4096/64", "S", "C1"])
    ratios = {name: rng.uniform(1.2, 5.0) for name in BOUNDS if rng.random() < 0.5}
    return rng, (model, kind, workload, dtype), ratios


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(18))
def test_no_policys_throughput_falls(seed):
    rng, case, ratios = drawn(seed)
    model, kind, workload, dtype = case
    least = alone(asked(model, f"4x{kind}", workload, dtype))
    if least is None:
        pytest.skip(f"{model} does not fit on 4x{kind}")
    bounds = {name: ratio * least[name] for name, ratio in ratios.items()}
    if seed % 3 == 0:
        rows = by_devices(*case, POLICIES, **bounds)
    elif seed % 3 == 1:
        rows = by_nodes(*case, POLICIES, rng.randint(1, 6), most=3, **bounds)
    else:
        looser = rng.choice(BOUNDS)
        bounds.pop(looser, None)
        rows = by_bound(model, f"{rng.randint(2, 6)}x{kind}", workload, dtype, POLICIES, looser, **bounds)
    assert falls(rows) == []


def goodput(cluster, bounds, policies=("chunked",)):
    """The highest rate that a schedule sustains, in requests/s."""
    spec, devices, workload, profile = asked("llama-3.1-70b", cluster, "2048/256", "fp8")
    arrivals = Arrivals.poisson(workload, spec.longest_request, 0, devices.devices)
    rated = tune_at(spec, devices, workload, profile, arrivals, bounds, None, policies=policies)
    return {"answer": rated.highest_rate_seq_s}


CHAT = RateBounds(None, 1.0, 0.04)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fewer", "more"),
    [
        (("4xH100-SXM", CHAT), ("5xH100-SXM", CHAT)),
        (("6xH100-SXM", CHAT), ("7xH100-SXM", CHAT)),
        (("1x5xH100-SXM", CHAT), ("2x5xH100-SXM", CHAT)),
        (("4xH100-SXM", RateBounds(None, 0.5, 0.04)), ("4xH100-SXM", RateBounds(None, 0.7, 0.04))),
        (("4xH100-SXM", RateBounds(None, 1.0, 0.03)), ("4xH100-SXM", RateBounds(None, 1.0, 0.035))),
        (("4xH100-SXM", RateBounds(8.0)), ("4xH100-SXM", RateBounds(9.0))),
    ],
)
def test_goodput_never_falls_with_more_devices_or_looser_bounds(fewer, more):
    assert falls([(cluster, goodput(cluster, bounds)) for cluster, bounds in (fewer, more)], GOODPUT_FALL) == []


def waa_within(latency_s, memory_fraction):
    """WAA-C on four L40S: what is found, and the profile."""
    cluster, bound = parse_cluster("4xL40S", memory_fraction), BoundMeaning("requests", 90.0)
    model = builtin_model("llama-3.1-8b")
    profile = roofline_profile(model, cluster, "bf16", engine=ENGINES["exegpt"])
    how = {"latency_bound_s": latency_s, "bound": bound, "policies": ("waa-c",)}
    return tune(model, cluster, Workload.fixed(128, 1024), profile, **how), profile


@pytest.mark.parametrize("latency_s", [48.0, 60.6])
def test_more_memory_never_makes_waa_miss_a_bound(latency_s):
    """Its residents grow until memory is full, so that only a smaller pool keeps a bound."""
    rates = []
    for fraction in (0.7, 0.9, 0.99):
        tuned, profile = waa_within(latency_s, fraction)
        assert tuned.schedule and tuned.estimate.latency_s <= latency_s
        rates.append(tuned.estimate.throughput_tok_s)
        assert estimate(tuned.schedule, profile).throughput_tok_s == pytest.approx(rates[-1], rel=1e-6)
    assert all(more >= 0.995 * less for less, more in itertools.pairwise(rates))


def test_a_pool_that_keeps_waas_bound_is_replayed_as_predicted():
    tuned, profile = waa_within(60.6, 0.99)
    one = replace(tuned.schedule, replicas=1)
    requests = one.workload.draw(20000)  # equal outputs end in waves: a few of them count unevenly
    nothing = np.zeros(len(requests))
    inputs, outputs = (np.array([getattr(r, side) for r in requests], dtype=float) for side in ("input", "output"))
    times = Replicas(profile).serve(one, RequestArrays(nothing, inputs, outputs, nothing))
    kept = slice(3000, 18000)
    latencies, ends = (times.finished - times.started)[kept], np.sort(times.finished)[kept]
    assert np.percentile(latencies, 90) == pytest.approx(tuned.estimate.latency_s, rel=0.02)
    rate = (len(ends) - 1) / (ends[-1] - ends[0])
    assert rate * tuned.schedule.replicas == pytest.approx(tuned.estimate.throughput_seq_s, rel=0.02)


def test_waas_lowest_latency_is_one_that_a_bound_can_ask_for():
    tuned, _ = waa_within(1.0, 0.99)
    assert not tuned.schedule
    found, _ = waa_within(tuned.lowest_latency_s * 1.001, 0.99)
    assert found.schedule
    missed, _ = waa_within(tuned.lowest_latency_s * 0.999, 0.99)
    assert not missed.schedule
