"""The engine: its tokens are transformers', and no request is lost, doubled or left with a block."""

import gc
import itertools
import threading
import time
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.xrunner import cells
from tests.xrunner.cells import LENGTHS, generate, requests
from xcore.errors import InputError
from xcore.orders import fcfs
from xcore.policies.from_schedule import make_ledger, make_policy
from xcore.requests.request import Request
from xrunner.core.driver import Driver
from xrunner.core.engine import Engine
from xrunner.models import load_model

POLICIES = [policy for policy in cells.POLICIES if policy != "hybrid"]  # on one stage it is static


@pytest.fixture(scope="module")
def models(directories):
    return {arch: load_model(path) for arch, path in directories.items()}


def schedule(model, policy="rra", kv_blocks=40, **variables):
    return cells.schedule(model.spec, policy, kv_blocks=kv_blocks, **variables)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_every_policy_gives_the_tokens_of_transformers(directories, models, arch):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(directories[arch], dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    todo = requests(LENGTHS)
    reference = {request.id: generate(theirs, request) for request in todo}
    near_ties = 0
    for policy in POLICIES:
        report = Engine(models[arch], schedule(models[arch], policy)).run(todo)
        for result in report.results:
            tokens, gaps = reference[result.id]
            first = next(
                (i for i, pair in enumerate(zip(result.output_ids, tokens, strict=True)) if pair[0] != pair[1]), None
            )
            if first is not None:
                assert gaps[first] < 1e-4, (policy, result.id, first, gaps[first])
                near_ties += 1
    assert near_ties <= 1


def test_outputs_end_at_an_end_of_text(directories, models):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(directories["llama"], dtype=torch.float32)
    todo = requests(LENGTHS, ignore_eos=False)
    theirs.generation_config.eos_token_id = None
    generated = list(itertools.chain.from_iterable(generate(theirs, r)[0] for r in todo))
    frequent = torch.tensor(generated).bincount().topk(3).indices.tolist()
    model = models["llama"]
    ending = type(model)(model.spec, model.dtype, model.layers, model.ends, frozenset(frequent))
    reference = {request.id: generate(theirs, request, eos_token_id=frequent)[0] for request in todo}
    for policy in POLICIES:
        results = Engine(ending, schedule(ending, policy)).run(todo).results
        assert {r.id: list(r.output_ids) for r in results} == reference
        stopped = {r.id for r in results if r.finish_reason == "stop"}
        assert stopped == {name for name, tokens in reference.items() if tokens[-1] in frequent}
        assert len(stopped) > 0
    free = Engine(ending, schedule(ending)).run(requests(LENGTHS, ignore_eos=True)).results
    assert all(len(r.output_ids) == LENGTHS[int(r.id)][1] and r.finish_reason == "length" for r in free)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_request_that_arrives_after_the_policy_was_asked_is_run(models, monkeypatch, policy):
    model, clock = models["llama"], [0.0]
    engine = Engine(model, schedule(model, policy))
    turn = Driver.turn

    def turned(driver):
        stepped = turn(driver)
        clock[0] += 0.1
        return stepped

    monkeypatch.setattr(Driver, "turn", turned)
    monkeypatch.setattr(Driver, "now", lambda driver: clock[0])
    (request,) = requests([(5, 3)])
    report = engine.run([Request(request.id, request.prompt_ids, 3, True, 0.05)])
    assert [len(result.output_ids) for result in report.results] == [3]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    gaps=st.lists(st.floats(0, 0.002), min_size=12, max_size=12),
    kv_blocks=st.integers(4, 20),
    dropped=st.sets(st.integers(0, 11), max_size=3),
    data=st.data(),
)
def test_nothing_is_lost_doubled_or_leaked(models, policy, lengths, gaps, kv_blocks, dropped, data):
    model = models["llama"]
    todo = requests(lengths)
    todo = [Request(r.id, r.prompt_ids, r.max_tokens, True, sum(gaps[: i + 1])) for i, r in enumerate(todo)]
    plan = schedule(model, policy, kv_blocks)
    ledgers = []

    def remember(*args):
        ledgers.append(make_ledger(*args))
        return ledgers[-1]

    engine = Engine(model, plan)
    when = data.draw(st.integers(0, 3), label="results before the cancellation")
    seen = []

    def on_finish(result):
        seen.append(result)
        if len(seen) == when:
            for index in dropped:
                engine.abort(str(index))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xrunner.core.driver.make_ledger", remember)
        report = engine.run(todo, on_finish)
    (ledger,) = ledgers
    ledger.check()
    assert ledger.idle and ledger.pool.available == ledger.pool.total
    assert list(report.results) == seen
    assert sorted(r.id for r in report.results) == sorted(r.id for r in todo)
    for result in report.results:
        request = todo[int(result.id)]
        if result.finish_reason == "cancelled":
            assert int(result.id) in dropped and len(result.output_ids) < request.max_tokens
            continue
        assert result.finish_reason == "length" and len(result.output_ids) == request.max_tokens
        assert request.arrival_s <= result.start_s < result.first_token_s <= result.finish_s
    assert {s.index for s in report.served} == {int(r.id) for r in seen if r.finish_reason == "length"}


