"""Twenty questions as users ask them: each answer beside a replay of requests that the search did not see.

Without a rate, all requests are there from the start, and the replay's first and last fifth are left out. At a rate,
they arrive by another seed at the highest rate that the answer sustains.

    python -m benchmarks.questions
    python -m benchmarks.questions --only 3,17
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exegpt.api.library import tune
from xcore.specs.request_times import RequestTimes, latencies
from xcore.specs.schedule import Schedule
from xscheduler.rate_sample import Arrivals
from xscheduler.settings import find_setting
from xscheduler.tuned import Tuned
from xsimulator.replay.event_simulator import replay

SEED = 20
TOKENS = 20_000_000
"""Approximate tokens of a replay."""
LIMIT = 0.08
"""Share by which a bounded time may be beyond its bound in the replay."""


@dataclass(frozen=True)
class Question:
    """A user's question: its name, its setting and the search's options."""

    what: str
    model: str
    cluster: str
    workload: str
    asked: Mapping[str, Any]


QUESTIONS = (
    Question("chat on one GPU", "llama-3.1-8b", "1xH100-SXM", "1024/256", {"ttft": "500ms", "tpot": "25ms"}),
    Question("summaries on a small GPU", "llama-3.1-8b", "1xL40S", "2048/128", {"latency_bound": "8s"}),
    Question("reports", "llama-3.1-70b", "2xH100-SXM", "4096/512", {"tpot": "50ms", "dtype": "fp8"}),
    Question("a batch job overnight", "llama-3.1-70b", "8xA100-80GB", "1000/1000", {"latency_bound": "60s"}),
    Question("reading documents", "llama-3.1-8b", "1xH200", "32000/300", {"latency_bound": "20s"}),
    Question("the paper's policy", "opt-13b", "1xA40", "T", {"latency_bound": "15s", "policy": "rra"}),
    Question("a gamer's GPU", "llama-3.1-8b", "1xRTX-4090", "512/512", {"latency_bound": "30s"}),
    Question("long prompts, first token", "llama-3.1-8b", "1xA100-40GB", "8192/256", {"ttft": "3s"}),
    Question(
        "a rate with a latency", "llama-3.1-8b", "2xH100-SXM", "2048/256", {"rate": "10/s", "latency_bound": "5s"}
    ),
    Question(
        "a rate with tokens' times",
        "llama-3.1-70b",
        "4xH100-SXM",
        "1024/512",
        {"rate": "3/s", "ttft": "2s", "tpot": "60ms", "dtype": "fp8"},
    ),
    Question("half of the users", "llama-3.1-8b", "1xH100-SXM", "C1", {"latency_bound": "6s", "percentile": 50.0}),
    Question("nearly all users", "llama-3.1-8b", "1xH100-SXM", "C1", {"latency_bound": "20s", "percentile": 99.9}),
    Question(
        "a batch that is given",
        "llama-3.1-8b",
        "1xH100-SXM",
        "2048/256",
        {"latency_bound": "10s", "fixed": {"max_num_seqs": 32}},
    ),
    Question("split devices", "opt-13b", "4xA40", "S", {"latency_bound": "30s", "policy": "waa-c"}),
    Question("on SGLang", "llama-3.1-8b", "1xH100-SXM", "1024/1024", {"tpot": "20ms", "engine": "sglang"}),
    Question("three GPUs", "llama-3.1-70b", "3xH100-SXM", "2048/256", {"ttft": "1s", "tpot": "50ms", "dtype": "fp8"}),
    Question("two nodes", "llama-3.1-70b", "2x8xH100-SXM", "2048/512", {"latency_bound": "25s"}),
    Question("an encoder-decoder", "t5-11b", "4xA40", "S", {"latency_bound": "10s"}),
    Question("long answers", "llama-3.1-8b", "1xH100-SXM", "128/2048", {"latency_bound": "60s"}),
    Question(
        "most first tokens at a rate",
        "llama-3.1-8b",
        "1xH100-SXM",
        "1024/256",
        {"rate": "5/s", "ttft": "1s", "percentile": 95.0},
    ),
)


@dataclass(frozen=True)
class Checked:
    """An answer's figures in a replay."""

    throughput: float
    """Requests per second."""
    beyond: dict[str, float]
    """Replayed time over the bound, less 1, by bound."""
    off: dict[str, float]
    """Predicted time over the replayed one, less 1, by bound; empty at a rate, whose replay is at another rate."""


