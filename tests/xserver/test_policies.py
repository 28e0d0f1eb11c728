"""Every policy, and two ranks: the API's tokens are transformers' while requests come, stream, end early and leave."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.xrunner import cells
from tests.xserver.conftest import serving
from tests.xserver.http.test_completions import events
from xcore import document
from xcore.requests.request import Request
from xcore.specs.model import ModelSpec

LAYOUTS = {"PP2": (1, 1), "TP2": (2,)}
"""The degree of every stage of two ranks."""
SLOW = ("hybrid", "orca", "chunked")
"""The first has phases as RRA has; the second is that of the server that other files share; the third is like it."""
SERVERS = [
    *(pytest.param((policy, (1,)), id=policy) for policy in cells.POLICIES if policy not in SLOW),
    *(pytest.param((policy, (1,)), id=policy, marks=pytest.mark.slow) for policy in SLOW),
    pytest.param(("waa-c", None), id="waa-c", marks=pytest.mark.slow),
    pytest.param(("waa-m", None), id="waa-m", marks=pytest.mark.slow),
    *(  # each start of two ranks takes seconds
        pytest.param((policy, degrees), id=f"{policy}-{name}", marks=pytest.mark.slow)
        for policy in cells.POLICIES
        for name, degrees in LAYOUTS.items()
    ),
]
TOKENS = 40


def plan(model, policy, degrees):
    """A schedule of a policy on stages of these degrees; of a disaggregated one with a rank for each side."""
    spec = ModelSpec.from_directory(model)
    if degrees is None:
        return replace(cells.disaggregated(spec, (1,), (1,), admission="grow"), policy=policy)
    return cells.schedule(spec, policy, degrees, admission="grow")


@pytest.fixture(scope="module", params=SERVERS)
def policy_server(request, model, tmp_path_factory):
    """A server under each policy, on one rank or two."""
    schedule = plan(model, *request.param)
    ranks = sum(stage.tp for stage in schedule.stages)
    if ranks > 1:
        pytest.importorskip("mpi4py")
    directory = tmp_path_factory.mktemp("policy")
    document.write(directory / "schedule.json", schedule)
    with serving(model, directory / "schedule.json", directory, "--ranks", str(ranks)) as running:
        yield running


def prompt(number):
    return tuple((13 * number + 7 * i) % 250 for i in range(1 + 7 * number))


@pytest.fixture(scope="module")
def theirs(model):
    """transformers' tokens for each prompt: none is nearly a tie, which might go either way."""
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole.generation_config.eos_token_id = None
    generated = [cells.generate(whole, Request("", prompt(number), TOKENS)) for number in range(12)]
    assert min(min(gaps) for _, gaps in generated) > 1e-3
    return [tokens for tokens, _ in generated]


def leave(server, number):
    """Ask for an answer and go before it is there."""
    body = json.dumps({"prompt": prompt(number), "max_tokens": TOKENS, "ignore_eos": True, "n": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.01 * (number % 5))


def tokens_of(server, number):
    """Token ids, whole or streamed."""
    body = {"prompt": prompt(number), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream": number % 2 == 1}
    status, _, data = server.post("/v1/completions", body)
    assert status == 200, data
    answers = events(data) if body["stream"] else [json.loads(data)]
    return [token for answer in answers for token in answer["choices"][0]["token_ids"]]


def test_greedy_tokens_are_transformers_while_others_leave(policy_server, theirs):
    with ThreadPoolExecutor(24) as pool:
        asked = []
        for number in range(len(theirs)):
            asked.append(pool.submit(tokens_of, policy_server, number))
            left = pool.submit(leave, policy_server, number)
            time.sleep(0.01)
        left.result()
        assert [answer.result() for answer in asked] == theirs
    assert len({token for tokens in theirs for token in tokens}) > 20


def test_streamed_text_is_the_whole_text_and_ends_at_a_stop_text(policy_server):
    body = {"prompt": "Hello, world", "max_tokens": TOKENS, "temperature": 0.8, "seed": 3, "n": 4, "ignore_eos": True}
    for stop in (None, "e", "\ufffd\ufffd"):
        whole = json.loads(policy_server.post("/v1/completions", body | {"stop": stop})[2])["choices"]
        chunks = events(policy_server.post("/v1/completions", body | {"stop": stop, "stream": True})[2])
        for choice in whole:
            own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
            assert "".join(c["text"] for c in own) == choice["text"]
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
    assert len({choice["text"] for choice in whole}) > 1
