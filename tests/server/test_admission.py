"""Admission control: what is predicted of the queue, and what follows from it."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from exegpt.builtin_models import builtin_model
from exegpt.cluster import parse_cluster
from exegpt.engine_protocol import Opened
from exegpt.request import Request
from exegpt.schedule import ModelReference, ProfileReference, Schedule, Stage
from exegpt.server.admission import Admission, Lengths
from exegpt.server.engine_link import Output
from exegpt.server.errors import ApiError
from exegpt.workload import LengthDistribution, task
from xprofiler.roofline import roofline_profile

MODEL, CLUSTER = builtin_model("opt-13b"), parse_cluster("1xA100-80GB")
PROFILE = roofline_profile(MODEL, CLUSTER)
SCHEDULE = Schedule(
    version=Schedule.VERSION,
    policy="orca",
    model=ModelReference(MODEL, MODEL.fingerprint),
    cluster=CLUSTER,
    workload=task("T"),
    profile=ProfileReference("roofline", "0"),
    stages=(Stage((0,), 1, "both", None, (0, MODEL.layers)),),
    kv_blocks=2000,
    dtype="fp16",
    kv_dtype="fp16",
    admission="grow",
    max_num_seqs=16,
    prefills_per_step=1,
    latency_bound_s=20.0,
)


class Clock:
    def __init__(self):
        self.s = 100.0

    def __call__(self):
        return self.s


def outputs(running: int, waiting: int, generated: int = 30, most: int = 900) -> list[Output]:
    made = [Output(Request(str(i), (1,) * 100, most), tokens=[0] * generated) for i in range(running)]
    return made + [Output(Request(str(running + i), (1,) * 100, most)) for i in range(waiting)]


def admission(present: list[Output], bound_s: float | None = 20.0, **changes) -> Admission:
    schedule = replace(SCHEDULE, latency_bound_s=bound_s, **changes)
    made = Admission(Opened(schedule, PROFILE, None, (), 0.0), lambda: present, 1000, Clock())
    made._accepted = sum(1 for output in present if not output.tokens)
    asyncio.run(made.update())
    return made


def test_an_idle_engine_starts_at_once():
    promise = admission([]).admit([(100, 50)], 100.0)
    assert promise.start_s == 100.0 < promise.finish_s < 120.0


def test_starts_come_later_the_more_wait():
    starts = [admission(outputs(16, n)).admit([(100, 50)], 100.0).start_s for n in (0, 4, 8, 16, 32)]
    assert starts == sorted(starts) and starts[0] > 100.0 and starts[-1] > starts[1] + 0.5


def test_every_accepted_sequence_takes_a_place():
    made, present = admission(outputs(16, 8)), []
    starts = [made.admit([(100, 50)], 100.0).start_s for _ in range(30)]
    assert starts == sorted(starts) and starts[-1] > starts[0]
    several = admission(outputs(16, 8)).admit([(100, 50)] * 30, 100.0)
    assert several.start_s == pytest.approx(starts[-1]) and not present


def test_what_would_be_late_is_refused_with_the_time_to_wait():
    made = admission(outputs(16, 4), bound_s=14.0)
    accepted = 0
    with pytest.raises(ApiError) as refused:
        while True:
            made.admit([(100, 900)], 100.0)
            accepted += 1
    error = refused.value
    assert error.status == 429 and error.code == "latency_bound" and accepted > 0
    assert int(error.headers["Retry-After"]) >= int(error.headers["retry-after-ms"]) / 1000 > 0
    assert made.admit([(100, 2)], 100.0)  # shorter answers are still in time


def test_without_a_bound_only_the_queue_is_limited():
    made = admission(outputs(16, 900), bound_s=None)
    for _ in range(50):
        made.admit([(100, 900)], 100.0)
    with pytest.raises(ApiError) as refused:
        made.admit([(100, 900)] * 200, 100.0)
    assert refused.value.code == "concurrency_limit"


def test_prompts_longer_than_planned_are_outside_the_promise_and_few():
    longest = SCHEDULE.workload.input.quantile(0.99)
    assert admission(outputs(4, 0)).admit([(longest + 1, 50)], 100.0).long
    present = [Output(Request(str(i), (1,) * (longest + 1), 50), tokens=[0]) for i in range(3)]
    with pytest.raises(ApiError):
        admission(present).admit([(longest + 1, 50)], 100.0)
    assert not admission(present).admit([(100, 50)], 100.0).long


def test_a_slower_machine_makes_predictions_longer():
    made = admission(outputs(16, 8))
    before = made.admit([(100, 50)], 100.0)
    for _ in range(100):
        made.ended(100, 50, 2 * made.scale * (before.finish_s - before.start_s) / made.scale)
    after = made.admit([(100, 50)], 100.0)
    assert made.scale > 1.5 and after.finish_s > before.finish_s
    quick = admission(outputs(4, 0))
    quick.ended(100, 50, 0.01)
    assert quick.scale == 1.0  # an engine that isn't loaded is quicker than a loaded one


@pytest.mark.parametrize("generated", [0, 1, 50, 127, 128, 400])
def test_supposed_lengths_have_the_conditional_distribution(generated):
    """The oracle: draws from the distribution, those that are no longer than what was generated left out."""
    lengths = LengthDistribution.truncated_normal(100.0, 40.0, 250)
    supposed = [Lengths(lengths).supposed(n, generated, 10**6) for n in range(4000)]
    assert min(supposed) > generated
    drawn = lengths.sample(400_000, np.random.default_rng(0))
    beyond = drawn[drawn > generated]
    if len(beyond) > 1000:
        assert np.mean(supposed) == pytest.approx(beyond.mean(), rel=0.02)
        assert np.percentile(supposed, 90) == pytest.approx(np.percentile(beyond, 90), rel=0.02)


def test_supposed_lengths_stay_within_the_cap():
    lengths = Lengths(LengthDistribution.fixed(100))
    assert lengths.supposed(3, 0, 40) == 40 and lengths.supposed(3, 120, 130) == 130


def test_an_engine_is_not_filled_beyond_what_stays_in_time():
    """With 512 residents every answer would be late: as many are accepted as stay in time together."""
    wide = {"policy": "chunked", "max_num_seqs": 512, "max_num_batched_tokens": 512, "prefills_per_step": None}
    most = admission([], bound_s=12.0, **wide)._most
    assert 16 < most < 512
    made = admission(outputs(most - 1, 0), bound_s=12.0, **wide)
    assert made.admit([(100, 900)], 100.0)
    with pytest.raises(ApiError, match="others"):
        admission(outputs(most, 0), bound_s=12.0, **wide).admit([(100, 2)], 100.0)
    assert admission([], bound_s=12.0, **wide).admit([(100, 900)], 100.0)  # an idle engine takes any
    for _ in range(100):
        made.ended(100, 50, 1.5 * (made._first_s + 49 * made._token_s))
    assert made.scale == pytest.approx(1.5, rel=0.05) and made._most < most


def test_a_schedule_without_a_closed_form_has_a_load_too():
    """RRA that grows is replayed: what it holds follows from what it serves."""
    rra = {"policy": "rra", "max_num_seqs": None, "prefills_per_step": None, "encode_batch": 16}
    rra |= {"decode_batch": 64, "decode_iterations": 16}
    most = [admission([], bound_s=bound_s, **rra)._most for bound_s in (4.0, 6.0, 1000.0)]
    assert most[-1] is None and 1 <= most[0] <= most[1] <= 64


def test_a_cache_smaller_than_a_long_request_is_no_obstacle():
    made = admission(outputs(1, 1, most=100), kv_blocks=22)
    assert made.admit([(100, 50)], 100.0).start_s >= 100.0 and made._table.starts_s
