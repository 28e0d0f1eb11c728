"""Admission by *grow* in the engine: a small cache preempts, and tokens are those of an undisturbed run."""

import dataclasses

import pytest

from exegpt.models import load_model
from exegpt.policies import make_ledger
from tests.xrunner import cells
from tests.xrunner.cells import LENGTHS, requests
from tests.xrunner.core.test_job import run_cells
from tests.xrunner.open_engine import feed
from xrunner.core import driver
from xrunner.core.engine import Engine
from xrunner.rank.warm_up import Extent

SMALL = 7
"""Blocks: a quarter of what the requests reserve, and enough for the longest alone."""
LONGER = [*LENGTHS, *((20 + i, 40) for i in range(4))]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request, directories):
    return load_model(directories[request.param])


@pytest.fixture
def ledgers(monkeypatch):
    made = []

    def remember(*given):
        made.append(make_ledger(*given))
        return made[-1]

    monkeypatch.setattr(driver, "make_ledger", remember)
    return made


def plan(model, policy, kv_blocks, degrees=(1,), **variables):
    return cells.schedule(model.spec, policy, degrees, kv_blocks=kv_blocks, **variables)


def late_tokens(model, todo):
    """Tokens that first come late in long outputs: stop tokens that leave time for preemptions."""
    outputs = [r.output_ids for r in Engine(model, plan(model, "orca", 100)).run(todo).results]
    early = {token for output in outputs for token in output[:25]}
    late = [token for output in outputs for token in output[25:35] if token not in early]
    assert late
    return sorted(set(late[:2]))


def tokens_of(results):
    return {result.id: result.output_ids for result in results}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_preempted_requests_have_the_tokens_of_an_undisturbed_run(model, ledgers, policy, options):
    todo = requests(LONGER, **options)
    want = tokens_of(Engine(model, plan(model, policy, 100)).run(todo).results)
    assert tokens_of(Engine(model, plan(model, policy, SMALL, admission="grow")).run(todo).results) == want
    assert ledgers[-1].preemptions > 3 and ledgers[-1].pool.available == SMALL


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_streamed_tokens_survive_a_preemption(model, ledgers, policy):
    todo = requests(LONGER)
    want = tokens_of(Engine(model, plan(model, policy, 100)).run(todo).results)
    schedule = plan(model, policy, SMALL, admission="grow")
    engine = Engine(model, schedule)
    engine.open(Extent.within(schedule, 60, 60))
    tokens, results = feed(engine, todo, every=1)
    assert {name: tuple(given) for name, given in tokens.items()} == want == tokens_of(results.values())
    assert ledgers[-1].preemptions


def test_stop_tokens_end_preempted_requests_too(directories, ledgers):
    model = load_model(directories["llama"])
    todo = requests(LONGER, ignore_eos=False)
    ending = dataclasses.replace(model, eos=frozenset(late_tokens(model, todo)))
    whole, want = (tokens_of(Engine(one, plan(model, "orca", 100)).run(todo).results) for one in (model, ending))
    assert sum(map(len, want.values())) < sum(map(len, whole.values()))
    assert tokens_of(Engine(ending, plan(model, "orca", SMALL, admission="grow")).run(todo).results) == want
    assert ledgers[-1].preemptions


def test_on_two_ranks(job, tmp_path, directories):
    """Two stages with tokens on their way when a sequence is preempted; two shards; two replicas; stop tokens."""
    model, todo = load_model(directories["llama"]), requests(LONGER)
    want = {result.id: list(result.output_ids) for result in Engine(model, plan(model, "orca", 100)).run(todo).results}
    growing = {"kv_blocks": SMALL, "admission": "grow"}
    plans = {
        "stages": plan(model, "chunked", degrees=(1, 1), **growing),
        "orca": plan(model, "orca", degrees=(1, 1), **growing),
        "shards": plan(model, "orca", degrees=(2,), **growing),
        "replicas": plan(model, "chunked", replicas=2, **growing),
    }
    given = {name: ("llama", one) for name, one in plans.items()}
    for name, ran in run_cells(job, tmp_path, directories, 2, given, todo=todo).items():
        assert {result["id"]: result["output_ids"] for result in ran["results"]} == want, name


def test_stop_tokens_on_their_way_end_a_preempted_request(job, tmp_path, directories):
    model, todo = load_model(directories["llama"]), requests(LONGER, ignore_eos=False)
    eos = late_tokens(model, todo)
    ending = dataclasses.replace(model, eos=frozenset(eos))
    want = {r.id: list(r.output_ids) for r in Engine(ending, plan(model, "orca", 100)).run(todo).results}
    plans = {p: ("llama", plan(model, p, SMALL, (1, 1), admission="grow")) for p in ("orca", "chunked")}
    for name, ran in run_cells(job, tmp_path, directories, 2, plans, eos=eos, todo=todo).items():
        assert {result["id"]: result["output_ids"] for result in ran["results"]} == want, name
