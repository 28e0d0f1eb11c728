"""Warm prefixes in a ledger and in replays: hits, times to first token, and blocks that are free again."""

from dataclasses import replace

import pytest

from tests.xcore.applications.test_warming import agent
from tests.xcore.small_specs import profile
from tests.xrunner.cells import schedule
from xcore.applications.warming import WARMING, make_warming
from xcore.batching import Hints, Ledger, PrefixPool, Sequence
from xcore.orders import FCFS, StarvationGuard, make_order
from xcore.orders.warmed import Warmed
from xcore.policies.chunked import ChunkedPolicy
from xcore.specs.builtin_models import builtin_model
from xcore.specs.workload import RequestLengths
from xcore.traces.prompt_identity import PromptIdentity
from xsimulator.replay.dependent_requests import After, replay_dependent

BLOCK = 8
SEARCH_S = 6
"""Duration of the search in the runs here."""


def warmed(name, knob=0.3, order=None):
    models = agent()
    return Warmed(order or FCFS(), lambda warmth: make_warming(name, warmth, models, knob))


def step_to(ledger, policy, end_s, now):
    """Run steps of one second."""
    while now < end_s:
        ledger.observe(now)
        step = policy.next_step(ledger, now)
        if step:
            ledger.advance(step)
        ledger.check()
        now += 1.0
    return now


def hits(name, knob=0.3, busy=False, blocks=12):
    """Tokens of the second call of a run that are cached, after others have needed all other blocks."""
    order = StarvationGuard(warmed(name, knob, make_order("vtc")))
    ledger, policy = Ledger(PrefixPool(blocks, BLOCK), order), ChunkedPolicy(1, 64)
    run = {"application": "agent", "run": "r", "client": "c"}
    thought = Sequence(0, 32, 2, keys=list("abcd"), hints=Hints(unit="think", **run))
    ledger.submit([thought])
    now = step_to(ledger, policy, 4.0, 0.0)
    others = [
        Sequence(1 + i, 48, 2, now + i, keys=[f"{i}{j}" for j in range(6)], hints=Hints(client="c")) for i in range(3)
    ]
    ledger.submit(others)
    answer = Sequence(9, 40, 2, now + SEARCH_S + 4, keys=list("abcde"), hints=Hints(unit="answer", **run))
    late = [Sequence(10, 60, 9, answer.arrival_s - 2, keys=[*range(7)], hints=Hints(client="c"))] if busy else []
    ledger.submit([*late, answer])
    step_to(ledger, policy, 60.0, now)
    assert ledger.idle and not ledger.pins.holders and ledger.pool.available == blocks
    return answer.hit


def test_only_prewarming_keeps_a_prefix_for_a_call_that_has_not_come():
    assert [hits(name) for name in WARMING] == [0, 0, 32]


def test_a_larger_knob_begins_too_late_or_never():
    """The others flush the cache before the quantile of the larger knob."""
    assert [hits("prewarm", knob) for knob in (0.05, 0.3, 0.75, 0.9)] == [32, 32, 0, 0]


def test_a_waiting_request_keeps_what_it_needs():
    """While it waits, another one that was admitted before takes blocks."""
    ways = {}
    for name in WARMING:
        ledger, policy = Ledger(PrefixPool(12, BLOCK), warmed(name)), ChunkedPolicy(1, 64)
        ledger.submit([Sequence(0, 32, 2, keys=list("abcd"))])
        now = step_to(ledger, policy, 4.0, 0.0)
        ledger.submit([Sequence(1, 48, 16, now, keys=[*range(8)])])  # fills the cache
        now = step_to(ledger, policy, now + 1, now)
        third = Sequence(3, 40, 2, now, keys=list("abcde"))
        ledger.submit([Sequence(2, 40, 9, now, keys=list("klmno")), third])
        step_to(ledger, policy, 90.0, now)
        assert ledger.idle and not ledger.pins.holders
        ways[name] = third.hit
    assert ways["lru"] < ways["epwq"] == ways["prewarm"] == 32


SPEC = builtin_model("opt-1.3b")


@pytest.mark.parametrize("knob", [0.1, 0.9])
def test_prefixes_that_are_kept_let_calls_begin_their_output_sooner(knob):
    """In a replay: a run's second call repeats its first prompt, and the cache is full of others meanwhile."""
    plan = replace(schedule(SPEC, "orca", kv_blocks=30, block_size=16, admission="grow"), prefix_caching=True)
    rows = [RequestLengths(160, 3, 0.0, PromptIdentity(prefix="own", prefix_tokens=160))]
    rows += [
        RequestLengths(160, 3, 3.0 + i, PromptIdentity(prefix=f"other{i}", prefix_tokens=160)) for i in range(1, 6)
    ]
    rows += [RequestLengths(170, 3, 0.0, PromptIdentity(prefix="own", prefix_tokens=160))]
    after = [None] * 6 + [After(0, 12.0)]
    run = {"application": "agent", "run": "r"}
    hints = [Hints(unit="think", **run)] + [Hints()] * 5 + [Hints(unit="answer", **run)]
    ttft, cached = {}, {}
    for name in WARMING:
        done = replay_dependent(plan, profile(SPEC), rows, after, warmed(name, knob), hints)
        (last,) = [times for times in done.served if times.index == 6]
        ttft[name], cached[name] = last.first_token_s - last.arrival_s, last.cached_tokens
    assert cached["lru"] == cached["epwq"] == 0 and ttft["lru"] == ttft["epwq"]
    if knob == 0.1:
        assert cached["prewarm"] == 160 and ttft["prewarm"] < ttft["lru"]
    else:
        assert cached["prewarm"] == 0, "the call is too improbable"
