"""What requests ask of their tokens' choice, through the engine: against transformers' logits and numpy, in whatever
batch, on whatever ranks and however often preempted.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from exegpt.errors import InputError
from exegpt.kernels.philox import arrival_times
from exegpt.models import load_model
from tests.xrunner import cells
from tests.xrunner.cells import LENGTHS, disaggregated, requests
from tests.xrunner.core.test_job import run_cells
from tests.xrunner.stand_in import StandIn
from xrunner.core.engine import Engine

EOS = 7
STOPS = {"min_tokens": 9, "stop_token_ids": tuple(range(0, 300, 4))}
WAYS = [
    {"frequency_penalty": 1.5, "presence_penalty": -0.5, "temperature": 0.7},
    {},
    {"frequency_penalty": 0.4, "repetition_penalty": 1.3},
    {"temperature": 1.2, "min_p": 0.02, "top_p": 0.9},
    STOPS | {"temperature": 1.0},
    {"logit_bias": ((3, 4.0), (299, 3.5), (17, -100.0)), "presence_penalty": 2.0, "seed": 5},
    {"temperature": 0.8},
    STOPS | {"logit_bias": ((8, 1.0),), "ignore_eos": False},
]
TODO = [
    replace(request, **WAYS[i % len(WAYS)])
    for i, request in enumerate(requests([*LENGTHS, *((20 + i, 40) for i in range(4))]))
]


def edited(request, output, logits):
    """A request's logits after the mask, the bias and the penalties, in vLLM's order: float64 [vocab]"""
    x = logits.astype(np.float64)
    if len(output) < request.min_tokens:
        x[[EOS, *request.stop_token_ids]] = -np.inf
    for token, bias in request.logit_bias:
        x[token] += bias
    for token in {*request.prompt_ids, *output}:
        x[token] = x[token] * request.repetition_penalty if x[token] < 0 else x[token] / request.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= request.frequency_penalty * count + request.presence_penalty
    return x


def chosen(request, output, logits):
    """The next token by its definition: sorted probabilities, cut off, and the race of what is left."""
    x = edited(request, output, logits)
    if request.temperature == 0:
        return int(x.argmax())
    x /= request.temperature
    order = np.argsort(-x, kind="stable")
    p = np.exp(x[order] - x.max())
    kept = p >= request.min_p
    kept[request.top_k or len(p) :] = False
    p = p * kept / (p * kept).sum()
    kept &= np.cumsum(p) - p < request.top_p
    position = len(request.prompt_ids) + len(output)
    times = arrival_times(torch.tensor([request.own_seed]), torch.tensor([position]), len(x))[0].numpy()
    return int(max(order[kept], key=lambda token: x[token] - np.log(times[token])))


@pytest.fixture(scope="module")
@torch.no_grad()
def want(directories):
    """Every request's tokens and why they end, from transformers' logits."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(directories["llama"], dtype=torch.float32)
    made = {}
    for request in TODO:
        output, reason = [], "length"
        while len(output) < request.max_tokens and reason == "length":
            logits = theirs(torch.tensor([[*request.prompt_ids, *output]])).logits[0, -1]
            output.append(chosen(request, output, logits.numpy()))
            if output[-1] in request.stop_token_ids or (output[-1] == EOS and not request.ignore_eos):
                reason = "stop"
        made[request.id] = output, reason
    plain = [replace(request, **dict.fromkeys(("min_tokens",), 0)) for request in TODO if request.min_tokens]
    assert all(len(made[request.id][0]) >= min(request.max_tokens, 9) for request in plain)
    assert Counter(reason for _, reason in made.values())["stop"] > 2
    return made


@pytest.fixture(scope="module")
def model(directories):
    return replace(load_model(directories["llama"]), eos=frozenset({EOS}))


def found(results):
    return {result.id: (list(result.output_ids), result.finish_reason) for result in results}


@pytest.mark.parametrize("policy", ["static", "orca", "chunked", "rra"])
def test_tokens_are_those_of_the_definition(model, want, policy):
    assert found(Engine(model, cells.schedule(model.spec, policy, kv_blocks=100)).run(TODO).results) == want


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_a_preemption_changes_none(model, want, policy):
    report = Engine(model, cells.schedule(model.spec, policy, kv_blocks=7, admission="grow")).run(TODO)
    assert found(report.results) == want and report.preemptions > 1


def test_on_a_gpu_with_the_next_step_queued(model, want):
    plan = cells.schedule(model.spec, "orca", kv_blocks=7, admission="grow")
    assert found(Engine(model, plan, gpu=StandIn()).run(TODO).results) == want


def test_over_two_ranks(job, tmp_path, directories, want):
    """A pipeline, tensor parallel, and disaggregated, where each side has a sampling state of its own."""
    spec = load_model(directories["llama"]).spec
    plans = {
        "pipeline": cells.schedule(spec, "orca", (1, 1), kv_blocks=7, admission="grow"),
        "tensor": cells.schedule(spec, "rra", (2,), kv_blocks=100),
        "apart": disaggregated(spec, (1,), (1,), kv_blocks=100),
    }
    given = {name: ("llama", plan) for name, plan in plans.items()}
    for came in run_cells(job, tmp_path, directories, 2, given, eos=[EOS], todo=TODO).values():
        assert {one["id"]: (one["output_ids"], one["finish_reason"]) for one in came["results"]} == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": ((300, 1.0),)}, "token id 300 in logit_bias: the vocabulary is 0 to 299"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "two values of logit_bias"),
        ({"logit_bias": ((5, 101.0),)}, "a logit_bias of 101.0"),
        ({"logit_bias": ((5, float("nan")),)}, "a logit_bias of nan"),
        ({"stop_token_ids": (-1,)}, "token id -1 in stop_token_ids"),
        ({"frequency_penalty": 2.5}, "frequency_penalty = 2.5: it must be a number from -2 to 2"),
        ({"min_p": float("nan")}, "min_p = nan"),
        ({"min_tokens": 4}, "min_tokens = 4: it must be at most max_tokens"),
    ],
)
def test_what_cannot_be_chosen_is_refused(model, options, message):
    (request,) = requests([(3, 3)], **options)
    with pytest.raises(InputError, match=message):
        Engine(model, cells.schedule(model.spec)).run([request])
