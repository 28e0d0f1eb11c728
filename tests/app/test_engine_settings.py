"""A running engine's settings: as many sequences at a time as its cache holds."""

import pytest

from exegpt.app.engine_settings import engine_schedule, resident
from exegpt.app.settings import find_setting
from xsimulator import estimate
from xsimulator.replay.event_simulator import replay


@pytest.mark.parametrize("workload", ["2048/256", "T"])
def test_what_waits_is_what_a_replay_finds(workload):
    """An oracle: a long list through the event simulator, with far more slots than blocks."""
    setting = find_setting("opt-13b" if workload == "T" else "llama-3.1-8b", "1xA40", workload, "roofline")
    schedule = engine_schedule(setting, "chunked", 1, None, 16, max_num_seqs=2000, max_num_batched_tokens=2048)
    runs, notes = resident(schedule, setting.profile)
    assert 1 < runs.max_num_seqs < 2000 and "wait in the queue" in notes[-1]
    steady = estimate(runs, setting.profile)
    served = replay(schedule, setting.profile, setting.workload.draw(30 * runs.max_num_seqs, seed=3), timeline=False)
    ends = sorted(request.finish_s for request in served.served)
    middle = ends[len(ends) // 5 : -len(ends) // 5]
    assert steady.throughput_seq_s == pytest.approx((len(middle) - 1) / (middle[-1] - middle[0]), rel=0.05)
