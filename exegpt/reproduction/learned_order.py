"""vLLM-LTR's learned order compared with first come, first served and oracles, over arrival rates.

Llama-3.1-8B on one A100-80GB, with the stock roofline and chunked prefill as in `vllm serve` (256 sequences, 2,048
tokens, *grow*). Log-normal lengths, requests for 60 s, then a drain. The rankers are simulated: true lengths with the
noise that gives a Kendall's tau of 0.62 (LMSYS-Chat) or 0.55 (ShareGPT). The classifier distinguishes ten buckets of
equal size; its tau of 0.38 is the middle of their classifiers' 0.18 to 0.58. At the highest rate, running requests also
give way.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from exegpt.report.sections import Section
from exegpt.reproduction import prompts_at_once
from exegpt.reproduction.prompts_at_once import PROMPTS, WANTED, Answers, PromptsAtOnce, answers_of
from exegpt.reproduction.vllm_of_2024 import VLLM_OF_2024
from xcore.arrays import Array
from xcore.orders.noise import noisy_scores
from xcore.quantity import figure_text
from xcore.specs.profile import Profile
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xcore.traces.labels import Labels
from xprofiler.roofline import roofline_profile
from xscheduler.engine_settings import EngineSettings, follow
from xscheduler.ordering import OrderChoice, labelled, times_hints
from xscheduler.settings import find_setting
from xsimulator.replay.event_simulator import replay

MODEL, CLUSTER = "llama-3.1-8b", "1xA100-80GB"
RATES = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Requests per second."""
SECONDS = 60.0
SEED = 17
INPUT, OUTPUT, MOST = (np.log(110.0), 1.0), (np.log(180.0), 1.1), 2048
"""Mean and standard deviation of the logarithms of lengths, and the longest length.

Means are about 177 and 311 tokens, near ShareGPT's 161 and 337.
"""
WAYS = {
    "FCFS": ("fcfs", None),
    "MLFQ": ("mlfq", None),
    "classifier": ("learned", 0.38),
    "learned, tau 0.55": ("learned", 0.55),
    "learned, tau 0.62": ("learned", 0.62),
    "SJF oracle": ("sjf", None),
    "SRTF oracle": ("srtf", None),
}
"""Each method's order, and the tau of its scores."""
LEARNED = ("learned, tau 0.55", "learned, tau 0.62")
GIVING_WAY = ("none", "recompute", "swap")
"""How running requests may give way (`--preempt`)."""
YIELDING = (*LEARNED, "SJF oracle", "SRTF oracle")
"""Methods whose running requests may give way."""
TARGET = 2.0
"""Minimum ratio of FCFS's mean to the learned order's at the highest rate."""
METRICS = {"per_token_s": "mean latency per output token", "mean_s": "mean latency"}
"""Both are means of users' waiting times; the paper's figure is the first."""
SLACK = 0.01
"""Share by which means may differ where no order matters, since no request waits."""


@dataclass(frozen=True)
class Latencies:
    """Latencies of the requests at one rate, from arrival to the last token."""

    mean_s: float
    per_token_s: float
    """Mean over requests of latency / output tokens."""
    p99_s: float


@dataclass(frozen=True)
class Rate:
    """One arrival rate."""

    rate_s: float
    requests: int
    latencies: dict[str, Latencies]
    """The latencies by method."""


@dataclass(frozen=True)
class Yielded:
    """Latencies if running requests give way."""

    latencies: Latencies
    preemptions: int


@dataclass(frozen=True)
class LearnedOrder:
    """All rates, and whether the targets are met."""

    rates: tuple[Rate, ...]
    between: bool
    """Whether the learned order's means lie between FCFS's and the SJF oracle's at every rate, by both metrics."""
    gains: dict[str, dict[str, float]]
    """By metric and method: FCFS's mean over each learned order's, and over the oracle's, at the highest rate."""
    giving_way: dict[str, dict[str, Yielded]]
    """By method and by how running requests give way: the latencies at the highest rate."""
    at_once: PromptsAtOnce
    """The synthetic data."""


