"""Which order a run follows, and the hints that it needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from xcore.batching import Hints, Order
from xcore.choices import check_choice
from xcore.errors import InputError
from xcore.orders import ORDERS, OrderKind, make_order
from xcore.orders.noise import noisy_scores
from xcore.orders.ranker import Ranker
from xcore.requests.request import Request
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xsimulator.cost.replica import ReplicaCost
from xsimulator.cost.solo import solo_times

USUAL_TAU = 0.55
"""Kendall's tau of vLLM-LTR's ranker on ShareGPT."""
SERVED = ("fcfs", "mlfq", "learned", "doubling-budget")
"""Orders that ask for no more than a prompt and the schedule."""

_LABELS = ("client", "application", "deadline_s")
"""What requests, and traces, say of whose they are."""


@dataclass(frozen=True)
class OrderChoice:
    """What `--order` and its companions ask for; names are checked."""

    name: str = "fcfs"
    guarded: bool = False
    ranker: Path | None = None
    tau: float | None = None
    """Of a ranker that is simulated."""

    @staticmethod
    def of(order: str | None, guarded: bool, ranker: Path | None = None, tau: float | None = None) -> "OrderChoice":
        """As typed; InputError for an unknown order, or a ranker for one that asks none."""
        name = order or "fcfs"
        check_choice(name, tuple(ORDERS), "--order")
        for option, value in (("--ranker", ranker), ("--ranker-tau", tau)):
            if value is not None and name != "learned":
                raise InputError(f"{option} {value} is for --order learned, and the order is {name}: leave it out.")
        return OrderChoice(name, guarded, ranker, tau)

    @property
    def kind(self) -> OrderKind:
        """Its entry in the registry."""
        return ORDERS[self.name]

    @property
    def plain(self) -> bool:
        """Whether it is what a run follows by itself."""
        return self.name == "fcfs" and not self.guarded

    def make(self) -> Order:
        """The order itself."""
        return make_order(self.name, self.guarded)


def times_hints(
    hints: Sequence[Hints], lengths: Sequence[RequestLengths], schedule: Schedule, profile: Profile, known: bool
) -> list[Hints]:
    """The hints with what requests take alone: each one's own where outputs are `known`, and the mean of all."""
    cost = ReplicaCost.of(schedule, profile)
    solo = solo_times(cost, [row.input for row in lengths], [row.output for row in lengths])
    mean, deviation = float(solo.total.mean()), float(solo.total.std())
    return [
        replace(
            own,
            prefill_s=float(prefill),
            time_s=float(total) if known else None,
            output_tokens=row.output if known else None,
            service_time_s=mean,
            service_sd_s=deviation,
        )
        for own, row, prefill, total in zip(hints, lengths, solo.prefill, solo.total, strict=True)
    ]


def trace_hints(
    choice: OrderChoice,
    labels: Sequence[dict[str, Any]],
    lengths: Sequence[RequestLengths],
    schedule: Schedule,
    profile: Profile,
    seed: int = 0,
) -> list[Hints]:
    """Hints for a trace's requests, by its columns beside lengths; a learned order's ranker is simulated."""
    hints = labelled(labels, [row.arrival_s for row in lengths])
    hints = times_hints(hints, lengths, schedule, profile, known=True)
    if choice.name == "learned":
        scores = noisy_scores([row.output for row in lengths], choice.tau or USUAL_TAU, seed)
        hints = [replace(own, score=float(score)) for own, score in zip(hints, scores, strict=True)]
    choice.kind.check(hints)
    return hints


def labelled(labels: Sequence[dict[str, Any]], arrivals: Sequence[float]) -> list[Hints]:
    """Hints of clients, applications and deadlines (seconds after arrival), as far as each request has them."""
    first: dict[str, float] = {}
    for own, arrival in zip(labels, arrivals, strict=True):
        if "application" in own:
            first[own["application"]] = min(arrival, first.get(own["application"], inf))
    return [
        Hints(
            application=own.get("application"),
            application_arrival_s=first.get(own.get("application", ""), arrival),
            client=own.get("client"),
            deadline_s=arrival + own["deadline_s"] if "deadline_s" in own else None,
        )
        for own, arrival in zip(labels, arrivals, strict=True)
    ]


