"""Long requests under the learned order while short ones never end: with the starvation guard they are served."""

from itertools import accumulate

import numpy as np
import pytest

from tests.xcore.small_specs import profile, schedule
from xcore.batching import Hints
from xcore.orders import StarvationGuard, make_order
from xcore.specs.workload import RequestLengths
from xsimulator.replay.event_simulator import replay

SHORT, LONG, LONGS = (20, 8), (20, 150), 6
LOAD = 1.2
IDLE_STEPS = 200


@pytest.fixture(scope="module")
def crowd():
    """Short requests at 1.2 times what eight residents serve of them, six long ones among the first 3,600, and the
    schedule; scores are right.
    """
    plan = schedule("orca", max_num_seqs=8, prefills_per_step=8, kv_blocks=400)
    alone = replay(plan, profile(), [RequestLengths(*SHORT)] * 400, timeline=False)
    rng = np.random.default_rng(8)
    gaps = rng.exponential(alone.seconds / 400 / LOAD, size=6000)
    shorts = [RequestLengths(*SHORT, arrival) for arrival in accumulate(gaps)]
    longs = [RequestLengths(*LONG, shorts[100 + 700 * i].arrival_s) for i in range(LONGS)]
    return plan, longs + shorts


def served(crowd, order):
    """The requests by index, and the longest span of the run."""
    plan, requests = crowd
    hints = [Hints(score=-float(request.output)) for request in requests]
    done = replay(plan, profile(), requests, order=order, hints=hints, step_by_step=True)
    longest = max(span.end_s - span.start_s for span in done.timeline.spans)
    return {request.index: request for request in done.served}, longest


def test_the_guard_bounds_the_wait_of_long_requests(crowd):
    """The bound: what first come, first served takes, and twice 200 of the longest steps. Whoever waits for 200 steps
    is promoted after all that came before, and only what those steps took up came from behind.
    """
    last_arrival = crowd[1][-1].arrival_s
    first_come, longest = served(crowd, make_order("fcfs"))
    unguarded, _ = served(crowd, make_order("learned"))
    guarded, _ = served(crowd, make_order("learned", guarded=True))
    for index in range(LONGS):
        assert unguarded[index].start_s > last_arrival, "as long as short ones come, none begins"
        bound_s = first_come[index].finish_s + 2 * IDLE_STEPS * longest
        assert guarded[index].finish_s < bound_s < last_arrival


def test_promotion_by_score_would_starve_them_all_the_same(crowd):
    """vLLM-LTR sorts the promoted by score; under lasting overload short ones are promoted too."""

    class ByScore(StarvationGuard):
        def fresh(self):
            return ByScore(self.order, self.idle_steps, self.quantum)

        def key(self, sequence, now):
            return self.order.key(sequence, now)

    done, _ = served(crowd, ByScore(make_order("learned")))
    assert done[LONGS - 1].start_s > crowd[1][-1].arrival_s
