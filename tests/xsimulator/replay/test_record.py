"""What a preempted request has experienced: it started, and gave its first token, once."""

from dataclasses import replace

import pytest

from tests.xcore.small_specs import profile, schedule
from xcore.specs.workload import RequestLengths
from xsimulator.replay.event_simulator import replay


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_a_preempted_request_keeps_its_start_and_first_token(policy):
    """Requests that are resident together from the beginning, with memory for all their tokens and with too little."""
    plan = schedule(policy, max_num_seqs=4, kv_blocks=400, admission="grow")
    requests = [RequestLengths(30, 60) for _ in range(4)]
    enough, few = (replay(replace(plan, kv_blocks=n), profile(), requests) for n in (400, 14))
    assert few.preemptions > 0 == enough.preemptions and few.reused == enough.reused == 0
    begun = [{s.index: (s.start_s, s.first_token_s) for s in run.served} for run in (few, enough)]
    assert begun[0] == {index: pytest.approx(times) for index, times in begun[1].items()}
    assert few.seconds > enough.seconds
