"""The conversations of `benchmarks.conversation`: what users send, and how answers are judged."""

import asyncio
import json
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")

from benchmarks import conversation
from benchmarks.conversation import ANSWER, BLOCKS, LONGEST, SYSTEM, TURN, TURNS, USERS, Load, Ran, Row, differing
from benchmarks.servers import started
from tests.stored_profile import store_profile
from xcore import document
from xrunner.models.create import create_model

LOAD = Load("http://127.0.0.1:1", 2000.0, 0.3, 7, 4000)


@pytest.fixture
def sent(monkeypatch):
    """The prompts of a load whose turns are all answered at once, but for every fifth."""
    prompts = []

    async def ask(pool, prompt, ran):
        prompts.append(list(prompt))
        return None if len(prompts) % 5 == 0 else [number % 7 for number in prompt[-ANSWER:]]

    monkeypatch.setattr(conversation, "ask", ask)
    return asyncio.run(conversation.run_load(LOAD)), prompts


def test_turns_continue_conversations_that_begin_alike(sent):
    ran, prompts = sent
    system = prompts[0][:SYSTEM]
    lengths = {SYSTEM + TURN + turn * (TURN + ANSWER) for turn in range(TURNS)}
    assert {len(prompt) for prompt in prompts} == lengths and max(lengths) + ANSWER == LONGEST
    assert all(prompt[:SYSTEM] == system for prompt in prompts)
    later = [name for name in ran.answers if int(name.split()[3])]
    assert len(later) > USERS  # a turn after an answered one has its prompt and answer before its own tokens
    known = {json.dumps(prompt) for prompt in prompts}
    continued = [prompt for prompt in prompts if json.dumps(prompt[: -TURN - ANSWER]) in known]
    assert continued and all(
        prompt[-TURN - ANSWER : -TURN] == [number % 7 for number in prompt[: -TURN - ANSWER][-ANSWER:]]
        for prompt in continued
    )


def test_the_cache_holds_a_quarter_of_all_conversations():
    assert BLOCKS * 16 <= USERS * LONGEST / 4 < (BLOCKS + 1) * 16


def test_goodput_counts_answers_in_time_and_tokens_are_compared_by_turn():
    runs = [Ran(sent=4, refused=1, latencies_s=[0.5, 1.5, 0.9], answers={"1 0 0 0": [1]}) for _ in range(2)]
    row = Row(10.0, tuple(runs), 1.0)
    assert row.in_time == pytest.approx(2 / 3) and row.goodput == pytest.approx(0.2)
    other = Ran(answers={"1 0 0 0": [2], "1 0 0 1": [3]})
    assert differing({"caching": row, "plain": Row(10.0, (other,), 1.0)}) == (1, 1)
    assert differing({"caching": row, "plain": Row(10.0, (replace(other, answers={}),), 1.0)}) == (0, 0)


@pytest.mark.slow
def test_both_servers_answer_with_equal_tokens(tmp_path):
    model = tmp_path / "model"
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 4000, "context": 2048}
    create_model(model, "llama", **sizes, seed=0, merges=True)
    store_profile(model, 1)
    ran = {}
    for name in (conversation.CACHING, conversation.PLAIN):
        inside = tmp_path / name
        inside.mkdir()
        document.write(inside / "s.json", conversation.schedule_for(model, 30.0, name == conversation.CACHING))
        with started(inside, ["-m", str(model), "-s", str(inside / "s.json"), "--pinned"]) as (url, _):
            ran[name] = Row(3.0, (conversation.measured(replace(LOAD, url=url, rate=20.0, seconds=3.0)),), 30.0)
    both, differ = differing(ran)
    assert both > 20 and not differ and all(not row.runs[0].failed for row in ran.values())
    assert [row.runs[0].cached_tokens > 0 for row in ran.values()] == [True, False]
