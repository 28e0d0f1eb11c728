"""Admission control: accept a request if its answer should meet the latency bound and no accepted one becomes late.

    start(k) + shared(s) <= (1 - MARGIN) * bound    and for each running sequence    now + shared(left) <= due

k is the request's place in the queue. start(k) is a table, computed a few times a second by continuing the engine's
present sequences in the event simulator. s is the output length that 99 of 100 requests stay below, limited by the
request's maximum; left is the remainder of such an s, given the tokens that a sequence has generated.

shared(l) is the time for l tokens on an engine that is shared until each sequence has its remaining tokens. The time
per token is t(n) for n sequences (`pace.py`). n counts the running sequences that haven't ended by then, but at least
as many as arrive meanwhile.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from xcore.requests.engine_protocol import Opened
from xcore.specs.workload import Array
from xserver.admission.arrival_rate import ArrivalRate
from xserver.admission.extent import Extent
from xserver.admission.lengths import QUANTILE, Lengths
from xserver.admission.pace import Pace
from xserver.admission.refusals import Demand, RecentRefusals, Refusal
from xserver.admission.retry_after import RetryAfter
from xserver.admission.tokenizer_queue import TokenizerQueue
from xserver.engines.engine_link import Output
from xserver.http.api_error import ApiError
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.continuation import Standing, continue_from

MARGIN = 0.04
"""Margin of predictions, as a share of the bound."""
LONG_SHARE = 0.1
"""Maximum share of running sequences with prompts longer than the schedule's workload."""
_CPU_SHARE = 0.04
"""Share of one CPU that computing the table may take."""
_LEAST_S = 0.1
"""Minimum time between two tables."""
_LOOK_S, _LOOKED_AT, _BEGUN = 0.25, 8, 4
"""Seconds after which the pace of this many running sequences is measured, of those with at least so many tokens."""


@dataclass(frozen=True)
class Promise:
    """The prediction when a request was accepted; times are seconds of the monotonic clock."""

    start_s: float
    finish_s: float
    """Predicted end of all `tokens`."""
    tokens: int
    """The output length that 99 of 100 requests stay below, limited by the request's maximum."""
    token_s: float
    """Predicted time per token."""
    long: bool = False
    """Whether the prompt is longer than the schedule's workload: outside the bound."""
    due_s: float = math.inf
    """The time by which the answer must come, less the margin; infinite outside the bound."""

    def end_s(self, tokens: int) -> float:
        """Return the predicted time of the given number of tokens."""
        return self.finish_s - (self.tokens - tokens) * self.token_s


@dataclass(frozen=True)
class StartTable:
    """The predicted start of a sequence at each place of the queue."""

    made_s: float
    starts_s: tuple[float, ...]
    """Seconds from `made_s`, by place."""
    gap_s: float | None
    """Seconds between the starts of later places; None if those are beyond the horizon."""
    first: int
    """Index of the next sequence, counting accepted ones: it is `accepted - first` places into the table."""


