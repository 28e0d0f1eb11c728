"""A server in the learned order: prompts whose outputs a ranker expects to be short overtake others."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exegpt.api.ranking.training import Recipe, train_ranker
from tests.exegpt.cli.conftest import run_command
from tests.xserver.conftest import schedule_for, serving
from xcore import document
from xcore.orders.features import Features


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    """One that expects little of `list` and much of `essay`."""
    path = tmp_path_factory.mktemp("ranker") / "ranker.npz"
    prompts = [f"{'list' if i % 2 else 'essay'} {i % 17}" for i in range(200)]
    lengths = np.array([5 if i % 2 else 90 for i in range(200)])
    train_ranker(Features.of(prompts), lengths, Recipe(width=4, hidden=8, epochs=8)).save(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("giving_way", "bound_s"),
    [((), None), (("--preempt", "swap"), None), ((), 300.0)],
    ids=["running ones stay", "running ones give way", "under a bound"],
)
def test_requests_that_a_ranker_expects_to_be_short_come_first(model, ranker, tmp_path, giving_way, bound_s):
    schedule = schedule_for(model, max_num_seqs=1, prefills_per_step=1)
    document.write(tmp_path / "schedule.json", replace(schedule, latency_bound_s=bound_s))
    options = ("--order", "learned", "--ranker", str(ranker), *giving_way)
    ended = []
    with serving(model, tmp_path / "schedule.json", tmp_path, *options) as server, ThreadPoolExecutor(9) as pool:

        def complete(prompt):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
            status, _, text = server.post("/v1/completions", body)
            ended.append(prompt.split()[0])
            return status, text

        (engine,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        first = pool.submit(complete, "first")
        time.sleep(0.05)
        os.kill(int(engine), signal.SIGSTOP)  # until all have come, however slow the machine is
        others = [pool.submit(complete, f"{word} {i}") for word in ("essay", "list") for i in range(3)]
        time.sleep(1.5)
        os.kill(int(engine), signal.SIGCONT)
        answers = [waiting.result() for waiting in (first, *others)]
    assert all(status == 200 for status, _ in answers), answers
    assert ended.index("essay") >= 2 and ended[-2:] == ["essay"] * 2, ended


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """An application whose second output is as long as its first; and one whose only output is of middle length."""
    directory, calls = tmp_path_factory.mktemp("graphs"), []
    for run in range(200):
        own = {"run": run, "input_tokens": 5}
        calls.append(
            {"application": "chat", "unit": "ask", "output_tokens": 2 + 2 * (run % 40), "next": "answer", **own}
        )
        calls.append(
            {"application": "chat", "unit": "answer", "output_tokens": 2 + 2 * (run % 40), "next": "end", **own}
        )
        calls.append({"application": "steady", "unit": "only", "output_tokens": 40, "next": "end", **own})
    (directory / "calls.jsonl").write_text("\n".join(map(json.dumps, calls)))
    assert run_command("graphs", "learn", directory / "calls.jsonl", "--out", directory / "graphs.json").code == 0
    return directory / "graphs.json"


@pytest.mark.slow
def test_requests_are_ordered_by_what_their_runs_have_shown(model, graphs, tmp_path):
    """Two API keys have a run of the same name: one's first output was long, so its second call waits for all."""
    document.write(tmp_path / "schedule.json", schedule_for(model, max_num_seqs=1, prefills_per_step=1))
    (tmp_path / "keys").write_text("long\nshort\n")
    options = ("--order", "gittins", "--graphs", str(graphs), "--api-key-file", str(tmp_path / "keys"))
    ended = []
    with serving(model, tmp_path / "schedule.json", tmp_path, *options) as server, ThreadPoolExecutor(9) as pool:

        def complete(key, tokens, application=None, unit=None):
            labels = {"application": application, "run": "1", "unit": unit} if application else {}
            body = {"prompt": "x", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "metadata": labels}
            status, _, text = server.post("/v1/completions", body, Authorization=f"Bearer {key}")
            ended.append(f"{key} {application}")
            return status, text

        for key, tokens in (("long", 80), ("short", 4)):
            assert complete(key, tokens, "chat", "ask")[0] == 200
        (engine,) = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        first = pool.submit(complete, "long", 100)
        time.sleep(0.05)
        os.kill(int(engine), signal.SIGSTOP)  # until all have come, however slow the machine is
        others = [pool.submit(complete, "long", 30)]
        others += [
            pool.submit(complete, "long", 30, "chat", "answer"),
            pool.submit(complete, "long", 30, "steady", "only"),
        ]
        others += [pool.submit(complete, "short", 30, "chat", "answer")]
        time.sleep(1.5)
        os.kill(int(engine), signal.SIGCONT)
        answers = [waiting.result() for waiting in (first, *others)]
    assert all(status == 200 for status, _ in answers), answers
    assert ended[-4:] == ["short chat", "long steady", "long chat", "long None"], ended


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--order", "srtf"), "--order srtf needs request data that a server does not receive: use one of fcfs, mlfq"),
        (("--order", "edf"), "--order edf needs request data that a server"),
        (("--order", "learned", "--preempt", "swap", "-l", "5s"), "leave out --latency-bound, or --preempt and"),
        (("--warm-prefixes", "epwq", "-l", "5s"), "leave out --latency-bound, or --preempt and --warm-prefixes"),
        (("--order", "learned"), "--order learned needs --ranker FILE"),
        (("--order", "demand-slack", "--graphs", "no.json"), "'no.json'"),
    ],
)
def test_what_a_server_refuses(model, words, sentence):
    done = run_command("serve", "-m", model, *words)
    assert done.code == 2 and sentence in done.err and done.err.count("\n") == 1
