"""Closed forms of adjusted batches against replays, and the remaining variation against its limits."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.adjustment import CASES, profile
from xcore.specs.workload import task
from xsimulator import estimate
from xsimulator.replay.compiled import Replicas, RequestArrays
from xsimulator.steady.adjusted import tokens_left, tokens_left_in_part
from xsimulator.steady.scenario import Scenario


@pytest.mark.parametrize("case", [CASES[2], CASES[-1]], ids=lambda case: case.policy)
@pytest.mark.parametrize("share", [None, 0.05])
def test_throughput_and_latency_are_the_replays(case, share):
    schedule, count = replace(case.schedule, adjust=share), 8000
    predicted, drawn, nothing = estimate(schedule, profile()), task(case.task).draw(count, seed=5), np.zeros(count)
    lengths = (np.array([getattr(row, side) for row in drawn], dtype=np.float64) for side in ("input", "output"))
    times = Replicas(profile()).serve(schedule, RequestArrays(nothing, *lengths, nothing))
    kept = np.argsort(times.finished)[count // 5 : -count // 5]
    ends, latencies = times.finished[kept], (times.finished - times.started)[kept]
    assert predicted.throughput_seq_s == pytest.approx((len(ends) - 1) / (ends[-1] - ends[0]), rel=0.03)
    assert predicted.latency_mean_s == pytest.approx(latencies.mean(), rel=0.03)
    assert predicted.latency_p99_s == pytest.approx(np.percentile(latencies, 99), rel=0.03)


def test_what_remains_is_between_the_share_and_everything():
    case = CASES[0]
    plain = Scenario.of(replace(case.schedule, adjust=None), profile(), None, "exact", True)
    adjusted = replace(plain, adjust=0.05)
    inputs = plain.load.workload.input
    assert tokens_left(plain, 52) == 1.0 and tokens_left(adjusted, 1) == 1.0
    spread = inputs.std / inputs.mean / 52**0.5
    assert tokens_left(adjusted, 52) * spread == pytest.approx(np.hypot(0.05 / 3**0.5, spread / 52**0.5))
    assert tokens_left(replace(plain, adjust=1.0), 52) == 1.0
    assert tokens_left_in_part(0.5, 1) == 0.5 and tokens_left_in_part(0.5, 100) == pytest.approx(1.0, abs=0.01)
