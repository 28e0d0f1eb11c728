"""Admission by *grow* in the engine: a small cache preempts, and tokens are those of an undisturbed run."""

import dataclasses
import json

import pytest

from tests.xcore.small_specs import changed
from tests.xrunner import cells
from tests.xrunner.cells import LENGTHS, POLICIES, requests
from tests.xrunner.core.conftest import tokens_of_transformers
from tests.xrunner.core.test_job import check_decisions, check_tokens, matrix, run_cells, sides
from tests.xrunner.models.conftest import ARCHITECTURES, vary_vectors
from tests.xrunner.open_engine import feed
from xcore.document import to_dict
from xcore.policies.from_schedule import make_ledger
from xcore.specs.workload import Workload
from xrunner.core import driver
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.models.create import create_model
from xrunner.rank.warm_up import Extent

SMALL = 7
"""Blocks: a quarter of what the requests reserve, and enough for the longest alone."""
LONGER = [*LENGTHS, *((20 + i, 40) for i in range(4))]


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
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


@pytest.fixture(scope="module", params=["mistral", "qwen2", "opt"])
def other(request, tmp_path_factory):
    """A model of another architecture, some with windows shorter than the requests, and transformers' tokens."""
    path = tmp_path_factory.mktemp("other") / request.param
    create_model(path, request.param, kv_heads=4 if request.param == "opt" else 2, seed=11, **cells.SIZES)
    vary_vectors(path)
    config = json.loads((path / "config.json").read_text()) | ARCHITECTURES[request.param]
    (path / "config.json").write_text(json.dumps(config))
    want = tokens_of_transformers(path)
    assert len({token for output, _ in want.values() for token in output}) > 20
    return load_model(path), want


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


SAMPLED = {"temperature": 0.8, "repetition_penalty": 1.2}
HOW = [({}, policy) for policy in POLICIES]
HOW += [
    pytest.param(SAMPLED, policy, marks=() if policy in ("chunked", "rra") else pytest.mark.slow) for policy in POLICIES
]


@pytest.mark.parametrize(("options", "policy"), HOW)
def test_preempted_requests_have_the_tokens_of_an_undisturbed_run(model, ledgers, policy, options):
    todo = requests(LONGER, **options)
    want = tokens_of(Engine(model, plan(model, policy, 100)).run(todo).results)
    assert tokens_of(Engine(model, plan(model, policy, SMALL, admission="grow")).run(todo).results) == want
    assert ledgers[-1].preemptions > (3 if policy in ("orca", "chunked") else 1) and ledgers[-1].pool.available == SMALL


@pytest.mark.parametrize("policy", ["static", "hybrid", "orca", "rra"])
def test_an_encoder_decoders_preempted_outputs_are_computed_again(encoder_decoder, ledgers, policy):
    directories, want = encoder_decoder
    model = load_model(directories["t5"])
    schedule = plan(model, policy, SMALL, admission="grow")
    done = Engine(model, schedule).run(requests())
    check_tokens({"results": [to_dict(result) for result in done.results]}, want)
    assert ledgers[-1].preemptions > 1 and ledgers[-1].pool.available == SMALL


@pytest.mark.parametrize(
    "policy", ["orca", "rra", *(pytest.param(p, marks=pytest.mark.slow) for p in ("static", "chunked"))]
)
def test_preempted_requests_of_other_architectures(other, ledgers, policy):
    """Positions, biases and windows of a sequence that is computed again are those of its tokens' places."""
    model, want = other
    schedule = plan(model, policy, SMALL, admission="grow", workload=Workload.fixed(16, 1))
    done = Engine(model, schedule).run(requests())
    check_tokens({"results": [to_dict(result) for result in done.results]}, want)
    assert ledgers[-1].preemptions and ledgers[-1].pool.available == SMALL


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


def small(cells):
    """The same cells with few blocks, and a workload that lets RRA and WAA expect the shortest outputs. WAA encodes
    several prompts at once: whichever side is the faster, sequences that outgrow the cache then decode together.
    """
    few = {"kv_blocks": SMALL, "admission": "grow", "workload": Workload.fixed(16, 1)}
    some = {"encode_batch": 4}
    return {
        name: (arch, changed(plan, **few, **(some if plan.policy.startswith("waa") else {})))
        for name, (arch, plan) in cells.items()
    }