def requests_at(rate: float) -> list[RequestLengths]:
    """Return the requests that arrive in `SECONDS`."""
    rng = np.random.default_rng(SEED)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, size=int(2 * rate * SECONDS) + 50))
    return _drawn(rng, arrivals[arrivals < SECONDS])


def requests_at_once(prompts: int) -> list[RequestLengths]:
    """Return requests that all come at 0 s."""
    return _drawn(np.random.default_rng(SEED), np.zeros(prompts))


def _drawn(rng: np.random.Generator, arrivals: Array) -> list[RequestLengths]:
    """Draw the lengths of requests with these arrival times [n], in seconds."""
    inputs, outputs = (
        np.clip(np.rint(rng.lognormal(*law, size=len(arrivals))), 1, MOST).astype(int) for law in (INPUT, OUTPUT)
    )
    return [RequestLengths(*row) for row in zip(inputs.tolist(), outputs.tolist(), arrivals.tolist(), strict=True)]


def served(
    schedule: Schedule, profile: Profile, rows: list[RequestLengths], way: str, preempt: str = "none"
) -> tuple[RequestTimes, ...]:
    """Replay these requests in a method's order; running ones give way as `--preempt` says."""
    order, tau = WAYS[way]
    hints = times_hints(
        labelled([Labels()] * len(rows), [row.arrival_s for row in rows]), rows, schedule, profile, True
    )
    if tau is not None:
        scores = noisy_scores([row.output for row in rows], tau, SEED)
        if way == "classifier":
            scores = np.searchsorted(np.quantile(scores, np.arange(0.1, 0.95, 0.1)), scores).astype(float)
        hints = [replace(own, score=float(score)) for own, score in zip(hints, scores, strict=True)]
    choice = OrderChoice(order, preempt=preempt)
    how = choice.make(schedule, profile), hints, False, choice.preemption(schedule)
    return replay(schedule, profile, rows, False, False, None, None, *how).served


def latencies_of(done: tuple[RequestTimes, ...]) -> Latencies:
    """Summarise the latencies of served requests."""
    latency = np.array([request.finish_s - request.arrival_s for request in done])
    per_token = latency / [request.output_tokens for request in done]
    return Latencies(float(latency.mean()), float(per_token.mean()), float(np.percentile(latency, 99)))


def reproduce(
    progress: Callable[[int, int], None] = lambda done, total: None,
    rates: tuple[float, ...] = RATES,
    prompts: int = PROMPTS,
) -> LearnedOrder:
    """Replay every method at every rate, and the synthetic data of this many prompts."""
    stock = find_setting(MODEL, CLUSTER, "177/311", "roofline")
    profile = roofline_profile(stock.model, stock.cluster, stock.profile.dtype, engine=VLLM_OF_2024)
    setting = replace(stock, profile=profile)
    settings = EngineSettings.of(
        {"policy": "chunked", "max_num_seqs": 256, "max_num_batched_tokens": 2048, "admission": "grow"}
    )
    schedule, _ = follow(setting, settings)
    found, replays = [], itertools.count(1)
    total = len(rates) * len(WAYS) + len(YIELDING) * len(GIVING_WAY) + len(prompts_at_once.METHODS)
    for rate in rates:
        rows, latencies = requests_at(rate), {}
        for way in WAYS:
            latencies[way] = latencies_of(served(schedule, profile, rows, way))
            progress(next(replays), total)
        found.append(Rate(rate, len(rows), latencies))
    last = found[-1].latencies
    gains = {
        metric: {way: getattr(last["FCFS"], metric) / getattr(last[way], metric) for way in (*LEARNED, "SJF oracle")}
        for metric in METRICS
    }
    between = all(_between(rate, way, metric) for rate in found for way in LEARNED for metric in METRICS)
    rows, giving_way = requests_at(rates[-1]), dict[str, dict[str, Yielded]]()
    for way, preempt in itertools.product(YIELDING, GIVING_WAY):
        done = served(schedule, profile, rows, way, preempt)
        count = sum(request.preemptions for request in done)
        giving_way.setdefault(way, {})[preempt] = Yielded(latencies_of(done), count)
        progress(next(replays), total)
    rows, answers = requests_at_once(prompts), dict[str, Answers]()
    for way in prompts_at_once.METHODS:
        answers[way] = answers_of(served(schedule, profile, rows, way), min(WANTED, prompts))
        progress(next(replays), total)
    at_once = PromptsAtOnce(prompts, min(WANTED, prompts), answers)
    return LearnedOrder(tuple(found), between, gains, giving_way, at_once)