def check(question: Question, answer: Tuned) -> Checked:
    """The answer's schedule under the engine that it was predicted with, replayed."""
    schedule, estimate = answer.schedule, answer.estimate
    assert schedule and estimate
    dtype = question.asked.get("dtype")
    where = find_setting(question.model, question.cluster, question.workload, engine=estimate.engine, dtype=dtype)
    workload = where.workload
    tokens = workload.input.mean + workload.output.mean
    count = int(min(max(TOKENS / tokens, 2000), 40_000)) * schedule.replicas
    if answer.goodput_seq_s is None:
        requests = workload.without_requests.draw(count, seed=SEED, context=where.model.longest_request)
        kept = slice(count // 5, -(count // 5))
    else:
        arrivals = Arrivals.poisson(workload, where.model.longest_request, seed=SEED, count=count)
        requests, kept = tuple(arrivals.requests(answer.goodput_seq_s)), slice(count // 20, None)
    served = replay(schedule, where.profile, requests, timeline=False).served
    return _compared(schedule, answer, served, kept)


def _compared(schedule: Schedule, answer: Tuned, served: Sequence[RequestTimes], kept: slice) -> Checked:
    estimate = answer.estimate
    assert estimate
    ends = np.sort([s.finish_s for s in served])[kept]
    middle = sorted(served, key=lambda s: s.index)[kept]
    times = latencies(middle, "start" if answer.goodput_seq_s is None else "arrival")
    bounds = {"latency": schedule.latency_bound_s, "ttft": schedule.ttft_bound_s, "tpot": schedule.tpot_bound_s}
    expected = {"latency": estimate.latency_s, "ttft": estimate.ttft_bounded_s, "tpot": estimate.tpot_bounded_s}
    reached = {name: float(np.percentile(times[name], schedule.percentile)) for name in bounds if bounds[name]}
    return Checked(
        (len(ends) - 1) / (ends[-1] - ends[0]),
        {name: seconds / (bounds[name] or 1.0) - 1 for name, seconds in reached.items()},
        {} if answer.goodput_seq_s else {name: (expected[name] or 0) / s - 1 for name, s in reached.items()},
    )


def main() -> None:
    """Print every question's answer and what the replay makes of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of questions")
    only = parser.parse_args().only
    numbers = [int(n) for n in only.split(",")] if only else range(1, len(QUESTIONS) + 1)
    broken = 0
    for number in numbers:
        question = QUESTIONS[number - 1]
        started = time.process_time()
        answer = tune(question.model, question.cluster, question.workload, **question.asked)
        seconds = time.process_time() - started
        asked = ", ".join(f"{name} {value}" for name, value in question.asked.items())
        print(f"{number:2} {question.what}: {question.model} {question.cluster} {question.workload}, {asked}")
        if not answer.schedule or not answer.estimate:
            print(f"   no schedule: {answer.alternatives[0].reason}")
            continue
        done = check(question, answer)
        broken += any(share > LIMIT for share in done.beyond.values())
        rate = answer.goodput_seq_s or answer.estimate.throughput_seq_s
        beyond = ", ".join(f"{name} {share:+.1%} of its bound" for name, share in done.beyond.items())
        off = "; predicted " + ", ".join(f"{name} {share:+.1%}" for name, share in done.off.items()) if done.off else ""
        print(f"   {answer.schedule.policy} on {answer.estimate.engine}, {rate:.3g}/s in {seconds:.1f} CPU s")
        print(f"   replay: {rate / done.throughput - 1:+.1%} throughput predicted; {beyond}{off}", flush=True)
    print(f"{broken} of {len(numbers)} answers break a bound by more than {LIMIT:.0%} in the replay")


if __name__ == "__main__":
    main()
