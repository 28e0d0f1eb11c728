"""Prefix caching in the engine: prompts that begin alike, a small cache that preempts, and transformers' tokens."""

import dataclasses

import pytest
import torch

from tests.xcore.small_specs import profile
from tests.xrunner import cells
from tests.xrunner.cells import generate, requests
from tests.xrunner.core.test_job import check_tokens, run_cells
from tests.xrunner.core.test_preemption import late_tokens, ledgers, plan, tokens_of  # noqa: F401 (a fixture)
from tests.xrunner.open_engine import feed, take
from xcore.requests.engine_protocol import short_keys
from xcore.specs.workload import RequestLengths
from xrunner.core.driver import Options
from xrunner.core.engine import Engine
from xrunner.core.inbox import cached_keys
from xrunner.models import load_model
from xrunner.rank.warm_up import Extent
from xsimulator.replay.event_simulator import replay

SMALL = 8
"""Blocks: the longest request needs six alone."""
CACHING = {"admission": "grow", "prefix_caching": True}
LENGTHS = [(3, 30), (20, 9), (1, 1), (9, 25), (1, 17), (30, 30), (14, 20), (5, 12), (16, 25), (32, 8), (2, 33), (7, 7)]


def alike(**options):
    """Requests of which most begin with the same 35 tokens, some with 16 of them; two are the same."""
    beginning = tuple(torch.randint(0, 300, (35,), generator=torch.Generator().manual_seed(9)).tolist())
    drawn = requests(LENGTHS, **options)
    kept = [35 if i % 4 else 16 * (i % 8 == 0) for i in range(len(drawn))]
    drawn = [
        dataclasses.replace(request, prompt_ids=beginning[:n] + request.prompt_ids)
        for n, request in zip(kept, drawn, strict=True)
    ]
    drawn[7] = dataclasses.replace(drawn[7], prompt_ids=drawn[3].prompt_ids)
    return drawn


def until_stopped():
    """The same with outputs that leave time for stop tokens."""
    room = cells.SIZES["context"]
    return [
        dataclasses.replace(request, max_tokens=min(35, room - len(request.prompt_ids)))
        for request in alike(ignore_eos=False)
    ]


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def model(request, directories):
    return load_model(directories[request.param])


@pytest.fixture(scope="module")
def theirs(directories):
    from transformers import AutoModelForCausalLM

    reference_model = AutoModelForCausalLM.from_pretrained(directories["llama"], dtype=torch.float32)
    reference_model.generation_config.eos_token_id = None
    return {request.id: generate(reference_model, request) for request in alike()}


def run(model, ledgers, todo, policy, kv_blocks, **variables):  # noqa: F811
    """The tokens of a run, and its ledger, in which nothing is held."""
    tokens = tokens_of(Engine(model, plan(model, policy, kv_blocks, **variables)).run(todo).results)
    assert ledgers[-1].pool.available == kv_blocks
    return tokens, ledgers[-1]


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_the_tokens_of_transformers(directories, theirs, policy):
    model = load_model(directories["llama"])
    for kv_blocks in (SMALL, 100):
        report = Engine(model, plan(model, policy, kv_blocks, **CACHING)).run(alike())
        rows = [{"id": r.id, "output_ids": r.output_ids, "finish_reason": r.finish_reason} for r in report.results]
        check_tokens({"results": rows}, theirs)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_the_tokens_of_a_run_without(model, ledgers, policy, options):  # noqa: F811
    todo = alike(**options)
    expected, _ = run(model, ledgers, todo, policy, 100)
    for variables in ({"kv_blocks": 100}, {"kv_blocks": SMALL}, {"kv_blocks": 20, "admission": "reserve"}):
        tokens, ledger = run(model, ledgers, todo, policy, **{**CACHING, **variables})
        assert tokens == expected
        assert ledger.reused >= 5 * 32 and bool(ledger.preemptions) == (ledger.pool.total == SMALL)


def test_prompts_of_one_forward_pass_share_what_it_computes(model, ledgers):  # noqa: F811
    """The later ones read keys and values that the same pass has written."""
    todo = alike()
    expected, _ = run(model, ledgers, todo, "orca", 100)
    together = {"max_num_seqs": 12, "prefills_per_step": 12}
    tokens, ledger = run(model, ledgers, todo, "orca", 100, **CACHING, **together)
    assert tokens == expected
    assert ledger.reused >= 8 * 32


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_the_replay_of_the_prompts_finds_as_many_tokens(model, ledgers, policy):  # noqa: F811
    """Without arrivals decisions don't depend on times."""
    todo = [request for request in alike() if request.id != "7"]  # two that are the same share what they make too
    lengths = [RequestLengths(len(request.prompt_ids), request.max_tokens) for request in todo]
    for kv_blocks in (100, SMALL):
        _, ledger = run(model, ledgers, todo, policy, kv_blocks, **CACHING)
        schedule = plan(model, policy, kv_blocks, **CACHING)
        predicted = replay(schedule, profile(), lengths, prompts=[request.prompt_ids for request in todo])
        assert (predicted.reused, predicted.preemptions) == (ledger.reused, ledger.preemptions)


