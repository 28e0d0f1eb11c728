"""An engine that stays open: requests come while it steps, every token is an event, and nothing is lost."""

from dataclasses import replace

import pytest

from tests.xrunner import cells
from tests.xrunner.cells import LENGTHS, disaggregated, requests
from tests.xrunner.core.test_job import run_cells
from tests.xrunner.open_engine import feed
from xcore.errors import InputError
from xcore.requests.engine_protocol import TokenEvent
from xcore.requests.request import Request, Result
from xcore.specs.workload import RequestLengths, Workload
from xrunner.core.drift import LengthDrift
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.rank.warm_up import Extent

POLICIES = [policy for policy in cells.POLICIES if policy != "hybrid"]


@pytest.fixture(scope="module")
def model(directories):
    return load_model(directories["llama"])


def opened(model, policy="orca", kv_blocks=40, **variables):
    plan = cells.schedule(model.spec, policy, kv_blocks=kv_blocks, **variables)
    engine = Engine(model, plan)
    engine.open(Extent.within(plan, 60, 40))
    return engine


@pytest.fixture(scope="module")
def expected(model):
    """Tokens of a run of the list, by id."""
    report = Engine(model, cells.schedule(model.spec, "orca", kv_blocks=40)).run(requests(LENGTHS))
    return {result.id: list(result.output_ids) for result in report.results}


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_a_run_of_the_list(model, expected, policy):
    engine = opened(model, policy)
    tokens, results = feed(engine, requests(LENGTHS))
    assert tokens == expected
    assert {name: list(result.output_ids) for name, result in results.items()} == expected
    assert {result.finish_reason for result in results.values()} == {"length"}


def test_an_aborted_request_ends_with_what_it_has(model, expected):
    engine = opened(model)
    longest = max(expected, key=lambda name: len(expected[name]))
    tokens, results = feed(engine, requests(LENGTHS), aborted=[longest])
    ended = results.pop(longest)
    assert ended.finish_reason == "cancelled"
    assert 0 < len(ended.output_ids) < len(expected[longest])
    assert list(ended.output_ids) == tokens[longest] == expected[longest][: len(ended.output_ids)]
    assert all(list(result.output_ids) == expected[name] for name, result in results.items())


def test_an_output_that_is_whole_is_followed_though_it_is_aborted(model):
    """As one that a stop text ends, up to there; one whose client has gone isn't whole."""
    engine = opened(model)
    followed = engine._driver.outputs.drift = LengthDrift(Workload.fixed(4, 9))
    (request,) = requests([(4, 30)])
    for i, output_tokens in enumerate([3, None, 5, None]):
        engine.add(replace(request, id=str(i)))
        count = 0
        while count < 6:
            count += sum(isinstance(event, TokenEvent) for event in engine.step())
        engine.abort(str(i), output_tokens)
        (result,) = [event for event in engine.step() if isinstance(event, Result)]
        assert result.finish_reason == "cancelled" and len(result.output_ids) >= 6
    assert list(followed._observed) == [RequestLengths(4, 3), RequestLengths(4, 5)]


def test_the_engine_is_idle_between_requests_and_remembers_no_ended_one(model):
    engine = opened(model)
    (request,) = requests([(4, 3)])
    for i in range(300):
        assert engine.idle and not engine.step()
        engine.add(Request(str(i), request.prompt_ids, 1, True))
        ended = []
        while not engine.idle:
            ended += engine.step()
        assert [type(event).__name__ for event in ended] == ["TokenEvent", "Result"]
    assert len(engine._driver.outputs.running) <= 260
    engine.drain()


def test_what_the_cache_cannot_hold_is_refused_and_the_rest_goes_on(model):
    engine = opened(model, kv_blocks=2)
    small, large = requests([(4, 3), (40, 30)])
    engine.add(small)
    with pytest.raises(InputError, match="'1' needs 5 KV blocks, and the schedule's cache has 2"):
        engine.add(large)
    assert [type(event).__name__ for event in engine.drain()] == ["TokenEvent"] * 3 + ["Result"]


