"""A closed loop: against replays whose arrivals are fixed, and agents counted by the times of their turns."""

import random
from dataclasses import asdict, replace
from itertools import pairwise

import pytest

from tests.xcore.small_specs import profile
from tests.xrunner.cells import disaggregated, schedule
from xcore.specs.builtin_models import builtin_model
from xcore.specs.workload import RequestLengths
from xcore.traces.prompt_identity import PromptIdentity
from xsimulator.replay.closed_loop import Sessions, replay_closed_loop
from xsimulator.replay.dependent_requests import After, replay_dependent
from xsimulator.replay.event_simulator import replay

SPEC = builtin_model("opt-1.3b")
PROFILE = profile(SPEC)


def drawn(sessions=9, seed=1):
    """Requests of sessions of one to four turns that continue each other, and the sessions."""
    rng, rows, turns = random.Random(seed), [], []
    for name in range(sessions):
        context, own = 0, []
        for _ in range(rng.randrange(1, 5)):
            rows.append(RequestLengths(context + rng.randrange(5, 60), rng.randrange(1, 30)))
            rows[-1] = replace(rows[-1], identity=PromptIdentity(conversation=str(name)))
            context = rows[-1].input + rows[-1].output
            own.append(len(rows) - 1)
        turns.append(tuple(own))
    return rows, tuple(turns), tuple(rng.choice((0.0, 0.01, 0.3)) for _ in rows)


def ran(plan, rows, sessions, **options):
    return replay_closed_loop(plan, PROFILE, rows, sessions, **options)


@pytest.mark.parametrize(
    "plan",
    [
        schedule(SPEC, "chunked", kv_blocks=60, prefix_caching=True, admission="grow"),
        schedule(SPEC, "orca", (1, 1), kv_blocks=80),
        schedule(SPEC, "rra", kv_blocks=400),
        disaggregated(SPEC, (1,), (1,), kv_blocks=400),
    ],
    ids=["chunked", "pipeline", "rra", "waa"],
)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_agents_send_their_next_turns_when_the_last_ones_have_ended(plan, in_flight):
    """The replay, step by step, of the arrivals that resulted gives the same times, and each follows from others."""
    rows, turns, pauses_s = drawn()
    engine = replace(PROFILE, in_flight=in_flight, front_end_s=0.004)
    loop = replay_closed_loop(plan, engine, rows, Sessions(turns, pauses_s, 3))
    times = {each.index: each for each in loop.replay.served}
    assert sorted(times) == list(range(len(rows)))
    fixed = [replace(row, arrival_s=times[i].arrival_s) for i, row in enumerate(rows)]
    again = replay(plan, engine, fixed, timeline=False, step_by_step=True)
    assert {s.index: s.finish_s for s in again.served} == pytest.approx({i: s.finish_s for i, s in times.items()})
    assert again.reused == loop.replay.reused and (again.reused > 0) == plan.prefix_caching
    free = [0.0] * 3
    for own in turns:  # the first agent that is free begins the next session
        free.sort()
        for place in own:
            assert times[place].arrival_s == pytest.approx(free[0] + pauses_s[place])
            free[0] = times[place].finish_s
    assert loop.full_s == pytest.approx(min(free))
    sessions = Sessions(turns, pauses_s, 3).seconds(loop.replay.served)
    assert sessions == [times[own[-1]].finish_s - times[own[0]].arrival_s for own in turns]


def test_one_agents_turns_are_a_chain_and_replicas_have_agents_of_their_own():
    rows, turns, pauses_s = drawn()
    cache = {"kv_blocks": 60, "prefix_caching": True, "admission": "grow"}
    plan = schedule(SPEC, "chunked", **cache)
    order = [place for own in turns for place in own]
    after = [None] * len(rows)
    for before, place in pairwise(order):
        after[place] = After(before, pauses_s[place])
    chain = replay_dependent(plan, PROFILE, [replace(row, arrival_s=pauses_s[0]) for row in rows], after)
    alone = ran(plan, rows, Sessions(turns, pauses_s, 1))
    for one, other in zip(alone.replay.served, chain.served, strict=True):
        assert asdict(one) == pytest.approx(asdict(other), rel=1e-12)
    both = ran(schedule(SPEC, "chunked", replicas=2, **cache), rows, Sessions(turns, pauses_s, 3))
    halves = [ran(plan, rows, Sessions(turns[half::2], pauses_s, 2 - half)) for half in (0, 1)]
    served = [each for half in halves for each in half.replay.served]
    assert sorted(both.replay.served, key=lambda s: s.index) == sorted(served, key=lambda s: s.index)
    assert both.full_s == min(half.full_s for half in halves)


def test_fewer_sessions_than_agents_never_fill_all():
    rows, turns, pauses_s = drawn(2)
    plan = schedule(SPEC, "chunked", kv_blocks=60, replicas=2)
    loop = ran(plan, rows, Sessions(turns, pauses_s, 1))
    assert len(loop.replay.served) == len(rows) and loop.full_s == loop.replay.seconds, "one agent, one replica"
    assert ran(plan, rows, Sessions(turns, pauses_s, 5)).full_s == 0.0
