"""Requests whose logits are NaN are answered by an error that names the cause; the server goes on."""

import json

import pytest

from tests.exegpt.cli.conftest import run_command
from tests.xrunner.broken_model import NAN, spoil
from tests.xserver.conftest import schedule_for, serving
from tests.xserver.http.test_completions import events
from xcore import document

GOOD = {"prompt": [5, 6], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "logit_bias": {str(NAN): 100}}
"""Makes the token first."""
BAD = {
    "greedy": ("/v1/completions", {}),
    "at random": ("/v1/completions", {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}),
    "several choices": ("/v1/completions", {"n": 3, "temperature": 1}),
    "several prompts": ("/v1/completions", {"prompt": [[5, 6], [5, NAN]]}),
    "log-probabilities": ("/v1/completions", {"logprobs": 2, "echo": True}),
    "a chat": ("/v1/chat/completions", CHAT),
}


def spoilt(model, root):
    """A model's directory with a token whose embedding is NaN, and a schedule for it."""
    directory = spoil(model, root / "spoilt", "embed_tokens", NAN)
    document.write(root / "schedule.json", schedule_for(directory))
    return directory, root / "schedule.json"


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("failing")
    with serving(*spoilt(model, root), root, "--journal", str(root / "journal")) as running:
        yield running, root / "journal"


def check(error):
    assert (
        error["code"] == "internal_error" and error["type"] == "server_error" and "logits are NaN" in error["message"]
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "options"), BAD.values(), ids=BAD)
def test_an_error_names_the_cause_and_others_go_on(server, path, options, stream):
    running, _ = server
    _, _, expected = running.post("/v1/completions", GOOD)
    body = options if "messages" in options else GOOD | {"prompt": [5, NAN]} | options
    status, _, data = running.post(path, body | {"stream": stream})
    if stream:
        *_, last = events(data)
        assert status == 200
        check(last["error"])
    else:
        assert status == 500
        check(json.loads(data)["error"])
    for _ in range(3):
        status, _, data = running.post("/v1/completions", GOOD)
        assert status == 200 and json.loads(data)["choices"] == json.loads(expected)["choices"]


def test_a_journalled_request_that_failed_is_not_run_again(server):
    running, journal = server
    for _ in range(2):
        status, _, data = running.post("/v1/completions", GOOD | {"prompt": [5, NAN]}, Idempotency_Key="failing")
        assert status == 500
        check(json.loads(data)["error"])
    assert not list(journal.iterdir())
    assert running.post("/v1/completions", GOOD, Idempotency_Key="fine")[0] == 200


def test_the_engine_is_the_same_and_holds_nothing(server):
    running, _ = server
    running.post("/v1/completions", GOOD | {"prompt": [[5, NAN]] * 5})
    metrics = running.get("/metrics")[2].decode()
    assert "exegpt_engine_restarts_total 0.0" in metrics
    assert "exegpt_kv_usage_ratio 0.0" in metrics and "exegpt_running_requests 0.0" in metrics


@pytest.mark.parametrize("command", ["serve", pytest.param("bench", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_model_of_nan_logits_is_refused_in_one_sentence(model, tmp_path, capfd, command):
    directory = spoil(model, tmp_path / "spoilt", "lm_head")
    document.write(tmp_path / "schedule.json", schedule_for(directory))
    options = ["--model", directory, "--schedule", tmp_path / "schedule.json", "--threads", "1"]
    done = run_command(command, *options)
    printed = capfd.readouterr().err + done.err  # of the server's engine, which is another process, and of this one
    last = printed.strip().splitlines()[-1]
    assert done.code == 2 and "Traceback" not in printed
    assert last.startswith("exegpt: Model 'spoilt' has NaN or infinite logits") and printed.count("NaN or") == 1
