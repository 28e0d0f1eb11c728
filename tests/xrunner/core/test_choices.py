"""What requests ask of their tokens' choice, through the engine: against transformers' logits and numpy, in whatever
batch, on whatever ranks and however often preempted.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from exegpt.kernels.philox import arrival_times
from tests.xrunner import cells
from tests.xrunner.cells import LENGTHS, disaggregated, requests
from tests.xrunner.core.test_job import run_cells
from tests.xrunner.stand_in import StandIn
from xcore.document import from_dict
from xcore.errors import InputError
from xcore.requests.engine_protocol import TokenEvent
from xcore.requests.request import Result
from xcore.requests.requests import check_request
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.rank.warm_up import Extent

EOS = 7
STOPS = {"min_tokens": 9, "stop_token_ids": tuple(range(0, 300, 4))}
LETTERS = range(64, 70)
"""The tokens of the letters a to f."""
GRAMMAR = "start: /[a-f]{4,12}/"
WAYS = [
    {"frequency_penalty": 1.5, "presence_penalty": -0.5, "temperature": 0.7},
    {"logprobs": 3, "prompt_logprobs": True},
    {"frequency_penalty": 0.4, "repetition_penalty": 1.3, "prompt_logprobs": True},
    {"temperature": 1.2, "min_p": 0.02, "top_p": 0.9},
    STOPS | {"temperature": 1.0, "logprobs": 20},
    {"logit_bias": ((3, 4.0), (299, 3.5), (17, -100.0)), "presence_penalty": 2.0, "seed": 5, "logprobs": 2},
    {"temperature": 0.8, "logprobs": 0, "prompt_logprobs": True},
    STOPS | {"logit_bias": ((8, 1.0),), "ignore_eos": False},
    {"grammar": GRAMMAR, "temperature": 1.0, "frequency_penalty": 0.5, "logprobs": 1, "logit_bias": ((EOS, 0.5),)},
    {"grammar": GRAMMAR, "min_tokens": 6, "logit_bias": ((EOS, 50.0),), "ignore_eos": False},
]
TODO = [
    replace(request, **WAYS[i % len(WAYS)])
    for i, request in enumerate(requests([*LENGTHS, *((20 + i, 40) for i in range(8))]))
]


def edited(request, output, logits):
    """A request's logits after the mask, the bias and the penalties, in vLLM's order: float64 [vocab]"""
    x = logits.astype(np.float64)
    if request.grammar:
        allowed = [*LETTERS] * (len(output) < 12) + [EOS] * (len(output) >= 4)
        x[np.setdiff1d(np.arange(len(x)), allowed)] = -np.inf
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


@dataclass
class Answer:
    """What is expected of a request."""

    output: list = field(default_factory=list)
    reason: str = "length"
    logits: list = field(default_factory=list)
    """transformers', at each token"""
    prompt_logits: torch.Tensor | None = None
    """The same of the prompt: [tokens - 1, vocab]"""


@pytest.fixture(scope="module")
@torch.no_grad()
def want(directories):
    """Every request's answer, from transformers' logits."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(directories["llama"], dtype=torch.float32)
    answers = {}
    for request in TODO:
        answer = answers[request.id] = Answer()
        tokens, past = request.prompt_ids, None
        while len(answer.output) < request.max_tokens and answer.reason == "length":
            made = theirs(torch.tensor([tokens]), past_key_values=past, use_cache=True)
            (*prompt, last), past = made.logits[0], made.past_key_values
            answer.logits.append(last)
            if prompt:
                answer.prompt_logits = torch.stack(prompt)
            token = chosen(request, answer.output, answer.logits[-1].numpy())
            answer.output.append(token)
            tokens = [token]
            complete = request.grammar and (token == EOS or len(answer.output) == 12)
            if complete or token in request.stop_token_ids or (token == EOS and not request.ignore_eos):
                answer.reason = "stop"
    late = [len(answers[request.id].output) >= request.min_tokens for request in TODO]
    assert all(late) and Counter(answer.reason for answer in answers.values())["stop"] > 2
    grammars = {len(answers[request.id].output) for request in TODO if request.grammar}
    assert len(grammars) > 1 and 7 in grammars, "by the EOS that comes as early as it may, and otherwise"
    return answers


def check(results, want):
    """Tokens and reasons as expected; log-probabilities those of transformers' logits."""
    assert {result.id: (list(result.output_ids), result.finish_reason) for result in results} == {
        name: (answer.output, answer.reason) for name, answer in want.items()
    }
    for result in results:
        (request,) = (request for request in TODO if request.id == result.id)
        answer = want[result.id]
        if request.logprobs is None:
            assert result.logprobs is None and result.likeliest is None
        else:
            logits = torch.stack(answer.logits)
            check_logprobs(logits, result.output_ids, result.logprobs, result.likeliest, request.logprobs)
        if not request.prompt_logprobs:
            assert result.prompt_logprobs is None and result.prompt_likeliest is None
            continue
        (first, *values), (nothing, *likeliest) = result.prompt_logprobs, result.prompt_likeliest
        assert first is None and nothing == () and len(values) == len(likeliest) == len(request.prompt_ids) - 1
        if values:
            check_logprobs(answer.prompt_logits, request.prompt_ids[1:], values, likeliest, request.logprobs or 0)


