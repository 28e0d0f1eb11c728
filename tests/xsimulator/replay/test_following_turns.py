"""Turns that follow others in the compiled event loop, against the lanes in Python: every time, hit and preemption."""

from dataclasses import asdict, replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import changed
from tests.xsimulator.replay.test_compiled import SPECULATIONS
from tests.xsimulator.replay.test_event_simulator import PROFILE, plans
from xcore.specs.workload import RequestLengths
from xcore.traces.prompt_identity import PromptIdentity
from xsimulator.replay import compiled
from xsimulator.replay.closed_loop import Sessions, replay_closed_loop
from xsimulator.replay.compiled import is_compiled

pytest.importorskip("xsimulator.replay.event_loop", reason="exegpt was installed without a C compiler")

TURNS = st.tuples(st.integers(1, 60), st.integers(1, 30), st.sampled_from([0.0, 0.0, 0.003, 0.0417, 0.2, 1.3]))
SESSIONS = st.lists(st.lists(TURNS, min_size=1, max_size=4), min_size=1, max_size=12)


def growing(sessions, agents):
    """Turns whose prompts repeat the session so far, and the sessions."""
    rows, pauses_s, turns = [], [], []
    for name, own in enumerate(sessions):
        context = 0
        turns.append(tuple(range(len(rows), len(rows) + len(own))))
        for input, output, pause_s in own:
            rows.append(RequestLengths(context + input, output, identity=PromptIdentity(conversation=str(name))))
            context += input + output
            pauses_s.append(pause_s)
    return rows, Sessions(tuple(turns), tuple(pauses_s), agents)


def figures(loop):
    times = {each.index: asdict(each) for each in loop.replay.served}
    totals = {"seconds": loop.replay.seconds, "full_s": loop.full_s, "reused": loop.replay.reused}
    return times | {-1: totals | {"preemptions": loop.replay.preemptions}}


def check(plan, tables, sessions, agents):
    if not is_compiled(plan):
        return None
    rows, own = growing(sessions, agents)
    plan = replace(plan, kv_blocks=max(plan.kv_blocks, max(-(-(r.input + r.output + 4) // 16) for r in rows)))
    found = replay_closed_loop(plan, tables, rows, own)
    lanes = figures(replay_closed_loop(plan, tables, rows, own, lanes=True))
    with mock.patch.object(compiled, "COMPILED", False):
        python = figures(replay_closed_loop(plan, tables, rows, own))
    assert sorted(lanes) == [*range(-1, len(rows))]
    for key, expected in lanes.items():
        assert python[key] == pytest.approx(expected, rel=1e-9), key
        assert figures(found)[key] == pytest.approx(expected, rel=1e-9), key
    return found


@settings(max_examples=60, deadline=None)
@given(plans(), SESSIONS, st.integers(1, 6), st.sampled_from([1, 2]), st.sampled_from([0.0, 0.004]), SPECULATIONS)
def test_turns_follow_under_every_policy(plan, sessions, agents, in_flight, front_end_s, speculation):
    made, tables = plan
    made = replace(made, replicas=1, speculation=None if made.model.spec.encoder_layers else speculation)
    check(made, replace(tables, in_flight=in_flight, front_end_s=front_end_s), sessions, agents)


@st.composite
def crowded(draw):
    """A schedule whose cache is small, and shared by the turns of a session."""
    made, tables = draw(plans(policies=("orca", "chunked")))
    caches = tables is PROFILE
    made = changed(
        made,
        admission=draw(st.sampled_from(["grow", "reserve"])),
        prefix_caching=caches,
        kv_blocks=draw(st.integers(9, 20)),
        replicas=1 if len(made.stages) > 1 else draw(st.sampled_from([1, 2])),
    )
    return made, replace(tables, in_flight=draw(st.sampled_from([1, 2])))


@settings(max_examples=50, deadline=None)
@given(crowded(), SESSIONS, st.integers(1, 6))
def test_turns_find_the_same_blocks_and_are_preempted_alike(plan, sessions, agents):
    check(*plan, sessions, agents)
