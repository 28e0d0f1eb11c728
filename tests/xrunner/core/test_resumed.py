"""Requests that another engine has begun go on as if nothing had happened."""

from dataclasses import replace

import pytest

from tests.xrunner.cells import requests
from tests.xrunner.core.test_preemption import plan
from xcore.errors import InputError
from xcore.requests.requests import check_request
from xrunner.core.engine import Engine
from xrunner.models import load_model


@pytest.fixture(scope="module")
def model(directories):
    return load_model(directories["llama"])


def run(model, schedule, todo):
    return {result.id: result.output_ids for result in Engine(model, schedule).run(todo).results}


@pytest.mark.parametrize("admission", [pytest.param("reserve", marks=pytest.mark.slow), "grow"])
@pytest.mark.parametrize("policy", ["static", "orca", "chunked", "rra"])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5}],
    ids=["greedy", "sampled"],
)
def test_a_resumed_request_ends_as_it_would_have(model, policy, admission, options):
    todo = requests(**options)
    schedule = plan(model, policy, 100, admission=admission)
    whole = run(model, schedule, todo)
    begun = [replace(r, output_ids=whole[r.id][: (7 * n) % len(whole[r.id])]) for n, r in enumerate(todo)]
    assert any(len(r.output_ids) > 3 for r in begun)
    assert run(model, schedule, begun) == whole


def test_an_encoder_decoder_resumes(encoder_decoder):
    directories, _ = encoder_decoder
    t5 = load_model(directories["t5"])
    todo, schedule = requests(), plan(t5, "orca", 100, admission="grow")
    whole = run(t5, schedule, todo)
    begun = [replace(r, output_ids=whole[r.id][: (5 * n) % len(whole[r.id])]) for n, r in enumerate(todo)]
    assert run(t5, schedule, begun) == whole


def test_a_whole_output_is_refused(model):
    request = requests()[0]
    with pytest.raises(InputError, match="output tokens, but max_tokens"):
        check_request(replace(request, output_ids=(1,) * request.max_tokens), model.spec)