def test_streamed_and_aborted_requests(model, ledgers):  # noqa: F811
    todo = alike()
    expected, _ = run(model, ledgers, todo, "orca", 100)
    schedule = plan(model, "chunked", SMALL, **CACHING)
    engine = Engine(model, schedule)
    engine.open(Extent.within(schedule, 70, 40))
    tokens, results = feed(engine, todo, every=1, aborted=("1", "5", "8"))
    assert {name: tuple(output) for name, output in tokens.items()} == tokens_of(results.values())
    for name, output in tokens_of(results.values()).items():
        assert output == expected[name][: len(output)] and (name in ("1", "5", "8") or output == expected[name])
    assert ledgers[-1].reused and ledgers[-1].preemptions and ledgers[-1].pool.available == SMALL


@pytest.mark.parametrize("admission", ["grow", "reserve"])
def test_waiting_requests_keep_their_prefixes_and_tokens_stay_the_same(model, ledgers, admission):  # noqa: F811
    """Some are aborted while they wait; the engine says how many tokens each keeps, and which blocks are cached."""
    todo = [dataclasses.replace(request, cache_salt=None if i % 5 else "x") for i, request in enumerate(alike())]
    expected, _ = run(model, ledgers, todo, "orca", 100)
    schedule = plan(model, "chunked", 14, **CACHING | {"admission": admission}, max_num_seqs=2)
    engine = Engine(model, schedule)
    engine.open(Extent.within(schedule, 70, 40), Options(pins=True))
    held, cached, tokens, results = {}, set(), {}, {}
    for number, request in enumerate([*todo, *([None] * 2000)]):
        if request:
            held[request.id] = engine.add(request)
        if request and number % 4 == 3:
            engine.abort(request.id)
        take(engine.step() if not engine.idle else [], tokens, results)
        if changes := cached_keys(engine):
            cached = (cached | {*changes.found.tolist()}) - {*changes.lost.tolist()}
        found = engine.ledger.pool._published
        assert cached == {*short_keys(found).tolist()}
        if request is None and engine.idle:
            break
    assert engine.idle and len(results) == len(todo) and sum(held.values()) >= 32
    assert not ledgers[-1].pins.holders and ledgers[-1].pool.available == 14
    for name, output in tokens_of(results.values()).items():
        assert output == expected[name][: len(output)] and (int(name) % 4 == 3 or output == expected[name])
    take(engine.drain(), tokens, results)


def test_a_change_of_schedule_leaves_no_block_pinned(model, ledgers):  # noqa: F811
    """Requests that wait are left to the next engine, whose cache is empty."""
    todo = alike()[5:8]
    schedule = plan(model, "chunked", 14, **CACHING, max_num_seqs=1)
    engine = Engine(model, schedule)
    engine.open(Extent.within(schedule, 70, 40), Options(pins=True))
    engine.add(todo[0])
    while not engine.ledger.decoding:
        engine.step()
    assert engine.add(todo[1]) == 32 and engine.ledger.pins.holders
    engine.follow(dataclasses.replace(schedule, kv_blocks=20))
    engine.step()
    assert engine.moving and not engine.ledger.pins.holders
    engine.surrender()
    assert ledgers[-1].pool.available == 14


def test_stop_tokens(directories, ledgers):  # noqa: F811
    model, todo = load_model(directories["llama"]), until_stopped()
    ending = dataclasses.replace(model, eos=frozenset(late_tokens(model, todo)))
    expected, _ = run(ending, ledgers, todo, "orca", 100)
    tokens, ledger = run(ending, ledgers, todo, "orca", SMALL, **CACHING)
    assert tokens == expected and ledger.reused and ledger.preemptions


@pytest.mark.slow
def test_on_two_ranks(job, tmp_path, directories, theirs):
    """Two stages, where tokens land late and a micro-batch could overtake another; two shards; two replicas."""
    model = load_model(directories["llama"])
    plans = {
        f"{policy}-{name}-{kv_blocks}": plan(model, policy, kv_blocks, **CACHING, **variables)
        for policy in ("orca", "chunked")
        for kv_blocks in (SMALL, 100)
        for name, variables in {
            "stages": {"degrees": (1, 1)},
            "one": {"degrees": (1, 1), "micro_batches": 1},
            "shards": {"degrees": (2,)},
            "replicas": {"replicas": 2},
        }.items()
    }
    cells_by_name = {name: ("llama", variant) for name, variant in plans.items()}
    for ran in run_cells(job, tmp_path, directories, 2, cells_by_name, todo=alike()).values():
        check_tokens(ran, theirs)


@pytest.mark.slow
def test_stop_tokens_on_their_way(job, tmp_path, directories):
    model, todo = load_model(directories["llama"]), until_stopped()
    eos = late_tokens(model, todo)
    ending = dataclasses.replace(model, eos=frozenset(eos))
    expected = {r.id: list(r.output_ids) for r in Engine(ending, cells.schedule(model.spec, "orca")).run(todo).results}
    plans = {p: ("llama", plan(model, p, SMALL, (1, 1), **CACHING)) for p in ("orca", "chunked")}
    for name, ran in run_cells(job, tmp_path, directories, 2, plans, eos=eos, todo=todo).items():
        assert {result["id"]: result["output_ids"] for result in ran["results"]} == expected, name