def _between(rate: Rate, way: str, metric: str) -> bool:
    best, learned, worst = (float(getattr(rate.latencies[name], metric)) for name in ("SJF oracle", way, "FCFS"))
    return best * (1 - SLACK) <= learned <= worst * (1 + SLACK)


def sections(result: LearnedOrder) -> list[Section]:
    """Return mean latencies, latencies per token, the targets, and the synthetic data."""
    heads = ("requests/s", "requests", *WAYS)
    inside = "everywhere" if result.between else "not everywhere"
    notes = (f"The learned order lies between FCFS and the SJF oracle {inside} in both means (within {SLACK:.0%}).",)
    return [
        _section(
            "learned order: mean latency per output token, ms",
            heads,
            result,
            lambda own: own.per_token_s * 1e3,
            (_gains(result, "per_token_s"), *notes),
        ),
        _section("mean latency, s", heads, result, lambda own: own.mean_s, (_gains(result, "mean_s"),)),
        _section("99th percentile of latency, s", heads, result, lambda own: own.p99_s, ()),
        _yielding(result),
        prompts_at_once.section(result.at_once),
    ]


def _yielding(result: LearnedOrder) -> Section:
    """Return a row for each method and each way to give way, at the highest rate."""
    first_come = result.rates[-1].latencies["FCFS"]
    rows = [
        (
            way,
            preempt,
            f"{own.preemptions:,}",
            *(figure_text(figure) for figure in (own.latencies.per_token_s * 1e3, own.latencies.mean_s)),
            figure_text(own.latencies.p99_s),
            f"{first_come.per_token_s / own.latencies.per_token_s:.2f}",
            f"{first_come.mean_s / own.latencies.mean_s:.2f}",
        )
        for way, by_preempt in result.giving_way.items()
        for preempt, own in by_preempt.items()
    ]
    heads = ("method", "preempt", "preemptions", "ms per token", "mean, s", "p99, s", "FCFS / per token", "FCFS / mean")
    title = f"running requests give way, at {result.rates[-1].rate_s:g} requests/s"
    note = "Swapped keys and values go over a host link of 25 GB/s before the next step; up to 4 GiB are on the host."
    return Section(title, heads, tuple(rows), (note,))


def _gains(result: LearnedOrder, metric: str) -> str:
    """Return the comparison of FCFS with the learned order at the highest rate, in a sentence."""
    gains = result.gains[metric]
    met = "met" if all(gains[way] >= TARGET for way in LEARNED) else "missed"
    texts = ", ".join(f"{way} {gain:.2f} times" for way, gain in gains.items())
    rate = result.rates[-1].rate_s
    return f"{METRICS[metric]} at {rate:g} requests/s, FCFS over others: {texts} (target {TARGET:g}: {met})."


def _section(
    title: str,
    heads: tuple[str, ...],
    result: LearnedOrder,
    figure: Callable[[Latencies], float],
    notes: tuple[str, ...],
) -> Section:
    rows = tuple(
        (f"{rate.rate_s:g}", f"{rate.requests:,}", *(figure_text(figure(rate.latencies[way])) for way in WAYS))
        for rate in result.rates
    )
    return Section(title, heads, rows, notes)
