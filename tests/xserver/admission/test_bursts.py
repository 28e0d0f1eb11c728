"""Admission control in front of an engine in simulated time: what becomes of many requests at once."""

import heapq
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated_server import SimulatedServer
from tests.xserver.admission.test_admission_control import PROFILE, SCHEDULE
from xcore.policies.chunked import ChunkedControl
from xcore.policies.orca import OrcaControl
from xcore.requests.engine_protocol import Opened
from xcore.requests.request import Request
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import Stage
from xcore.specs.workload import task
from xcore.traces.trace import parse_workload
from xprofiler.roofline import roofline_profile
from xserver.admission.admission_control import Admission
from xserver.engines.engine_link import Output
from xserver.http.api_error import ApiError

ORCA = OrcaControl(max_num_seqs=16, prefills_per_step=1)
CHUNKED = ChunkedControl(max_num_seqs=64, max_num_batched_tokens=2048)
LARGE_STEPS = replace(
    SCHEDULE,
    policy="chunked",
    control=ChunkedControl(max_num_seqs=128, max_num_batched_tokens=36864),
    kv_blocks=9000,
    workload=parse_workload("40/16"),
)
"""One iteration prefills all prompts that wait, and all outputs are of one length."""


def told_to_wait(server, number, input_tokens, output_tokens):
    """Send a request of exactly so many tokens; the seconds until its client is to retry, None if accepted."""
    try:
        server.send(Request(str(number), (1,) * input_tokens, output_tokens, ignore_eos=True), output_tokens)
    except ApiError as error:
        return int(error.headers["retry-after-ms"]) / 1000
    return None


def burst(schedule, count=400, seed=0, gap_s=5e-4, profile=PROFILE):
    """Send requests at once, and each refused one once more when it was told to.

    Returns the times of the second ones with their acceptance, and the server.
    """
    rng, server, retries = np.random.default_rng(seed), SimulatedServer(schedule, profile, count), []
    inputs, outputs = (
        side.sample(count, rng).astype(int).tolist() for side in (schedule.workload.input, schedule.workload.output)
    )
    for number in range(count):
        server.run(1.0 + number * gap_s)
        told_s = told_to_wait(server, number, inputs[number], outputs[number])
        if told_s is not None:
            heapq.heappush(retries, (server.now_s + told_s, number))
    again = []
    while retries:
        s, number = heapq.heappop(retries)
        server.run(s)
        again.append((s - 1.0, told_to_wait(server, number, inputs[number], outputs[number]) is None))
    server.run(server.now_s + 4 * schedule.latency_bound_s)
    return again, server


@pytest.mark.parametrize("control", [ORCA, pytest.param(CHUNKED, marks=pytest.mark.slow)])
def test_several_rounds_of_residents_are_in_time(control):
    """Places beyond the first round become free when answers end, not at the pace of prefills."""
    policy = "orca" if control is ORCA else "chunked"
    schedule = replace(SCHEDULE, policy=policy, control=control, kv_blocks=6000, latency_bound_s=20.0)
    seats = control.max_num_seqs
    count = 100 if control is ORCA else 400
    again, server = burst(replace(schedule, workload=task("T")), count)
    assert len(server.finished) > 3 * seats and len(again) < count / 2
    assert all(end_s <= output.added_s + 20.0 for output, end_s in server.finished)


@pytest.mark.parametrize(("bound_s", "rounds"), [(1.25, 1), (2.0, 1.9)])
def test_sequences_that_start_together_also_end_together(bound_s, rounds):
    """A new server, whose engine has sent no message, gets a burst; all of a round start when the last one ends."""
    schedule = replace(LARGE_STEPS, latency_bound_s=bound_s)
    _, server = burst(schedule, gap_s=1e-4)
    assert len(server.finished) > rounds * 128
    assert all(end_s <= output.added_s + bound_s for output, end_s in server.finished)


def test_the_prefills_of_a_burst_are_not_taken_for_a_slower_machine():
    """The oracle: an engine that is exactly as predicted. Its first sequences wait for the prefills of 90 others."""
    _, server = burst(replace(LARGE_STEPS, latency_bound_s=2.0))
    scales = server.admission._pace._scales
    assert scales and all(0.9 <= scale <= 1.1 for scale in scales.values())


@pytest.mark.parametrize("bound_s", [3.0, pytest.param(8.0, marks=pytest.mark.slow)])
def test_refused_clients_of_a_burst_are_accepted_when_they_come_again(bound_s):
    schedule = replace(SCHEDULE, policy="chunked", control=CHUNKED, kv_blocks=6000, latency_bound_s=bound_s)
    again, server = burst(replace(schedule, workload=parse_workload("200/40") if bound_s < 5 else task("T")))
    assert len(again) > 200 and np.mean([accepted for _, accepted in again]) >= 0.95
    assert min(s for s, _ in again) < 1.3 * bound_s
    assert all(end_s <= output.added_s + bound_s for output, end_s in server.finished)


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_prefill_at_the_same_time(replicas):
    """Waiting sequences on each of several replicas delay the others no longer than as many on one replica."""
    seconds = []
    for schedule in (SCHEDULE, replace(SCHEDULE, replicas=replicas)):
        waiting = [Output(Request(str(place), (1,) * 100, 50)) for place in range(4 * schedule.replicas)]
        bounded = replace(schedule, latency_bound_s=20.0)
        admission = Admission(Opened(bounded, PROFILE, None, (), 0.0), lambda now=waiting: now, 1000, lambda: 0.0)
        seconds.append(admission._prefills_s(waiting, [50] * len(waiting), ())[0][0])
    assert seconds[1] == pytest.approx(seconds[0])


@pytest.mark.slow
def test_a_pipeline_full_of_prompts_is_not_taken_for_a_faster_machine():
    """Prompts on both stages at all times delay a token by one stage, and not by two as a single prompt does."""
    model, cluster = SCHEDULE.model.spec, parse_cluster("2xA100-80GB")
    half = model.layers // 2
    stages = tuple(Stage((i,), 1, "both", None, (i * half, (i + 1) * half)) for i in range(2))
    control = ChunkedControl(max_num_seqs=64, max_num_batched_tokens=2048)
    schedule = replace(SCHEDULE, policy="chunked", control=control, kv_blocks=9000, cluster=cluster, stages=stages)
    schedule = replace(schedule, workload=task("T"), latency_bound_s=10.0)
    profile, bounded = roofline_profile(model, cluster), 0
    late = []
    for seed in (7, 8, 9):
        random.seed(seed)  # which spreads the times to retry
        _, server = burst(schedule, 300, seed, gap_s=1e-3, profile=profile)
        finished = [(output, end_s) for output, end_s in server.finished if output.due_s < np.inf]
        late += [end_s for output, end_s in finished if end_s > output.added_s + 10.0]
        bounded += len(finished)
    assert bounded > 3 * 200 and len(late) <= 0.01 * bounded
