"""vLLM-LTR's synthetic data: ten thousand prompts at once, of whose answers as many as possible are wanted soon.

The paper states a gain in throughput of 6.5 times, but no set-up. This one counts the answers that are finished in five
minutes, and the time to the first thousand, on the model, the device and the lengths of `learned_order.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exegpt.report.sections import Section
from xcore.quantity import figure_text
from xcore.specs.request_times import RequestTimes

PROMPTS = 10_000
WANTED = 1_000
"""Answers after which enough are finished."""
LIMIT_S = 300.0
METHODS = ("FCFS", "learned, tau 0.55", "learned, tau 0.62", "SJF oracle")
"""The compared methods of `learned_order.WAYS`."""
PUBLISHED = 6.5
"""The paper's gain in throughput."""


@dataclass(frozen=True)
class Answers:
    """The answers of one method."""

    in_limit: int
    """Answers that are finished in `LIMIT_S`."""
    tokens_in_limit: int
    """Output tokens of these answers."""
    wanted_s: float
    """Seconds until `wanted` answers are finished."""
    all_s: float
    """Seconds until all answers are finished."""


@dataclass(frozen=True)
class PromptsAtOnce:
    """All methods on the same prompts."""

    prompts: int
    wanted: int
    answers: dict[str, Answers]
    """The answers by method."""

    def gain(self, method: str) -> float:
        """Return how many times sooner than under FCFS the wanted answers are finished."""
        return self.answers["FCFS"].wanted_s / self.answers[method].wanted_s


def answers_of(served: Sequence[RequestTimes], wanted: int = WANTED, limit_s: float = LIMIT_S) -> Answers:
    """Return when these requests, which all came at 0 s, were finished; at least `wanted` of them."""
    finish_s = np.sort([request.finish_s for request in served])
    in_limit = [request.output_tokens for request in served if request.finish_s <= limit_s]
    return Answers(len(in_limit), sum(in_limit), float(finish_s[wanted - 1]), float(finish_s[-1]))


def section(result: PromptsAtOnce) -> Section:
    """Return a row per method."""
    rows = tuple(
        (
            method,
            f"{answers.in_limit:,}",
            f"{answers.tokens_in_limit / LIMIT_S:,.0f}",
            figure_text(answers.wanted_s),
            f"{result.gain(method):.2f}",
            figure_text(answers.all_s),
        )
        for method, answers in result.answers.items()
    )
    heads = (
        "method",
        f"answers in {LIMIT_S:g} s",
        "their tokens/s",
        f"s to the first {result.wanted:,}",
        "times sooner than FCFS",
        "s to all",
    )
    note = f"Published: {PUBLISHED:g} times FCFS's throughput, for an unknown number of prompts and answers."
    return Section(f"synthetic data: {result.prompts:,} prompts at once", heads, rows, (note,))