def request_hints(
    choice: OrderChoice, requests: Sequence[Request], schedule: Schedule, profile: Profile, tokenizer: Any
) -> dict[str, Hints]:
    """Hints for requests that are run, by id. An output's length is known where nothing but `max_tokens` ends it."""
    lengths = [request.lengths for request in requests]
    labels = [{name: getattr(own, name) for name in _LABELS if getattr(own, name) is not None} for own in requests]
    hints = labelled(labels, [own.arrival_s for own in lengths])
    hints = times_hints(hints, lengths, schedule, profile, all(map(_known, requests)))
    if choice.name == "learned":
        scores = prompt_scores(find_ranker(choice), requests, tokenizer)
        hints = [replace(own, score=score) for own, score in zip(hints, scores, strict=True)]
    choice.kind.check(hints)
    return {request.id: own for request, own in zip(requests, hints, strict=True)}


def _known(request: Request) -> bool:
    """Whether its output has `max_tokens`, whatever comes."""
    return request.ignore_eos and not request.stop_token_ids and request.grammar is None


def check_known(choice: OrderChoice, requests: Sequence[Request]) -> None:
    """InputError where the order needs lengths that nobody knows, labels, or a ranker that isn't there."""
    for name in set(_LABELS) & set(choice.kind.needs):
        lacking = next((request for request in requests if getattr(request, name) is None), None)
        if lacking:
            raise InputError(
                f"--order {choice.name} needs {name} of each request, which request '{lacking.id}' lacks: choose "
                "another order."
            )
    known = [_known(request) for request in requests]
    if choice.kind.oracle and not all(known):
        unknown = requests[known.index(False)]
        raise InputError(
            f"--order {choice.name} needs the length of each output before the run, and request '{unknown.id}' may "
            "end at any token: choose another order, or give every request ignore_eos."
        )
    if choice.name == "learned":
        find_ranker(choice)


def find_ranker(choice: OrderChoice) -> Ranker:
    """The ranker of a learned order; InputError where none was named."""
    if choice.ranker is None:
        raise InputError("--order learned needs --ranker FILE: train one with `exegpt rank train`.")
    return Ranker.load(choice.ranker)


def prompt_scores(ranker: Ranker, requests: Sequence[Request], tokenizer: Any) -> list[float]:
    """Each request's score by the text of its prompt; InputError where a model has no tokenizer to read it with."""
    if tokenizer is None:
        raise InputError("--order learned reads prompts as text, and the model has no tokenizer.json: choose another.")
    prompts = [tokenizer.decode(list(request.prompt_ids)) for request in requests]
    return np.asarray(ranker.scores(prompts), dtype=np.float64).tolist() if prompts else []


def check_served(choice: OrderChoice, latency_bound_s: float | None) -> None:
    """InputError for an order that a server can't follow: it knows prompts alone, and its bound goes by arrivals."""
    if choice.plain:
        return
    if choice.name not in SERVED:
        raise InputError(
            f"--order {choice.name} needs what a server isn't told of its requests: use one of {', '.join(SERVED)}."
        )
    if latency_bound_s not in (None, inf):
        raise InputError(
            "A server accepts requests that are in time in order of arrival: leave --latency-bound, or --order and "
            "--starvation-guard, out."
        )
    if choice.name == "learned":
        find_ranker(choice)


def served_hints(
    choice: OrderChoice, schedule: Schedule, profile: Profile, tokenizer: Any
) -> Callable[[Request], Hints]:
    """What gives a server's requests their hints. Their service's times are those of the schedule's mean lengths."""
    cost, workload = ReplicaCost.of(schedule, profile), schedule.workload
    mean_s = float(solo_times(cost, [workload.input.mean], [workload.output.mean]).total[0])
    ranker = find_ranker(choice) if choice.name == "learned" else None
    if ranker:
        prompt_scores(ranker, (), tokenizer)  # a model without a tokenizer is refused before any request comes

    def hints(request: Request) -> Hints:
        prefill_s = float(solo_times(cost, [len(request.prompt_ids)], [1]).prefill[0])
        score = prompt_scores(ranker, [request], tokenizer)[0] if ranker else None
        return Hints(score=score, prefill_s=prefill_s, service_time_s=mean_s)

    return hints
