"""What freed blocks hold changes no token: caches of garbage give the tokens of caches of zeros, under every policy."""

import dataclasses
import math

import pytest

from exegpt.kernels import gpu_device
from tests.kernels.gpu import DEVICE, needs_triton
from tests.xmulti.rank.test_shared_unit import planned
from tests.xmulti.rank.test_shared_unit import run as run_unit
from tests.xrunner.cells import POLICIES, disaggregated, requests, schedule
from tests.xrunner.core.test_job import run_cells
from tests.xrunner.core.test_preemption import LONGER, SMALL, ledgers  # noqa: F401 (a fixture)
from tests.xrunner.core.test_prefix_caching import alike
from tests.xrunner.garbage import GARBAGE, fill_caches
from tests.xrunner.stand_in import StandIn
from xcore.requests.request import Request
from xcore.specs.cluster_plan import Share
from xcore.specs.model import ModelSpec
from xmulti.rank.rank_unit import RankUnit
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.models.create import create_model

ENOUGH = 100
"""Blocks for all requests at once."""
GROW = {"kv_blocks": SMALL, "admission": "grow"}
CACHING = {"prefix_caching": True}
NAN = 299
"""A token whose embedding is NaN."""


@pytest.fixture(params=["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def model(request, directories):
    return load_model(directories[request.param])


@pytest.fixture
def broken(directories):
    """A model for which a prompt with one of the tokens has keys and values of NaN."""
    model = load_model(directories["llama"])
    embedding = model.ends.embedding = model.ends.embedding.clone()
    embedding[NAN] = math.nan
    return model


def plan(model, policy, kv_blocks=ENOUGH, **variables):
    return schedule(model.spec, policy, kv_blocks=kv_blocks, **variables)


def tokens_of(results):
    return {result.id: result.output_ids for result in results}


def with_and_without_garbage(monkeypatch, run):
    """What a run gives with caches of zeros, and with caches of garbage."""
    outcomes = []
    for contents in ((0.0,), GARBAGE):
        with monkeypatch.context() as patched:
            fill_caches(contents, patched.setattr)
            outcomes.append(run())
    return outcomes


@pytest.mark.parametrize("variables", [pytest.param({}, marks=pytest.mark.slow), GROW], ids=["reserve", "grow"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(monkeypatch, model, ledgers, policy, variables):  # noqa: F811
    run = lambda: tokens_of(Engine(model, plan(model, policy, **variables)).run(requests(LONGER)).results)  # noqa: E731
    expected, got = with_and_without_garbage(monkeypatch, run)
    assert got == expected and len({token for output in got.values() for token in output}) > 20
    assert not variables or ledgers[-1].preemptions


@pytest.mark.parametrize("variables", [{}, GROW | {"kv_blocks": 8}], ids=["reserve", "grow"])
@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_prefix_caching(monkeypatch, model, ledgers, policy, variables):  # noqa: F811
    run = lambda: tokens_of(Engine(model, plan(model, policy, **{**variables, **CACHING})).run(alike()).results)  # noqa: E731
    expected, got = with_and_without_garbage(monkeypatch, run)
    assert got == expected and ledgers[-1].reused


SLOW = [pytest.param(policy, marks=pytest.mark.slow) for policy in ("static", "rra")]


@pytest.mark.parametrize("policy", ["orca", *SLOW])
@pytest.mark.slow
def test_an_encoder_decoder(monkeypatch, encoder_decoder, policy):
    model = load_model(encoder_decoder[0]["t5"])
    run = lambda: tokens_of(Engine(model, plan(model, policy, **GROW)).run(requests()).results)  # noqa: E731
    expected, got = with_and_without_garbage(monkeypatch, run)
    assert got == expected


def test_half_precision(monkeypatch, directories):
    """The CPU computes it by the plain reference."""
    model = load_model(directories["llama"], "bf16")
    plans = plan(model, "chunked", dtype="bf16", kv_dtype="bf16")
    expected, got = with_and_without_garbage(
        monkeypatch, lambda: tokens_of(Engine(model, plans).run(requests()[:4]).results)
    )
    assert got == expected


def test_graphs_whose_rows_are_filled_up(monkeypatch, directories):
    model = load_model(directories["llama"])
    run = lambda: tokens_of(Engine(model, plan(model, "orca"), gpu=StandIn()).run(requests()).results)  # noqa: E731
    expected, got = with_and_without_garbage(monkeypatch, run)
    assert got == expected


@needs_triton
@pytest.mark.parametrize(
    ("arch", "policy"),
    [
        ("llama", "orca"),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (("llama", "static"), ("llama", "chunked"), ("t5", "orca"))
        ),
    ],
)
@pytest.mark.slow
def test_the_kernels_of_a_gpu(monkeypatch, tmp_path, arch, policy):
    sizes = {"layers": 1, "hidden": 16, "heads": 1, "ffn": 16, "vocab": 300, "context": 64}
    create_model(tmp_path / "m", arch, seed=5, **sizes)
    gpu = None
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gpu_device, "on_gpu", lambda x: True)
        gpu = StandIn()
    model = load_model(tmp_path / "m", device=DEVICE)
    variables = GROW | {"kv_blocks": 2} | (CACHING if (arch, policy) == ("llama", "orca") else {})
    todo = [Request("alike", tuple(range(20)), 2, True), Request("too", (*range(19), 7), 2, True)]
    todo += requests([(9, 2), (14, 4)])
    run = lambda: tokens_of(Engine(model, plan(model, policy, **variables), gpu=gpu).run(todo).results)  # noqa: E731
    expected, got = with_and_without_garbage(monkeypatch, run)
    assert got == expected


def test_models_over_one_memory(monkeypatch, directories):
    def run():
        unit = RankUnit.load(planned(directories, Share("time", pool="merged")), directories)
        unit.open()
        results, _ = run_unit(unit, {name: requests() for name in directories})
        unit.drain()
        unit.close()
        return {name: tokens_of(done.values()) for name, done in results.items()}

    expected, got = with_and_without_garbage(monkeypatch, run)
    assert got == expected


@pytest.mark.slow
def test_several_ranks(job, tmp_path, directories, encoder_decoder):
    """Two sides with a transfer of keys and values, or of an encoder's output, pipelines and shards."""
    directories = {**directories, **encoder_decoder[0]}
    spec = ModelSpec.from_directory(directories["llama"])
    cells = {f"waa-{kind}": ("llama", disaggregated(spec, (1,), (1,), admission="grow")) for kind in "cm"}
    cells["waa-c"] = "llama", dataclasses.replace(cells["waa-c"][1], policy="waa-c")
    cells["waa-t5"] = "t5", disaggregated(ModelSpec.from_directory(directories["t5"]), (1,), (1,), admission="grow")
    for degrees in ((1, 1), (2,)):
        cells[f"chunked-{len(degrees)}"] = "llama", schedule(spec, "chunked", degrees)
    outcomes = []
    for program in ("cells", "garbage"):
        facts = run_cells(job, tmp_path, directories, 2, cells, todo=requests()[:7], program=program)
        outcomes.append({n: {r["id"]: r["output_ids"] for r in facts[n]["results"]} for n in cells})
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_after_one_whose_keys_and_values_are_nan(broken, policy):
    todo = [Request(str(i), (5, NAN) if i == 1 else (5, 6), 8, True) for i in range(5)]
    results = {r.id: r for r in Engine(broken, plan(broken, policy, 4)).run(todo).results}
    assert results["1"].finish_reason == "error" and not results["1"].output_ids
    assert all(results[i].output_ids == results["0"].output_ids for i in "234")


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_blocks_of_a_failed_request_are_not_found_again(broken, ledgers, policy):  # noqa: F811
    beginning = tuple(range(40))
    bad = Request("bad", (*beginning, NAN, *beginning), 4, True)
    todo = [bad, *(Request(str(i), (*beginning, i), 4, True) for i in range(2))]
    todo[2:2] = [dataclasses.replace(bad, id="worse")]
    alone = tokens_of(Engine(broken, plan(broken, policy)).run(todo).results)
    results = Engine(broken, plan(broken, policy, 12, max_num_seqs=1, **CACHING)).run(todo).results
    assert tokens_of(results) == alone and len({len(output) for output in alone.values()}) == 2
    assert [r.finish_reason for r in sorted(results, key=lambda r: r.id)] == ["length", "length", "error", "error"]
    assert ledgers[-1].reused == 32  # by the second that fails, of a request that does not
