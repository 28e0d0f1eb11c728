"""Requests whose logits are NaN or overflow fail alone, under every policy, however their tokens are chosen."""

import dataclasses
import math

import pytest

from tests.xrunner.broken_model import NAN, spoil
from tests.xrunner.cells import POLICIES, SIZES, disaggregated, schedule
from tests.xrunner.core.test_job import run_cells
from tests.xrunner.core.test_preemption import ledgers  # noqa: F401 (a fixture)
from tests.xrunner.stand_in import StandIn
from xcore import document
from xcore.errors import InputError
from xcore.requests.request import Request
from xcore.specs.model import ModelSpec
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.models.create import create_model

CHOICES = {
    "greedy": {},
    "at random": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "biases": {"logit_bias": ((7, 3.0),), "min_tokens": 3, "ignore_eos": False},
    "log-probabilities": {"logprobs": 3},
    "the prompt's": {"logprobs": 2, "prompt_logprobs": True},
}
INTO_NAN = {"logit_bias": ((NAN, 100.0),)}
"""Lets a request make the token, after which its logits are NaN."""


@pytest.fixture(scope="module")
def broken(directories, tmp_path_factory):
    """Directories of models with a token whose embedding is NaN."""
    root = tmp_path_factory.mktemp("broken")
    create_model(root / "t5-whole", "t5", seed=11, **SIZES)
    places = {"llama": (directories["llama"], "embed_tokens"), "t5": (root / "t5-whole", "shared")}
    return {arch: spoil(path, root / arch, tensor, NAN) for arch, (path, tensor) in places.items()}


def todo(**options):
    """Requests of which two fail at once and one after its first token."""
    prompts = [(5, 6), (5, NAN), (9, 8, 7), (NAN, *range(40)), (5, 6), (1, 2)]
    options = {"ignore_eos": True, "seed": 4} | options
    drawn = [
        Request(str(i), prompt, 6, **({"ignore_eos": True, "seed": 4} | options)) for i, prompt in enumerate(prompts)
    ]
    return [
        *drawn,
        Request("later", (5, 6), 6, True, **INTO_NAN),
        *(dataclasses.replace(r, id=r.id + "b") for r in drawn),
    ]


def check(results, expected):
    """Those that fail, with the cause; the others have the tokens that they have alone."""
    failed = {id_: r for id_, r in results.items() if r.finish_reason == "error"}
    assert sorted(failed) == ["1", "1b", "3", "3b", "later"]
    assert all("NaN" in r.error for r in failed.values()) and failed["later"].output_ids == (NAN,)
    assert not failed["1"].output_ids and not failed["3"].output_ids
    assert {id_: r.output_ids for id_, r in results.items() if id_ not in failed} == expected


def alone(model, requests):
    """The tokens of the requests that don't fail, without the others."""
    plan = schedule(model.spec, "orca", kv_blocks=100)
    whole = [r for r in requests if NAN not in r.prompt_ids and r.id != "later"]
    return {r.id: r.output_ids for r in Engine(model, plan).run(whole).results}


@pytest.mark.parametrize("gpu", [None, StandIn], ids=["cpu", "ahead"])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_however_tokens_are_chosen(broken, ledgers, policy, choice, gpu):  # noqa: F811
    model, requests = load_model(broken["llama"]), todo(**choice)
    expected = alone(model, requests)
    engine = Engine(model, schedule(model.spec, policy, kv_blocks=30), gpu=gpu and gpu())
    results = {r.id: r for r in engine.run(requests).results}
    check(results, expected)
    assert ledgers[-1].pool.available == 30
    values = [v for r in results.values() for v in (*(r.logprobs or ()), *(r.prompt_logprobs or ())) if v is not None]
    assert all(map(math.isfinite, values)) and bool(values) == ("logprobs" in choice)
    assert all(len(r.logprobs) == len(r.output_ids) for r in results.values() if r.logprobs is not None)


