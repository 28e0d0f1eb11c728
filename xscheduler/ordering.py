"""Choose the order that a run follows, and compute the hints that the order needs."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xcore.applications.demand import ApplicationDemand, ServiceRates
from xcore.applications.demand_graph import read_demand_graphs
from xcore.applications.warming import KNOB, WARMING, make_warming
from xcore.batching import Hints, Order, Preemption
from xcore.choices import check_choice
from xcore.errors import InputError
from xcore.orders import ORDERS, OrderKind, StarvationGuard, make_order
from xcore.orders.noise import noisy_scores
from xcore.orders.ranked_demands import RankedDemands
from xcore.orders.ranker import Ranker
from xcore.orders.warmed import Warmed
from xcore.policies.from_schedule import check_preemption
from xcore.requests.request import Request
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xcore.traces.labels import Labels
from xcore.traces.trace import LABELS
from xsimulator.cost.batch_one_latency import batch_one_times
from xsimulator.cost.cost_model import ReplicaCost

if TYPE_CHECKING:
    from tokenizers import Tokenizer


USUAL_TAU = 0.55
"""Kendall's tau of vLLM-LTR's ranker on ShareGPT."""
PREEMPT = ("none", "recompute", "swap")
"""How running requests give way to waiting ones that come before them."""
SWAP_BYTES = 4 << 30
"""Usual limit of a device's keys and values on the host (vLLM's `--swap-space`)."""
SERVED = ("fcfs", "mlfq", "learned", "doubling-budget", "gittins", "demand-slack")
"""Orders that need only the prompt, its labels and the schedule."""


@dataclass(frozen=True)
class OrderChoice:
    """The order that `--order` and its related options select; names are checked."""

    name: str = "fcfs"
    guarded: bool = False
    ranker: Path | None = None
    tau: float | None = None
    """Kendall's tau of a simulated ranker."""
    graphs: Path | None = None
    """The file of the applications' demand graphs, for an order that ranks them, and for prewarming."""
    warm: str = "lru"
    """The policy by which cached prefixes are kept, one of `WARMING`."""
    knob: float = KNOB
    """K of prewarming."""
    preempt: str = "none"
    """How running requests give way to waiting ones, one of `PREEMPT`."""
    swap_blocks: int | None = None
    """Most KV blocks that swapped requests have on the host, for each device; None: the usual number."""

    @staticmethod
    def of(
        order: str | None,
        guarded: bool,
        ranker: Path | None = None,
        tau: float | None = None,
        graphs: Path | None = None,
        warm: str | None = None,
        knob: float | None = None,
        preempt: str | None = None,
        swap_blocks: int | None = None,
    ) -> "OrderChoice":
        """Return the choice for the options' values.

        Raises InputError for an unknown order, or for options that the order doesn't use, or lacks.
        """
        name = order or "fcfs"
        check_choice(name, tuple(ORDERS), "--order")
        check_choice(warm or "lru", WARMING, "--warm-prefixes")
        learned = (("--ranker", ranker), ("--ranker-tau", tau))
        for option, value in learned if name != "learned" else ():
            if value is not None:
                raise InputError(
                    f"{option} {value} is only for --order learned, but the order is {name}: leave it out."
                )
        _check_graphs(name, graphs, warm)
        if knob is not None and warm != "prewarm":
            raise InputError(f"--knob {knob:g} is only for --warm-prefixes prewarm: leave it out.")
        _check_preempt(name, preempt or "none", swap_blocks)
        warming = warm or "lru", KNOB if knob is None else knob
        return OrderChoice(name, guarded, ranker, tau, graphs, *warming, preempt or "none", swap_blocks)

    @property
    def kind(self) -> OrderKind:
        """The order's entry in the registry."""
        return ORDERS[self.name]

    @property
    def plain(self) -> bool:
        """Whether this is the default order of a run."""
        return not self.options

    @property
    def options(self) -> tuple[str, ...]:
        """The options that differ from the default order."""
        differs = {
            "--order": self.name != "fcfs",
            "--starvation-guard": self.guarded,
            "--warm-prefixes": self.warm != "lru",
            "--preempt": self.preempt != "none",
        }
        return tuple(option for option, chosen in differs.items() if chosen)

    def preemption(self, schedule: Schedule) -> Preemption | None:
        """Return how a schedule's running requests give way to waiting ones; None: they don't.

        Raises InputError if its policy or its model doesn't let them.
        """
        if self.preempt == "none":
            return None
        check_preemption(schedule)
        if self.preempt == "recompute":
            return Preemption()
        return Preemption(self.swap_blocks or usual_swap_blocks(schedule))

    def make(self, schedule: Schedule, profile: Profile) -> Order:
        """Make the order for the engine of a schedule; applications' demands are in its seconds alone.

        Raises InputError for a file of demand graphs that can't be read, and for prefixes that aren't cached.
        """
        demands = application_demands(self.graphs, schedule, profile) if self.graphs else RankedDemands({})
        order = make_order(self.name, demands=demands)
        if self.warm != "lru":
            if not schedule.prefix_caching:
                raise InputError(f"--warm-prefixes {self.warm} needs a schedule with prefix caching: leave it out.")
            order = Warmed(order, lambda warmth: make_warming(self.warm, warmth, demands.models, self.knob))
        return StarvationGuard(order) if self.guarded else order

    def check_units(self, labels: Iterable[Labels]) -> None:
        """Raise InputError unless the demand graphs have the application and the unit of each request's labels."""
        if self.graphs is None:
            return
        units = {graph.application: {step.name for step in graph.units} for graph in read_demand_graphs(self.graphs)}
        for own in labels:
            application, unit = own.application, own.unit
            if application is None or unit is None:
                continue
            if application not in units:
                raise InputError(f"'{self.graphs}' has no application '{application}': it has {', '.join(units)}.")
            if unit not in units[application]:
                known = ", ".join(sorted(units[application]))
                raise InputError(f"'{self.graphs}' has no unit '{unit}' of '{application}': it has {known}.")


