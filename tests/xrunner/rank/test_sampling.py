"""Drawn tokens: transformers' logits and the plain reference choose the same, in whatever batch a request is."""

from dataclasses import replace

import pytest
import torch

from exegpt.kernels.sampling import Sampling, sample_reference
from tests.xrunner import cells
from tests.xrunner.cells import requests
from xrunner.core.engine import Engine
from xrunner.models import load_model

LENGTHS = [(3, 9), (17, 6), (30, 12), (8, 1), (21, 10)]
WAYS = [
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 12, "seed": 7},
    {},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.4, "seed": -3},
]


@pytest.fixture(scope="module")
def todo():
    return [replace(request, **way) for request, way in zip(requests(LENGTHS), WAYS, strict=True)]


@torch.no_grad()
def drawn(model, request):
    """transformers' logits, one token after the other, and the reference's choice."""
    tokens = list(request.prompt_ids)
    for _ in range(request.max_tokens):
        logits = model(torch.tensor([tokens])).logits[:, -1]
        seen = torch.zeros(1, logits.shape[1], dtype=torch.uint8)
        seen[0, tokens] = 1
        how = Sampling(
            torch.tensor([request.temperature]),
            torch.tensor([request.top_k], dtype=torch.int32),
            torch.tensor([request.top_p]),
            torch.tensor([request.repetition_penalty]),
            torch.tensor([request.own_seed]),
            torch.tensor([len(tokens)]),
            torch.zeros(1, dtype=torch.int64),
            seen,
        )
        tokens.append(int(sample_reference(logits, how)))
    return tuple(tokens[len(request.prompt_ids) :])


def test_every_policy_draws_what_the_reference_draws(directories, todo):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(directories["llama"], dtype=torch.float32)
    expected = {request.id: drawn(theirs, request) for request in todo}
    model = load_model(directories["llama"])
    for policy in ("static", "orca", "chunked", "rra"):
        results = Engine(model, cells.schedule(model.spec, policy)).run(todo).results
        assert {result.id: result.output_ids for result in results} == expected


@pytest.mark.slow
def test_seeds_and_temperatures_change_outputs(directories):
    model = load_model(directories["llama"])
    (request,) = requests([(12, 20)])
    ways = [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2}]
    sampled = [replace(request, id=str(i), **way) for i, way in enumerate(ways)]
    again = replace(request, id="again", temperature=1.0, seed=1)
    outputs = {r.id: r.output_ids for r in Engine(model, cells.schedule(model.spec)).run([*sampled, again]).results}
    assert len(set(outputs.values())) == 4
    assert outputs["again"] == outputs["2"]