def check_logprobs(logits, tokens, values, likeliest, most):
    """The log-probabilities of tokens, and of so many likeliest ones, are those of logits [tokens, vocab]."""
    close = {"rtol": 1e-5, "atol": 1e-4}
    theirs = logits.log_softmax(1)
    own = theirs.gather(1, torch.tensor(tokens).unsqueeze(1))[:, 0]
    torch.testing.assert_close(torch.tensor(values), own, **close)
    best = theirs.topk(most, dim=1).values
    torch.testing.assert_close(torch.tensor([[value for _, value in row] for row in likeliest]), best, **close)
    ids = torch.tensor([[token for token, _ in row] for row in likeliest], dtype=torch.int64)
    torch.testing.assert_close(theirs.gather(1, ids), best, **close)


@pytest.fixture(scope="module")
def model(directories):
    return replace(load_model(directories["llama"]), eos=frozenset({EOS}))


@pytest.fixture(scope="module")
def tokenizer(directories):
    return directories["llama"] / "tokenizer.json"


@pytest.mark.parametrize("policy", ["static", "orca", "chunked", "rra"])
def test_tokens_are_those_of_the_definition(model, tokenizer, want, policy):
    plan = cells.schedule(model.spec, policy, kv_blocks=100)
    check(Engine(model, plan, tokenizer=tokenizer).run(TODO).results, want)


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_a_preemption_changes_none(model, tokenizer, want, policy):
    plan = cells.schedule(model.spec, policy, kv_blocks=7, admission="grow")
    report = Engine(model, plan, tokenizer=tokenizer).run(TODO)
    check(report.results, want)
    assert report.preemptions > 1


def test_on_a_gpu_with_the_next_step_queued(model, tokenizer, want):
    plan = cells.schedule(model.spec, "orca", kv_blocks=7, admission="grow")
    check(Engine(model, plan, gpu=StandIn(), tokenizer=tokenizer).run(TODO).results, want)


@pytest.mark.slow
def test_over_two_ranks(job, tmp_path, directories, want):
    """A pipeline, tensor parallel, two replicas, and disaggregated, where each side has a sampling state of its own."""
    spec = load_model(directories["llama"]).spec
    plans = {
        "pipeline": cells.schedule(spec, "orca", (1, 1), kv_blocks=7, admission="grow"),
        "tensor": cells.schedule(spec, "rra", (2,), kv_blocks=100),
        "replicas": cells.schedule(spec, "orca", kv_blocks=100, replicas=2),
        "disaggregated": disaggregated(spec, (1,), (1,), kv_blocks=100),
    }
    given = {name: ("llama", plan) for name, plan in plans.items()}
    for came in run_cells(job, tmp_path, directories, 2, given, eos=[EOS], todo=TODO).values():
        check([from_dict(Result, result, "result") for result in came["results"]], want)


def test_prompts_with_log_probabilities_take_no_prefix_from_the_cache(model, tokenizer, want):
    """Each request twice: the second finds the first one's blocks, unless its prompt's logits are needed."""
    plan = cells.schedule(model.spec, "orca", kv_blocks=100, max_num_seqs=1, prefix_caching=True)
    again = [replace(request, id=f"{request.id} again", seed=request.own_seed) for request in TODO]
    report = Engine(model, plan, tokenizer=tokenizer).run([*TODO, *again])
    assert report.reused > 0
    first, second = ([r for r in report.results if r.id.endswith("again") == late] for late in (False, True))
    check(first, want)
    check([replace(result, id=result.id.split()[0]) for result in second], want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": ((300, 1.0),)}, "token id 300 in logit_bias, but the vocabulary is 0 to 299"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "two logit_bias values"),
        ({"logit_bias": ((5, 101.0),)}, "a logit_bias of 101.0"),
        ({"logit_bias": ((5, float("nan")),)}, "a logit_bias of nan"),
        ({"stop_token_ids": (-1,)}, "token id -1 in stop_token_ids"),
        ({"frequency_penalty": 2.5}, "frequency_penalty = 2.5: it must be a number from -2 to 2"),
        ({"min_p": float("nan")}, "min_p = nan"),
        ({"logprobs": 21}, "logprobs = 21: it must be a whole number from 0 to 20"),
        ({"min_tokens": 4}, "min_tokens = 4: it must be at most max_tokens"),
    ],
)
def test_what_cannot_be_chosen_is_refused(model, options, message):
    (request,) = requests([(3, 3)], **options)
    with pytest.raises(InputError, match=message):
        Engine(model, cells.schedule(model.spec)).run([request])


def test_tokens_are_streamed_with_their_log_probabilities(model, tokenizer, want):
    engine = Engine(model, cells.schedule(model.spec, "orca", kv_blocks=100), tokenizer=tokenizer)
    engine.open(Extent.within(engine.schedule, 80, 40))
    for request in TODO:
        engine.add(request)
    events = []
    while not engine.idle:
        events += engine.step()
    events += engine.drain()
    results = [event for event in events if isinstance(event, Result)]
    check(results, want)
    for result in results:
        tokens = [event for event in events if isinstance(event, TokenEvent) and event.request_id == result.id]
        assert tuple(token.token for token in tokens) == result.output_ids
        if result.logprobs is None:
            assert all(token.logprob is None for token in tokens)
        else:
            assert tuple(token.logprob[0] for token in tokens) == result.logprobs
            assert tuple(token.logprob[1] for token in tokens) == result.likeliest


def test_an_encoder_decoders_prompt_has_no_log_probabilities(model):
    (request,) = requests([(3, 3)], prompt_logprobs=True)
    with pytest.raises(InputError, match="prompt_logprobs, but an encoder-decoder has none"):
        check_request(request, replace(model.spec, encoder_layers=2))
