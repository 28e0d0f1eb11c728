"""The protocol of the programs that `benchmarks.cpu` starts, each in its engine's environment.

A program gets a model's directory, a file of requests, a setting, the dtypes of weights and cache, and a number of
threads. It prints "ready" once it has run a few requests; then it runs all of them for each line of its input, and
prints their seconds and output tokens as a line of JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WARM_UP = 8
"""Requests of the run that compiles what a first one compiles; it isn't timed."""


@dataclass(frozen=True)
class Work:
    """The model to load, the requests, and how to run them."""

    model: str
    prompts: list[list[int]]
    outputs: list[int]
    """Output tokens of each request, none of which ends early."""
    setting: str
    dtype: str
    """The dtype of weights and activations: fp32 or bf16."""
    kv_dtype: str
    """The dtype of keys and values: fp32, bf16 or int8."""
    threads: int

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(len(prompt) + output for prompt, output in zip(self.prompts, self.outputs, strict=True))


def read_work() -> Work:
    """Read the program's arguments."""
    model, path, setting, dtype, kv_dtype, threads = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        requests = json.load(file)
    prompts = [request["prompt_ids"] for request in requests]
    return Work(model, prompts, [r["max_tokens"] for r in requests], setting, dtype, kv_dtype, int(threads))


Run = Callable[[list[list[int]], list[int]], Sequence[Sequence[int]]]
"""From prompts and their numbers of output tokens to the output tokens."""
TimedRun = Callable[[list[list[int]], list[int]], tuple[float, Sequence[Sequence[int]]]]
"""The same, and the seconds that it took."""


def timed(run: Run) -> TimedRun:
    """Time all of a run."""

    def both(prompts: list[list[int]], outputs: list[int]) -> tuple[float, Sequence[Sequence[int]]]:
        began = time.perf_counter()
        done = run(prompts, outputs)
        return time.perf_counter() - began, done

    return both


def answer(work: Work, run: TimedRun) -> None:
    """Run the requests for each line of the input."""
    run(work.prompts[:_WARM_UP], work.outputs[:_WARM_UP])
    print(json.dumps("ready"), flush=True)
    for _ in sys.stdin:
        seconds, outputs = run(work.prompts, work.outputs)
        print(json.dumps({"seconds": seconds, "outputs": [[*map(int, output)] for output in outputs]}), flush=True)
