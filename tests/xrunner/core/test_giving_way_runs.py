"""Running requests give way in the engine, by swap and by recompute: tokens are those of an undisturbed run."""

import dataclasses

import pytest

from tests.xcore.small_specs import changed
from tests.xrunner import cells
from tests.xrunner.cells import LENGTHS, requests
from tests.xrunner.core.conftest import tokens_of_transformers
from tests.xrunner.core.test_job import check_tokens, matrix, run_cells
from tests.xrunner.open_engine import feed
from xcore.batching import Hints, Preemption
from xcore.document import to_dict
from xcore.errors import InputError
from xcore.orders import make_order
from xrunner.core.driver import Options
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.rank.warm_up import Extent

SMALL = 7
"""Blocks: enough for the longest request alone."""
PLENTY = 100
HOW = [  # policy, blocks, what may be swapped, prefix caching, threshold of swaps
    ("orca", SMALL, 1000, False),
    ("chunked", SMALL, 1000, False),
    ("orca", PLENTY, 1000, False),
    ("chunked", PLENTY, 1000, True),
    ("orca", SMALL, 4, True),
    ("chunked", SMALL, 0, False),
]


@pytest.fixture(scope="module")
def model(directories):
    return load_model(directories["llama"])


def late_first(request):
    """The score of a ranker that prefers whoever came later: each arrival takes the place of an earlier request."""
    return Hints(score=float(request.id))


def options(host_blocks, **fields):
    how = {"order": make_order("learned"), "hints": late_first, "preemption": Preemption(host_blocks)}
    return Options(**(how | fields))


def fed(model, policy, blocks, host_blocks, todo, prefix_caching=False, aborted=()):
    """Requests that come while others run, at every third step; tokens, results and the engine."""
    few = {"max_num_seqs": 3} | ({"max_num_batched_tokens": 40} if policy == "chunked" else {})
    plan = cells.schedule(model.spec, policy, kv_blocks=blocks, admission="grow", prefix_caching=prefix_caching, **few)
    engine = Engine(model, plan)
    engine.open(Extent.within(plan, 80, 60), options(host_blocks))
    tokens, results = feed(engine, todo, every=3, aborted=aborted)
    giving_way = engine.ledger.giving_way
    assert engine.ledger.pool.available == blocks and not giving_way.on_host
    engine.ledger.check()
    engine.worker.swap_space.execute(giving_way.take_swaps())
    assert not len(engine.worker.swap_space), "the host keeps nothing"
    return tokens, results, giving_way


@pytest.mark.parametrize(("policy", "blocks", "host_blocks", "prefix_caching"), HOW)
def test_requests_that_gave_way_have_the_tokens_of_transformers(
    model, directories, policy, blocks, host_blocks, prefix_caching
):
    want = tokens_of_transformers(directories["llama"])
    _, results, giving_way = fed(model, policy, blocks, host_blocks, requests(), prefix_caching)
    check_tokens({"results": [to_dict(result) for result in results.values()]}, want)
    assert giving_way.preemptions > 4
    assert giving_way.swapped == (giving_way.preemptions if host_blocks == 1000 else 0) or host_blocks == 4


@pytest.mark.parametrize("asked", [{"temperature": 0.8, "repetition_penalty": 1.2}, {"logprobs": 2}])
def test_sampled_requests_and_log_probabilities_too(model, asked):
    todo = requests(**asked)
    alone = {r.id: r for r in Engine(model, cells.schedule(model.spec, "orca", kv_blocks=PLENTY)).run(todo).results}
    tokens, results, giving_way = fed(model, "orca", SMALL, 1000, todo)
    assert {name: result.output_ids for name, result in results.items()} == {
        name: result.output_ids for name, result in alone.items()
    }
    assert {name: tuple(given) for name, given in tokens.items()} == {n: r.output_ids for n, r in results.items()}
    assert giving_way.swapped > 4


def test_aborted_and_stopped_requests_leave_nothing_on_the_host(model):
    todo = requests(ignore_eos=False)
    whole = Engine(model, cells.schedule(model.spec, "orca", kv_blocks=PLENTY)).run(todo).results
    stops = {token for result in whole for token in result.output_ids[6:9]}
    ending = dataclasses.replace(model, eos=frozenset(sorted(stops)[:3]))
    want = Engine(ending, cells.schedule(model.spec, "orca", kv_blocks=PLENTY)).run(todo).results
    assert sum(len(r.output_ids) for r in want) < sum(len(r.output_ids) for r in whole)
    _, results, giving_way = fed(ending, "orca", SMALL, 1000, todo, aborted=("2", "7"))
    assert results["2"].finish_reason == results["7"].finish_reason == "cancelled"
    kept = {r.id: r.output_ids for r in want if r.id not in ("2", "7")}
    assert {name: result.output_ids for name, result in results.items() if name in kept} == kept
    assert giving_way.swapped


def test_a_list_of_requests_is_run_with_the_same_tokens(model, directories):
    want = tokens_of_transformers(directories["llama"])
    plan = cells.schedule(model.spec, "orca", kv_blocks=SMALL, admission="grow")
    how = {"order": make_order("learned"), "hints": late_first, "preemption": Preemption(50)}
    done = Engine(model, plan).run(requests(), **how)
    check_tokens({"results": [to_dict(result) for result in done.results]}, want)
    assert done.preemptions


@pytest.mark.slow
def test_ranks_swap_their_own_shares(job, tmp_path, directories, theirs):
    """Two stages with tokens on their way when a sequence is swapped; shards of heads; replicas."""
    found_cells = matrix(directories, 2, ["llama"], ["orca", "chunked"])
    found_cells = {
        name: (arch, changed(plan, kv_blocks=SMALL, admission="grow")) for name, (arch, plan) in found_cells.items()
    }
    found = run_cells(job, tmp_path, directories, 2, found_cells, program="giving_way")
    for name in found_cells:
        check_tokens(found[name], theirs["llama"])
        assert found[name]["preemptions"], name


def test_a_swap_space_beyond_the_hosts_memory_is_refused(model):
    plan = cells.schedule(model.spec, "orca", kv_blocks=SMALL, admission="grow")
    with pytest.raises(InputError, match=r"A swap space of 1000000000 KV blocks .* needs .* pass --swap-blocks"):
        Engine(model, plan).run(requests(LENGTHS[:2]), preemption=Preemption(10**9))


def test_policies_without_it_are_refused(model):
    with pytest.raises(InputError, match="Under policy static, running requests can't give way"):
        Engine(model, cells.schedule(model.spec, "static")).run(requests(LENGTHS[:2]), preemption=Preemption())