def longest_first():
    """The requests of `LENGTHS`, those with the longest outputs first."""
    return sorted(requests(), key=lambda request: -request.max_tokens)


def check_preempted(found, cells, want):
    for name in cells:
        try:
            check_tokens(found[name], want)
        except AssertionError as error:
            raise AssertionError(name) from error
        assert found[name]["preemptions"], name


@pytest.mark.slow
def test_every_policy_on_two_ranks(job, tmp_path, directories, theirs):
    """Two stages with tokens on their way when a sequence is preempted; prompts and caches on ranks of their own."""
    cells = matrix(directories, 2, ["llama"], layouts=[((1, 1), 1)]) | sides(directories, 2, ["llama"])
    cells = small(cells | matrix(directories, 2, ["gpt2"], ["orca"], [((2,), 1), ((1,), 2)]))
    found = run_cells(job, tmp_path, directories, 2, cells, todo=longest_first())
    for arch in ("llama", "gpt2"):
        check_preempted(found, {n: c for n, c in cells.items() if c[0] == arch}, theirs[arch])


@pytest.mark.slow
def test_every_policy_on_two_ranks_of_an_encoder_decoder(job, tmp_path, encoder_decoder):
    directories, want = encoder_decoder
    cells = matrix(directories, 2, ["t5"], ["static", "hybrid", "orca", "rra"], [((1, 1), 1)])
    cells = small(cells | sides(directories, 2, ["t5"]))
    check_preempted(run_cells(job, tmp_path, directories, 2, cells, todo=longest_first()), cells, want)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_layouts(job, tmp_path, directories, theirs, ranks):
    for arch in ("llama", "gpt2"):
        cells = small(matrix(directories, ranks, [arch]) | sides(directories, ranks, [arch]))
        found = run_cells(job, tmp_path, directories, ranks, cells, timeout=900)
        for name in cells:
            check_tokens(found[name], theirs[arch])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_layouts_of_an_encoder_decoder(job, tmp_path, encoder_decoder, ranks):
    directories, want = encoder_decoder
    cells = matrix(directories, ranks, ["t5"], ["static", "hybrid", "orca", "rra"]) | sides(directories, ranks, ["t5"])
    found = run_cells(job, tmp_path, directories, ranks, small(cells), timeout=900)
    for name in cells:
        check_tokens(found[name], want)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_device_decides_as_the_replay(model, policy):
    schedule = plan(model, policy, SMALL, admission="grow")
    done = Engine(model, schedule).run(requests())
    check_decisions({"spans": [to_dict(span) for span in done.timeline.spans]}, schedule)


@pytest.mark.slow
def test_stop_tokens_on_their_way_end_a_preempted_request(job, tmp_path, directories):
    model, todo = load_model(directories["llama"]), requests(LONGER, ignore_eos=False)
    eos = late_tokens(model, todo)
    ending = dataclasses.replace(model, eos=frozenset(eos))
    want = {r.id: list(r.output_ids) for r in Engine(ending, plan(model, "orca", 100)).run(todo).results}
    plans = {p: ("llama", plan(model, p, SMALL, (1, 1), admission="grow")) for p in ("orca", "chunked", "rra")}
    plans["waa"] = ("llama", cells.disaggregated(model.spec, (1,), (1,), kv_blocks=SMALL, admission="grow"))
    for name, ran in run_cells(job, tmp_path, directories, 2, plans, eos=eos, todo=todo).items():
        assert {result["id"]: result["output_ids"] for result in ran["results"]} == want, name


@pytest.mark.slow
def test_aborts_while_keys_and_values_are_on_their_way(job, tmp_path, directories, theirs):
    """Blocks of an aborted request are nobody's before they have arrived: the others' tokens stay what they are."""
    todo = requests() + [dataclasses.replace(request, id=f"again-{request.id}") for request in requests()]
    cells = small(sides(directories, 2, ["llama"]))
    found = run_cells(job, tmp_path, directories, 2, cells, todo=todo, cancelled=[*range(3, 12, 2), "again-4"])
    for name in cells:
        results = {result["id"]: result for result in found[name]["results"]}
        assert len(results) == len(todo)
        cancelled = [result for result in results.values() if result["finish_reason"] == "cancelled"]
        assert cancelled
        for result in results.values():
            tokens, _ = theirs["llama"][result["id"].removeprefix("again-")]
            assert result["output_ids"] == tokens[: len(result["output_ids"])]