@pytest.mark.parametrize("admission", ["reserve", "grow"])
@pytest.mark.parametrize("when", ["runs", "waits", "comes later"])
def test_a_schedule_of_fewer_blocks_takes_over_with_who_needs_more(model, admission, when):
    """The cache holds it: with less, one that grows would wait for ever once it is preempted."""
    engine = opened(model, admission=admission)
    first, large = requests([(4, 30), (20, 40)])
    (expected,) = Engine(model, engine.schedule).run([large]).results
    engine.add(first)
    if when != "comes later":
        engine.add(large)
    for _ in range(3 if when == "runs" else 0):
        engine.step()
    engine.follow(replace(engine.schedule, kv_blocks=2))
    events = engine.step()
    if when == "comes later":
        engine.add(large)
    while not engine.idle:
        events += engine.step()
    results = {event.id: event for event in events if isinstance(event, Result)}
    assert len(engine.changes) == 1 and len(results) == 2
    assert results[large.id].output_ids == expected.output_ids
    engine.drain()


def test_an_id_is_free_again_when_its_request_has_ended(model):
    engine = opened(model)
    (request,) = requests([(4, 3)])
    engine.add(request)
    with pytest.raises(InputError, match="'0' occurs twice"):
        engine.add(request)
    assert engine.drain()[-1].id == "0"
    engine.add(request)


def test_an_abort_of_another_replicas_request_is_passed_on_whoever_takes_the_turn(model):
    """From another thread it may come at any moment: none is lost between two looks."""
    engine, passed = opened(model), []
    engine._driver.elsewhere = passed.append
    engine.add(requests([(4, 30)])[0])
    engine.abort("elsewhere")
    engine._driver.turn()  # as while it waits for others
    engine.abort("0")
    engine.step()
    assert passed == ["elsewhere"] and engine.idle


def test_an_engine_that_surrenders_aborts_other_replicas_requests_before_their_end(model):
    """Though its own have all ended: they would be run to their ends before the next engine is made, and an abort
    that comes behind the end would be for that one.
    """
    engine, told = opened(model), []
    engine._driver.elsewhere = told.append
    engine._replicas.close = lambda: told.append("end")
    engine._unfinished["elsewhere"] = requests([(4, 3)])[0]
    engine.surrender()
    assert told == ["elsewhere", "end"]


def test_a_closed_engine_cannot_be_used(model):
    engine = opened(model)
    engine.close()
    with pytest.raises(RuntimeError, match="only the leader of an open engine"):
        engine.step()
    with pytest.raises(RuntimeError, match="closed"):
        _ = engine.model
    engine.close()  # once more changes nothing


@pytest.mark.slow
def test_on_two_ranks(job, tmp_path, directories, expected, model):
    """Two stages, two replicas, prefill and decode disaggregated."""
    plans = {
        "stages": cells.schedule(model.spec, "chunked", (1, 1)),
        "replicas": cells.schedule(model.spec, "orca", replicas=2),
        "disaggregated": disaggregated(model.spec, (1,), (1,)),
    }
    todo, longest = requests(LENGTHS), max(expected, key=lambda name: len(expected[name]))
    cases = {name: ("llama", plan) for name, plan in plans.items()}
    facts = run_cells(job, tmp_path, directories, 2, cases, todo=todo, cancelled=[longest], program="open_engine")
    for name, ran in facts.items():
        results = {result["id"]: result for result in ran["results"]}
        assert sorted(results) == sorted(expected), name
        for request_id, result in results.items():
            output = result["output_ids"]
            assert ran["tokens"][request_id] == output == expected[request_id][: len(output)], name
            assert request_id == longest or len(output) == len(expected[request_id]), name
        assert results[longest]["finish_reason"] in ("cancelled", "length")
