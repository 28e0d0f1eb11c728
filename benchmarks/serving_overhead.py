"""What serving over HTTP costs: `exegpt serve` beside its own engine without a server, on the same requests.

All requests come at once, to an engine that they keep full, in turns: without a server, over HTTP as whole answers, and
as streams. Then single requests of one token on an idle server, beside the engine's own time for such a prompt. Exit
code 1 where the server costs over 5 % of the engine's throughput, or over 10 ms of the time to first token. One thread
computes; CPU seconds are those of each process of the server.

    python -m benchmarks.serving_overhead
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.servers import SIZES, give_text, orca, running
from xcore import document
from xcore.requests.request import Request
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.rank.warm_up import Extent

INPUT, OUTPUT = 64, 128
MOST, MOST_S = 0.05, 0.010
"""Of the throughput, and seconds of the time to first token, that the server may cost."""


def prompts(num: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    drawn = torch.randint(0, SIZES.vocab, (num, INPUT), generator=torch.Generator().manual_seed(seed))
    return [row.tolist() for row in drawn]


def ask(url: str, prompt: list[int], tokens: int, stream: bool) -> None:
    """One request; its answer is read to the end, and must have all tokens."""
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    head = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body | {"stream": stream}).encode(), head)
    with urllib.request.urlopen(asked, timeout=600) as answer:
        read = answer.read()
    if b'"finish_reason":"length"' not in read or (stream and not read.endswith(b"data: [DONE]\n\n")):
        raise SystemExit(f"The server has cut an answer: {read[-200:]!r}.")


def over_http(url: str, todo: list[list[int]], stream: bool) -> float:
    """Output tokens per second of requests that all come at once."""
    with ThreadPoolExecutor(len(todo)) as clients:
        begin_s = time.perf_counter()
        list(clients.map(lambda prompt: ask(url, prompt, OUTPUT, stream), todo))
        return len(todo) * OUTPUT / (time.perf_counter() - begin_s)


def without(engine: Engine, todo: list[list[int]], tokens: int = OUTPUT) -> float:
    """Output tokens per second of the open engine alone."""
    begin_s = time.perf_counter()
    for i, prompt in enumerate(todo):
        engine.add(Request(str(i), tuple(prompt), tokens, ignore_eos=True))
    while engine.busy:
        engine.step()
    return len(todo) * tokens / (time.perf_counter() - begin_s)


def cpu_seconds(pid: int) -> dict[str, float]:
    """Of a server's processes so far."""
    used, ticks = {}, os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for name, process in (("frontend", str(pid)), *((f"engine {child}", child) for child in children)):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        used[name] = (int(fields[11]) + int(fields[12])) / ticks
    return used


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seqs", type=int, default=32, help="that run at a time")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, schedule = directory / "model", directory / "schedule.json"
        SIZES.create(model, seed=1)
        give_text(model / "tokenizer.json", SIZES.vocab)
        plan = orca(model, asked.seqs)
        document.write(schedule, plan)
        engine = Engine(load_model(model), plan)
        engine.open(Extent.within(plan, SIZES.context - 1, 1))
        with running(directory, model, schedule) as (url, pid):
            held = throughputs(engine, url, pid, asked.rounds, asked.requests)
            held &= first_tokens(engine, url)
    sys.exit(not held)


def throughputs(engine: Engine, url: str, pid: int, rounds: int, requests: int) -> bool:
    """Print the throughputs; whether the server costs little enough of it."""
    ways: dict[str, Callable[[list[list[int]]], float]] = {
        "engine alone": lambda todo: without(engine, todo),
        "whole answers": lambda todo: over_http(url, todo, False),
        "streams": lambda todo: over_http(url, todo, True),
    }
    for way in ways.values():
        way(prompts(16, 99))  # first requests are the slowest
    tokens_s: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s: dict[str, dict[str, float]] = {}
    for number in range(rounds):
        for name, way in list(ways.items())[:: -1 if number % 2 else 1]:
            before = cpu_seconds(pid)
            tokens_s[name].append(way(prompts(requests, number)))
            cpu_s[name] = {process: used - before[process] for process, used in cpu_seconds(pid).items()}
    held = True
    for name, rates in tokens_s.items():
        # within a round: a machine's speed may change by half from one minute to the next
        shares = sorted(rate / alone for rate, alone in zip(rates, tokens_s["engine alone"], strict=True))
        share = statistics.median(shares)
        held &= share >= 1 - MOST
        used = ", ".join(f"{process} {seconds:.1f}" for process, seconds in cpu_s[name].items())
        found = f"{statistics.median(rates):8.0f} tokens/s {share:7.1%} ({shares[0]:.1%} to {shares[-1]:.1%})"
        print(f"{name:14} {found}   CPU seconds: {used}", flush=True)
    return held


def first_tokens(engine: Engine, url: str, num: int = 21) -> bool:
    """Print the times to first token of an idle server and of the engine; whether they are near enough."""
    alone, served = [], []
    for prompt in prompts(num, 7):
        alone.append(1 / without(engine, [prompt], 1))
        begin_s = time.perf_counter()
        ask(url, prompt, 1, True)
        served.append(time.perf_counter() - begin_s)
    own_s, http_s = statistics.median(alone), statistics.median(served)
    print(f"first token of {INPUT}: engine {1e3 * own_s:.1f} ms, idle server {1e3 * http_s:.1f} ms")
    return http_s - own_s <= MOST_S


if __name__ == "__main__":
    main()
