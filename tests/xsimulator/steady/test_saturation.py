"""Many requests at once: what the event simulator makes of them, between ramp-up and drain, is the steady state."""

import functools

import pytest

from tests.xcore.small_specs import schedule
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.request_times import steady_tokens_s
from xcore.specs.schedule import Stage
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xsimulator import estimate
from xsimulator.replay.event_simulator import replay

CLUSTER = parse_cluster("4xA40")
OPT, T5 = builtin_model("opt-13b"), builtin_model("t5-3b")
PROFILES = {model.name: roofline_profile(model, CLUSTER, overhead_s=2e-3) for model in (OPT, T5)}


@functools.cache
def requests_of(name, n=1500):
    """Drawn requests and their own empirical workload, so that the draw's luck is in both sides."""
    drawn = task(name).draw(n, seed=1)
    return drawn, Workload.from_requests(name, drawn)


def side(model, phase, first, stages, tp=1):
    """Equal stages of `tp` devices each, from the rank `first` on."""
    schedules = []
    for i in range(stages):
        encoder, decoder = (
            (layers * i // stages, layers * (i + 1) // stages) if layers else None
            for layers in (model.encoder_layers, model.layers)
        )
        encoder = encoder if phase != "decode" else None
        decoder = decoder if phase != "encode" or not model.encoder_layers else None
        schedules.append(Stage(tuple(range(first + i * tp, first + (i + 1) * tp)), tp, phase, encoder, decoder))
    return tuple(schedules)


def predicted_and_replayed(name, policy, model, stages, **variables):
    """Output tokens per second of the estimate and of the replay."""
    requests, workload = requests_of(name)
    plan = schedule(
        policy,
        model,
        workload.without_requests,
        cluster=CLUSTER,
        stages=stages,
        kv_blocks=100_000,
        dtype="fp16",
        **variables,
    )
    tables = PROFILES[model.name]
    served = replay(plan, tables, requests, timeline=False).served
    return estimate(plan, tables, variation=False).throughput_tok_s, steady_tokens_s(served)


@pytest.mark.parametrize("encode_count", [None, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "batch", "iterations", "model"), [("S", 16, 7, OPT), ("T", 8, 20, OPT), ("S", 12, 7, T5)]
)
def test_rra(name, batch, iterations, model, stages, encode_count):
    predicted, replayed = predicted_and_replayed(
        name,
        "rra",
        model,
        side(model, "both", 0, stages, 4 // stages),
        encode_batch=batch,
        decode_iterations=iterations,
        encode_micro_batches=encode_count,
    )
    assert predicted == pytest.approx(replayed, rel=0.03)


@pytest.mark.parametrize(
    ("name", "batch", "micro_batches", "model", "split"),
    [
        ("S", 1, 1, OPT, ((1, 2), (1, 2))),
        ("S", 16, 1, OPT, ((1, 2), (1, 2))),
        ("S", 4, 2, OPT, ((2, 1), (2, 1))),
        ("C1", 8, 1, OPT, ((1, 2), (1, 2))),
        ("C1", 16, 3, OPT, ((1, 1), (3, 1))),
        ("S", 16, 1, T5, ((1, 1), (1, 2))),
    ],
)
def test_waa_while_encoding_decides(name, batch, micro_batches, model, split):
    (encoders, encode_tp), (decoders, decode_tp) = split
    stages = side(model, "encode", 0, encoders, encode_tp)
    stages += side(model, "decode", encoders * encode_tp, decoders, decode_tp)
    predicted, replayed = predicted_and_replayed(
        name, "waa-c", model, stages, encode_batch=batch, micro_batches=micro_batches
    )
    assert predicted == pytest.approx(replayed, rel=0.03)
