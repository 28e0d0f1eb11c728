"""A plan's models alone: the quick replay beside the one that follows every request."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xsimulator.replay.test_event_simulator import REQUESTS, plans
from xsimulator.multimodel.plan_replay import replay_alone
from xsimulator.replay.event_simulator import replay


@settings(max_examples=100)
@given(plans(), REQUESTS, st.booleans())
def test_every_request_has_the_replays_times(plan, requests, grows):
    schedule, profile = plan
    if grows and schedule.policy == "orca":
        schedule = replace(schedule, admission="grow")
    requests = sorted(requests, key=lambda r: r.arrival_s)
    expected = replay(schedule, profile, requests, timeline=False).served
    found = replay_alone(schedule, profile, requests)
    rows = sorted(zip(found.finish_s, found.first_token_s, found.start_s, found.arrival_s, strict=True))
    wanted = sorted((s.finish_s, s.first_token_s, s.start_s, s.arrival_s) for s in expected)
    assert len(rows) == len(requests) == len(found.output_tokens)
    for row, want in zip(rows, wanted, strict=True):
        assert row == pytest.approx(want, rel=1e-9)
    assert sorted(found.output_tokens) == sorted(r.output for r in requests)