def test_the_timeline_is_what_the_policy_decided(models):
    model = models["llama"]
    plan = schedule(model, "rra")
    todo = requests(LENGTHS)
    report = Engine(model, plan).run(todo)
    policy = make_policy(plan)
    ledger = make_ledger(plan, fcfs)
    from xcore.batching import Sequence

    ledger.submit(Sequence(i, n, m) for i, (n, m) in enumerate(LENGTHS))
    expected = []
    while not ledger.idle:
        step = policy.next_step(ledger, 0.0)
        expected.append((step.phase, len(step.encode) + len(step.decode), step.tokens))
        ledger.advance(step)
    assert [(s.phase, s.sequences, s.tokens) for s in report.timeline.spans] == expected
    spans = report.timeline.spans
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))
    assert report.seconds == spans[-1].end_s == max(r.finish_s for r in report.results)
    starts = {span.start_s for span in spans if span.phase == "encode"}
    assert {s.start_s for s in report.served} <= starts
    assert [s.output_tokens for s in sorted(report.served, key=lambda s: s.index)] == [m for _, m in LENGTHS]


def test_a_chunked_prompt_starts_with_its_first_chunk(models):
    model = models["gpt2"]
    report = Engine(model, schedule(model, "chunked")).run(requests([(60, 3)]))
    assert [s.tokens for s in report.timeline.spans] == [13, 13, 13, 13, 8, 1, 1]
    (served,) = report.served
    assert served.start_s == report.timeline.spans[0].start_s
    assert served.first_token_s == report.timeline.spans[4].end_s


def test_finished_rows_of_a_static_batch_are_computed_along(models):
    report = Engine(models["llama"], schedule(models["llama"], "static")).run(requests([(4, 1), (30, 2), (7, 6)]))
    assert [s.sequences for s in report.timeline.spans] == [3] * 6
    assert [len(r.output_ids) for r in report.results] == [1, 2, 6]


def test_micro_batches_on_one_rank_come_one_after_the_other(models):
    report = Engine(models["llama"], schedule(models["llama"], "orca", micro_batches=3)).run(requests())
    spans = report.timeline.spans
    assert {span.micro_batch for span in spans} == {0, 1, 2}
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))
    assert len(report.results) == len(LENGTHS)


def test_arrivals_are_waited_for(models):
    todo = requests([(4, 2), (4, 2)])
    todo[1] = Request("late", todo[1].prompt_ids, 2, True, 0.15)
    report = Engine(models["llama"], schedule(models["llama"], "orca")).run(todo)
    late = report.results[1]
    assert late.id == "late" and late.start_s >= 0.15


def test_cancellation_from_another_thread_while_idle(models):
    engine = Engine(models["llama"], schedule(models["llama"], "orca"))
    far = Request("far", (1, 2, 3), 4, True, 3600.0)
    threading.Timer(0.2, engine.abort, ["far"]).start()
    began = time.monotonic()
    (result,) = engine.run([far]).results
    assert result.finish_reason == "cancelled" and result.output_ids == () and time.monotonic() - began < 60


def test_an_engine_runs_again(models):
    engine = Engine(models["llama"], schedule(models["llama"], "chunked"))
    first, second = (engine.run(requests(LENGTHS)).results for _ in range(2))
    assert {r.id: r.output_ids for r in first} == {r.id: r.output_ids for r in second}


def test_a_closed_engine_leaves_no_cache(models):
    engine = Engine(models["llama"], schedule(models["llama"]))
    engine.run(requests([(4, 2)]))
    cache = weakref.ref(engine.worker.cache.keys[0])
    gc.disable()  # what is freed at once, and not at some later moment
    try:
        engine.close()
        assert cache() is None and engine.leads
    finally:
        gc.enable()


def test_an_unreferenced_engine_leaves_no_cache(models):
    gc.disable()
    try:
        engine = Engine(models["llama"], schedule(models["llama"]))
        engine.run(requests([(4, 2)]))
        cache = weakref.ref(engine.worker.cache.keys[0])
        del engine
        assert cache() is None
    finally:
        gc.enable()


def test_no_requests(models):
    report = Engine(models["llama"], schedule(models["llama"])).run([])
    assert report.results == () and report.seconds == 0


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Request("x", (1,) * 90, 7), "'x'.*97.*context is 96"),
        (Request("x", (), 7), "'x'.*empty"),
        (Request("x", (1, 300), 7), "'x'.*300"),
        (Request("0", (1,), 7), "'0'.*twice"),
    ],
)
def test_bad_requests_are_refused_before_any_work(models, bad, words):
    engine = Engine(models["llama"], schedule(models["llama"]))
    with pytest.raises(InputError, match=words):
        engine.run([*requests([(4, 2)]), bad], on_finish=pytest.fail)


def test_a_request_larger_than_the_cache_is_named(models):
    long = Request("long", (7,) * 60, 20)
    with pytest.raises(InputError, match="'long' needs 5 KV blocks"):
        Engine(models["llama"], schedule(models["llama"], kv_blocks=4)).run([*requests([(4, 2)]), long])


def test_schedules_for_something_else(models):
    with pytest.raises(InputError, match="not for"):
        Engine(models["llama"], schedule(models["gpt2"]))
    from dataclasses import replace

    with pytest.raises(InputError, match="bf16"):
        Engine(models["llama"], replace(schedule(models["llama"]), dtype="bf16"))
    with pytest.raises(InputError, match="GiB"):
        Engine(models["llama"], schedule(models["llama"], kv_blocks=2**36))