def usual_swap_blocks(schedule: Schedule) -> int:
    """Return how many KV blocks are swapped unless the user says: as many as the cache has, up to `SWAP_BYTES`."""
    spec = schedule.model.spec
    layers = [(stage, stop - start) for stage in schedule.stages for start, stop in [stage.decoder_layers or (0, 0)]]
    token_bytes = max(count * spec.kv_bytes(stage.tp, schedule.kv_dtype) for stage, count in layers)
    return max(1, min(schedule.kv_blocks, SWAP_BYTES // (token_bytes * schedule.block_size)))


def _check_preempt(order: str, preempt: str, swap_blocks: int | None) -> None:
    """Raise InputError for a way of giving way that is unknown, or that the order can't decide."""
    check_choice(preempt, PREEMPT, "--preempt")
    if preempt != "none" and not ORDERS[order].ranks_running:
        ranking = ", ".join(kind.name for kind in ORDERS.values() if kind.ranks_running)
        raise InputError(
            f"--preempt {preempt} needs an order that ranks running requests too, but the order is {order}: use one of "
            f"{ranking}, or leave --preempt out."
        )
    if swap_blocks is not None and preempt != "swap":
        raise InputError(f"--swap-blocks {swap_blocks} is only for --preempt swap: leave it out.")


def _check_graphs(order: str, graphs: Path | None, warm: str | None) -> None:
    """Raise InputError for demand graphs that are missing, or that nothing uses."""
    user = f"--order {order}" if ORDERS[order].ranked else "--warm-prefixes prewarm" if warm == "prewarm" else None
    if graphs is None and user:
        raise InputError(f"{user} needs --graphs FILE: learn demand graphs with `exegpt graphs learn`.")
    if graphs is not None and user is None:
        ranking = ", ".join(kind.name for kind in ORDERS.values() if kind.ranked)
        raise InputError(
            f"--graphs {graphs} is only for --order {ranking}, but the order is {order}: leave it out, or pass "
            "--warm-prefixes prewarm."
        )


def application_demands(graphs: Path, schedule: Schedule, profile: Profile) -> RankedDemands:
    """Return the demands of the applications of a file, in seconds alone on a replica of the schedule."""
    rates = service_rates(schedule, profile)
    return RankedDemands({graph.application: ApplicationDemand(graph, rates) for graph in read_demand_graphs(graphs)})


def service_rates(schedule: Schedule, profile: Profile) -> ServiceRates:
    """Return the seconds that a prompt's and an output's token take alone, for the schedule's mean lengths."""
    workload = schedule.workload
    mean_output = max(2.0, workload.output.mean)
    solo = batch_one_times(ReplicaCost.of(schedule, profile), [workload.input.mean], [mean_output])
    prefill_s = float(solo.prefill[0])
    return ServiceRates(prefill_s / workload.input.mean, (float(solo.total[0]) - prefill_s) / (mean_output - 1))


def times_hints(
    hints: Sequence[Hints], lengths: Sequence[RequestLengths], schedule: Schedule, profile: Profile, known: bool
) -> list[Hints]:
    """Add to the hints the times that requests take alone.

    Each hint gets the mean of all requests, and its request's own time if outputs are `known`.
    """
    cost = ReplicaCost.of(schedule, profile)
    solo = batch_one_times(cost, [row.input for row in lengths], [row.output for row in lengths])
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
    labels: Sequence[Labels],
    lengths: Sequence[RequestLengths],
    schedule: Schedule,
    profile: Profile,
    seed: int = 0,
) -> list[Hints]:
    """Return hints for a trace's requests, by its columns other than lengths; a learned order's ranker is simulated."""
    choice.check_units(labels)
    hints = labelled(labels, [row.arrival_s for row in lengths])
    hints = times_hints(hints, lengths, schedule, profile, known=True)
    if choice.name == "learned":
        scores = noisy_scores([row.output for row in lengths], choice.tau or USUAL_TAU, seed)
        hints = [replace(own, score=float(score)) for own, score in zip(hints, scores, strict=True)]
    choice.kind.check(hints)
    return hints


def labelled(labels: Sequence[Labels], arrivals: Sequence[float]) -> list[Hints]:
    """Return hints of clients, applications and deadlines (seconds after arrival), where a request has them."""
    first: dict[Hashable, float] = {}
    # Without runs, an application is one.
    runs = [(None if own.run is None else own.client, own.application, own.run) for own in labels]
    for run, arrival, own in zip(runs, arrivals, labels, strict=True):
        if own.after_s is None or run not in first:
            first[run] = min(arrival, first.get(run, inf))
    return [
        Hints(
            application=own.application,
            run=own.run,
            unit=own.unit,
            application_arrival_s=first[run] if own.application is not None else arrival,
            client=own.client,
            deadline_s=None if own.deadline_s is None else arrival + own.deadline_s,
        )
        for own, run, arrival in zip(labels, runs, arrivals, strict=True)
    ]


def request_hints(
    choice: OrderChoice,
    requests: Sequence[Request],
    schedule: Schedule,
    profile: Profile,
    tokenizer: "Tokenizer | None",
) -> dict[str, Hints]:
    """Return hints by id for requests that a run executes.

    An output's length is known if only `max_tokens` ends it.
    """
    lengths = [request.lengths for request in requests]
    hints = labelled([own.labels for own in requests], [own.arrival_s for own in lengths])
    hints = times_hints(hints, lengths, schedule, profile, all(map(_known, requests)))
    if choice.name == "learned":
        scores = prompt_scores(find_ranker(choice), requests, tokenizer)
        hints = [replace(own, score=score) for own, score in zip(hints, scores, strict=True)]
    choice.kind.check(hints)
    return {request.id: own for request, own in zip(requests, hints, strict=True)}


def _known(request: Request) -> bool:
    """Return whether the output has exactly `max_tokens` tokens in any case."""
    return request.ignore_eos and not request.stop_token_ids and request.grammar is None


def check_known(choice: OrderChoice, requests: Sequence[Request]) -> None:
    """Raise InputError if the order needs unknown lengths, labels that a request lacks, or a missing ranker."""
    for name in set(LABELS) & set(choice.kind.needs):
        lacking = next((request for request in requests if getattr(request, name) is None), None)
        if lacking:
            raise InputError(
                f"--order {choice.name} needs {name} of each request, but request '{lacking.id}' has none: choose "
                "another order."
            )
    choice.check_units(own.labels for own in requests)
    known = [_known(request) for request in requests]
    if choice.kind.oracle and not all(known):
        unknown = requests[known.index(False)]
        raise InputError(
            f"--order {choice.name} needs the length of each output before the run, but request '{unknown.id}' may "
            "end at any token: choose another order, or set ignore_eos for all requests."
        )
    if choice.name == "learned":
        find_ranker(choice)


def find_ranker(choice: OrderChoice) -> Ranker:
    """Load the ranker of a learned order; InputError if the user named none."""
    if choice.ranker is None:
        raise InputError("--order learned needs --ranker FILE: train one with `exegpt rank train`.")
    return Ranker.load(choice.ranker)


def prompt_scores(ranker: Ranker, requests: Sequence[Request], tokenizer: "Tokenizer | None") -> list[float]:
    """Return each request's score by the text of its prompt; InputError if the model has no tokenizer to decode it."""
    if tokenizer is None:
        raise InputError(
            "--order learned reads prompts as text, but the model has no tokenizer.json: choose another order."
        )
    prompts = [tokenizer.decode(list(request.prompt_ids)) for request in requests]
    return np.asarray(ranker.scores(prompts), dtype=np.float64).tolist() if prompts else []


def check_served(choice: OrderChoice, latency_bound_s: float | None) -> None:
    """Raise InputError for an order that a server can't follow.

    A server knows only the prompts. With a latency bound, requests give way in the queue only (`Promised`).
    """
    if choice.plain:
        return
    if choice.name not in SERVED:
        raise InputError(
            f"--order {choice.name} needs request data that a server does not receive: use one of {', '.join(SERVED)}."
        )
    if latency_bound_s not in (None, inf) and (choice.warm != "lru" or choice.preempt != "none"):
        raise InputError(
            "A server with a latency bound counts on running requests and on pinned prefixes to stay: leave out "
            "--latency-bound, or --preempt and --warm-prefixes."
        )
    if choice.name == "learned":
        find_ranker(choice)
    if choice.graphs:
        read_demand_graphs(choice.graphs)


def served_hints(
    choice: OrderChoice, schedule: Schedule, profile: Profile, tokenizer: "Tokenizer | None", clock: Callable[[], float]
) -> Callable[[Request], Hints]:
    """Return the function that gives a server's requests their hints, as they arrive by the `clock`.

    The service times in the hints are for the schedule's mean lengths.
    """
    cost, workload = ReplicaCost.of(schedule, profile), schedule.workload
    mean_s = float(batch_one_times(cost, [workload.input.mean], [workload.output.mean]).total[0])
    ranker = find_ranker(choice) if choice.name == "learned" else None
    if ranker:
        prompt_scores(ranker, (), tokenizer)  # refuse a model without a tokenizer before any request arrives

    def hints(request: Request) -> Hints:
        prefill_s = float(batch_one_times(cost, [len(request.prompt_ids)], [1]).prefill[0])
        score = prompt_scores(ranker, [request], tokenizer)[0] if ranker else None
        (where_from,) = labelled([request.labels], [clock()])
        timed = replace(where_from, prefill_s=prefill_s, service_time_s=mean_s, slack_s=request.slack_s)
        return replace(timed, score=score)

    return hints