def test_a_grammar_hides_no_nan(broken):
    pytest.importorskip("llguidance")
    model = load_model(broken["llama"])
    numbers = '{"type": "array", "items": {"type": "integer"}}'
    requests = [Request(i, ids, 8, grammar=numbers) for i, ids in (("a", (5, 6)), ("b", (5, NAN)), ("c", (5, 6)))]
    engine = Engine(model, schedule(model.spec, "orca"), tokenizer=broken["llama"] / "tokenizer.json")
    results = {r.id: r for r in engine.run(requests).results}
    assert results["b"].finish_reason == "error" and "NaN" in results["b"].error and not results["b"].output_ids
    assert results["a"].output_ids == results["c"].output_ids and results["a"].finish_reason != "error"


@pytest.mark.parametrize("arch", ["llama", "t5"])
@pytest.mark.parametrize("variables", [{}, {"kv_blocks": 8, "admission": "grow"}], ids=["reserve", "grow"])
@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy(broken, ledgers, policy, variables, arch):  # noqa: F811
    if arch == "t5" and policy == "chunked":
        pytest.skip("an encoder reads prompts whole")
    model = load_model(broken[arch])
    expected, plan = alone(model, todo()), schedule(model.spec, policy, **variables)
    check({r.id: r for r in Engine(model, plan).run(todo()).results}, expected)
    assert ledgers[-1].pool.available == plan.kv_blocks


@pytest.mark.slow
def test_on_several_ranks(job, tmp_path, broken):
    """Pipelines, whose later iterations are booked before the failure is known, shards, replicas and two sides."""
    cells = {}
    for arch in broken:
        spec = ModelSpec.from_directory(broken[arch])
        for degrees, replicas in (((1, 1), 1), ((2,), 1), ((1,), 2)):
            for policy in ("static", "orca", "rra"):
                cells[f"{arch}-{policy}-{len(degrees)}-{replicas}"] = (
                    arch,
                    schedule(spec, policy, degrees, replicas=replicas),
                )
        cells[f"{arch}-waa"] = arch, disaggregated(spec, (1,), (1,), admission="grow")
    facts = run_cells(job, tmp_path, broken, 2, cells, todo=todo())
    for name, (arch, _) in cells.items():
        results = {r["id"]: Failed(r) for r in facts[name]["results"]}
        check(results, alone(load_model(broken[arch]), todo()))


class Failed:
    """A result out of JSON."""

    def __init__(self, row):
        self.finish_reason, self.error, self.output_ids = row["finish_reason"], row["error"], tuple(row["output_ids"])


@pytest.mark.parametrize(
    ("tensor", "factor", "dtype"), [("lm_head", math.nan, "fp32"), ("layers.0.self_attn.v_proj", 1e7, "fp16")]
)
def test_a_model_whose_warm_up_gives_no_token_is_refused(directories, tmp_path, tensor, factor, dtype):
    model = load_model(spoil(directories["llama"], tmp_path / "spoilt", tensor, factor=factor), dtype)
    engine = Engine(model, schedule(model.spec, "orca", dtype=dtype, kv_dtype=dtype))
    with pytest.raises(InputError, match=f"Model 'spoilt' has NaN or infinite logits.*{dtype}"):
        engine.run(todo())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "degrees"), [("lm_head", (2,)), ("layers.4.mlp.down_proj", (1, 1)), ("layers.0.mlp.down_proj", (1, 1))]
)
def test_every_rank_refuses_what_one_refuses(job, directories, tmp_path, tensor, degrees):
    model = spoil(directories["llama"], tmp_path / "spoilt", tensor)
    document.write(tmp_path / "plan.json", schedule(ModelSpec.from_directory(model), "orca", degrees))
    (tmp_path / "requests.jsonl").write_text('{"id": "a", "prompt_ids": [5], "max_tokens": 2}\n')
    files = "--schedule", tmp_path / "plan.json", "--requests", tmp_path / "requests.jsonl"
    done = job(2, "-m", "exegpt", "run", "--model", model, *files, "--threads", "1")
    assert done.returncode == 2 and "has NaN or infinite logits" in done.stderr and "Traceback" not in done.stderr