class Admission:
    """Admission control for one engine. `outputs` are its sequences, in order of arrival."""

    def __init__(
        self,
        opened: Opened,
        outputs: Callable[[], Sequence[Output]],
        max_waiting: int,
        now: Callable[[], float] = time.monotonic,
        usual_input: int = 0,
        lag_s: Callable[[], float] = lambda: 0.0,
    ):
        """Begin without requests. Prompts of at most `usual_input` tokens are under the bound in any case.

        Requests and answers wait for up to `lag_s` each until this process gets to them.
        """
        schedule = opened.schedule
        self.bound_s = schedule.latency_bound_s
        self._schedule, self._outputs, self._max_waiting, self._now = schedule, outputs, max_waiting, now
        self._lag_s = lag_s
        self._cost = ReplicaCost.of(schedule, opened.profile)
        self._lengths = Lengths(schedule.workload.output)
        self._inputs, self._outputs_p99 = schedule.workload.input, schedule.workload.output.quantile(QUANTILE)
        self.usual_input = max(usual_input, self._inputs.quantile(QUANTILE))
        """Input tokens up to which a request is under the bound."""
        self._pace = Pace(schedule, self._cost, opened.profile, now())
        self._arrivals = ArrivalRate(schedule.latency_bound_s or 1.0)
        self._retry, self._refusals = RetryAfter(schedule.latency_bound_s or 1.0), RecentRefusals()
        self._table = StartTable(now(), (), None, 0)
        self._accepted = 0
        self._computing = False
        self._next_s = self._next_look_s = 0.0

    @property
    def scale(self) -> float:
        """Ratio of measured to predicted time per token, recently and at the present load."""
        return self._pace.scale(len(self._outputs()))

    @property
    def _within_s(self) -> float:
        """Seconds within which an answer should be complete."""
        return (1 - MARGIN) * (self.bound_s or math.inf)

    @property
    def cycle_s(self) -> float:
        """Upper bound on the predicted time between two messages of a loaded engine: a prefill, or an iteration."""
        return self._pace.first_s(self._pace.most) + self._pace.token_s(self._pace.most)

    # ---- decisions ----

    def refuse_early(self, extent: Extent, arrived_s: float, tokenizing: TokenizerQueue) -> None:
        """Raise ApiError for a request that would be refused whatever its tokens are, before they are known.

        A request without a limit counts as one of the usual output.
        """
        now, most = self._now(), self._outputs_p99
        tokens = most if extent.most_output is None else min(most, extent.most_output)
        wait_s = tokenizing.wait_s
        if tokenizing.length >= self._max_waiting:
            why = f"{tokenizing.length} requests are already waiting to be tokenized."
            refusal = self._refusal(Demand(extent.sequences, tokens, False), "concurrency_limit", why, wait_s)
        elif wait_s and now + wait_s + self._pace.first_s(1) > arrived_s + self._within_s:
            why = f"The texts that wait to be tokenized take longer than the latency bound of {self.bound_s:g} s."
            refusal = self._refusal(Demand(extent.sequences, tokens, False), "latency_bound", why, wait_s)
        else:
            may_be_long = extent.most_input is None or extent.most_input > self.usual_input
            kinds = [False] * (extent.least_input <= self.usual_input) + [True] * may_be_long
            found = (self._refusals.find(Demand(extent.sequences, tokens, long), now) for long in kinds)
            known = [each for each in found if each]
            if len(known) < len(kinds) or not self._outputs():
                return
            refusal = known[0]
        self._arrivals.come(extent.sequences, now)
        raise self._refused(refusal)

    def admit(self, prompts: Sequence[tuple[int, int]], arrived_s: float) -> Promise:
        """Accept the sequences of one request that arrived at `arrived_s`, each (input tokens, maximum output tokens).

        Raises ApiError if its answer or an accepted one would come too late, or if too many sequences wait.
        """
        running, now = self._outputs(), self._now()
        self._arrivals.come(len(prompts), now)
        long, load = any(tokens > self.usual_input for tokens, _ in prompts), len(running) + len(prompts)
        most = min(self._outputs_p99, max(most for _, most in prompts))
        demand = Demand(len(prompts), most, long)
        if running and (known := self._refusals.find(demand, now)):
            raise self._refused(known)
        waiting = sum(1 for output in running if not output.tokens)
        if waiting + len(prompts) > self._max_waiting:
            self._refuse(demand, "concurrency_limit", f"{waiting} requests are already waiting.", 1.0)
        start = self._start_s(len(prompts)) if running else now
        left = self._left(running)
        shared = self._shared_s([*left, *([most - 1] * len(prompts))])
        service_s = self._pace.first_s(load) + float(shared[-1])
        finish = math.inf if start is None else start + service_s
        due = math.inf if self.bound_s is None or long else arrived_s + self._within_s - 2 * self._lag_s()
        late_s = self._late_s(running, left, shared + (waiting + len(prompts)) * self._pace.first_s(1))
        others = f"Some of {len(running)} running requests would then miss the bound of {self.bound_s or 0:g} s."
        if late_s:  # whatever its own bound is
            self._refusals.add(self._refusal(replace(demand, long=not long), "latency_bound", others, late_s))
        if running and finish > due:
            own_s = self._wait_s(most, load) if math.isinf(finish) else finish - due
            why = f"The answer would take longer than the latency bound of {self.bound_s:g} s."
            self._refuse(demand, "latency_bound", why, max(own_s, late_s))
        if late_s:
            self._refuse(demand, "latency_bound", others, late_s)
        if self.bound_s is not None and long:
            self._check_share(demand, running)
        self._accepted += len(prompts)
        self._retry.accepted(now)
        self._pace.shared_by(load, now)
        start = math.inf if start is None else start
        return Promise(start, finish, most, service_s / most, long, due)

    def _left(self, running: Sequence[Output]) -> list[int]:
        """Return how many further tokens of each running sequence 99 of 100 similar sequences stay below."""
        left = []
        for output in running:
            generated = len(output.tokens)
            most = min(output.request.max_tokens, self._outputs_p99)
            left.append(max(0, self._lengths.longest(generated, most) - generated))
        return left

    def _shared_s(self, left: Sequence[int]) -> Array:
        """Return the seconds until each of the sequences that share the engine has its tokens.

        The load falls as sequences end, but not below the load of new arrivals. These come at the recent rate, each for
        the mean of its service (Little's law).
        """
        tokens = np.array(left, dtype=np.float64)
        order = np.argsort(tokens, kind="stable")
        load = len(left)
        by_load_s = self._pace.tokens_s(load)
        coming = math.ceil(self._arrivals.rate(self._now()) * self._lengths.mean * by_load_s[-1])
        token_s = by_load_s[np.maximum(np.arange(load, 0, -1), min(load, coming)) - 1]
        seconds = np.empty(len(left))
        seconds[order] = np.cumsum(np.diff(tokens[order], prepend=0.0) * token_s)
        return seconds

    def _late_s(self, running: Sequence[Output], left: Sequence[int], shared: Array) -> float:
        """Return the seconds until the first of those has ended that one more sequence would make late; 0 if none is.

        Sequences that are late anyway don't count.
        """
        if self.bound_s is None:
            return 0.0
        now, alone_s = self._now(), self._pace.token_s(1)
        late = [
            seconds
            for output, tokens, seconds in zip(running, left, shared.tolist(), strict=False)
            if now + seconds > output.due_s >= now + tokens * alone_s
        ]
        return min(late, default=0.0)

    def _refusal(self, demand: Demand, code: str, why: str, room_s: float) -> Refusal:
        """Return the refusal of a demand that may be accepted after `room_s`."""
        now, load = self._now(), min(max(1, len(self._outputs())), self._pace.most)
        per_s = load / self._pace.service_s(round(self._lengths.mean), load)
        return Refusal(demand, code, why, now + room_s, per_s, now)

    def _refuse(self, demand: Demand, code: str, why: str, room_s: float) -> NoReturn:
        """Raise the error for a demand that may be accepted after `room_s`."""
        refusal = self._refusal(demand, code, why, room_s)
        self._refusals.add(refusal)
        raise self._refused(refusal)

    def _refused(self, refusal: Refusal) -> ApiError:
        """Count a refusal and return its error."""
        now = self._now()
        return refusal.error(self._retry.refused(refusal.until_s - now, now, refusal.per_s))

    def _wait_s(self, most: int, load: int) -> float:
        """Return the seconds until few enough sequences share the engine for such a request to be in time."""
        ending = load - self._pace.load_within(self._within_s, most)
        return max(1, ending) * self._pace.service_s(round(self._lengths.mean), load) / load

    def _check_share(self, demand: Demand, running: Sequence[Output]) -> None:
        """Raise ApiError if too many requests with longer prompts than the schedule's workload are running."""
        long = sum(1 for output in running if len(output.request.prompt_ids) > self.usual_input)
        residents = self._schedule.control.of_kind("residents") or len(running)
        if long + 1 > max(1, LONG_SHARE * residents):
            why = (
                f"Few requests of more than {self.usual_input:,} input tokens may run at once, and {long} are running."
            )
            self._refuse(demand, "latency_bound", why, 2 * self._pace.service_s(self._outputs_p99, len(running)))

    def _start_s(self, count: int) -> float | None:
        """Return when the last of `count` more sequences starts; None if that is beyond the table."""
        table, place = self._table, self._accepted + count - 1 - self._table.first
        if not table.starts_s:
            return self._now()
        beyond = place - len(table.starts_s) + 1
        if beyond > 0 and table.gap_s is None:
            return None
        start = table.starts_s[min(place, len(table.starts_s) - 1)] + max(0, beyond) * (table.gap_s or 0.0)
        return max(self._now(), table.made_s + self.scale * start)

    # ---- measurements ----

    def ended(self, output: Output) -> None:
        """Learn from a sequence that has ended."""
        self._refusals.clear()
        self._retry.ended(self._now())
        self._pace.shared_by(len(self._outputs()), self._now())
        self._learn(output)

    def _learn(self, output: Output) -> None:
        """Learn the pace from the tokens that a sequence has so far."""
        if len(output.request.prompt_ids) <= self.usual_input and output.first_s is not None:
            self._pace.served(len(output.tokens), output.first_s, output.last_s)

    def _look(self, now: float) -> None:
        """Learn the pace from some of the running sequences: it may have changed since those that end have begun."""
        if now < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_S
        begun = [output for output in self._outputs() if len(output.tokens) >= _BEGUN]
        for output in begun[:: -(-len(begun) // _LOOKED_AT) or 1]:
            self._learn(output)

    async def update(self) -> None:
        """Compute a new table if it is due; called after each message of the engine."""
        now = self._now()
        self._refusals.clear()
        self._pace.shared_by(len(self._outputs()), now)
        self._look(now)
        if self._computing or now < self._next_s or self.bound_s is None:
            return
        self._computing = True
        standing, accepted = self._standing(), self._accepted
        try:
            starts, gap = await asyncio.to_thread(self._starts, standing)
        finally:
            self._computing = False
        waiting = sum(1 for row in standing if not row.generated)
        self._table = StartTable(now, starts, gap, accepted - waiting)
        self._refusals.clear()
        took = self._now() - now
        self._next_s = self._now() + max(_LEAST_S, took / _CPU_SHARE)

    def _standing(self) -> list[Standing]:
        """Return the engine's sequences, in order of arrival."""
        rows = []
        for output in self._outputs():
            request, generated = output.request, len(output.tokens)
            ends = self._lengths.supposed(int(request.id), generated, request.max_tokens)
            rows.append(Standing(len(request.prompt_ids), request.max_tokens, ends, generated))
        return rows

    def _starts(self, standing: list[Standing]) -> tuple[tuple[float, ...], float | None]:
        """Return the seconds until each place of the queue that could still be in time starts, and the gap after these.

        Replicas take turns, so only one is simulated.
        """
        assert self.bound_s is not None
        replicas = self._schedule.replicas
        running = [row for row in standing if row.generated][::replicas]
        waiting = [row for row in standing if not row.generated][::replicas]
        residents = self._schedule.control.of_kind("residents") or 64
        typical, capacity = round(self._inputs.mean), self._schedule.kv_blocks * self._schedule.block_size
        most = max(1, min(self._outputs_p99, capacity - typical))
        count = max(16, len(running), residents)
        beyond = [Standing(typical, most, self._lengths.supposed(n, 0, most)) for n in range(count)]
        after = continue_from(self._schedule, self._cost, [*running, *waiting, *beyond], self.bound_s)
        starts = [c.start_s for c in after[len(running) :] if c.start_s is not None]
        ordered = np.maximum.accumulate(starts) if starts else np.zeros(0)
        whole = len(starts) == len(waiting) + len(beyond)
        gap = float(ordered[-1] - ordered[len(waiting)]) / (len(beyond) - 1) / replicas if whole else None
        return tuple(np.repeat(ordered, replicas).tolist()), gap
