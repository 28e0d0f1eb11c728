"""Admission control: a request is accepted only if its answer will be there within the latency bound.

    start(k) + service(input, s) <= (1 - MARGIN) * bound

k is the request's place in the queue, and start(k) a table, made a few times a second by continuing the engine's
present sequences in the event simulator; s is the output length that 99 of 100 requests stay below. Running sequences
end as the schedule's lengths say, given what they have generated. Both sides of measured against predicted service
scale what is predicted next.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

import xsimulator
from exegpt.engine_protocol import Opened
from exegpt.policies import traits_of
from exegpt.schedule import Schedule
from exegpt.server.engine_link import Output
from exegpt.server.errors import RATE_LIMIT, ApiError
from exegpt.workload import LengthDistribution
from xsimulator.cost.replica import ReplicaCost
from xsimulator.replay.continuation import Standing, continue_from

MARGIN = 0.04
"""Share of the bound that predictions leave."""
QUANTILE = 0.99
"""Of the output lengths for which the bound is promised."""
LONG_SHARE = 0.1
"""Of the residents that may be longer than the schedule was found for."""
_CPU_SHARE = 0.04
"""Of one CPU that the table may take."""
_LEAST_S = 0.1
"""Between two tables."""
_GOLDEN = (math.sqrt(5) - 1) / 2
_MEMORY = 0.05
"""Weight of the latest measured service in the running scale."""
_FULL = 0.8
"""Share of the sequences that the engine may have from which on it counts as loaded."""
_SCALES = 0.5, 3.0
"""Least and greatest scale: a machine that differs more has another schedule."""


@dataclass(frozen=True)
class Promise:
    """What was predicted when a request was accepted; seconds by the monotonic clock."""

    accepted_s: float
    start_s: float
    finish_s: float
    """At the 99th percentile of the output length."""
    long: bool = False
    """Longer than the schedule was found for: outside the bound."""


@dataclass(frozen=True)
class Table:
    """When sequences at each place of the queue start."""

    made_s: float
    starts_s: tuple[float, ...]
    """Seconds from `made_s`, by place."""
    gap_s: float | None
    """Between the starts of places beyond; None where those are beyond the horizon."""
    first: int
    """The place of the next sequence, counting accepted ones: it is `accepted - first` places into the table."""


class Lengths:
    """The outputs' lengths, given what sequences have generated."""

    def __init__(self, outputs: LengthDistribution):
        self._s, self._above = outputs.s, np.concatenate([[1.0], 1.0 - np.cumsum(outputs.p)])
        self.mean = outputs.mean

    def supposed(self, number: int, generated: int, most: int) -> int:
        """A sequence's output tokens: the same quantile each time, spread evenly over sequences, of the lengths beyond
        what it has generated.
        """
        first = int(np.searchsorted(self._s, generated, side="right"))
        left = self._above[first] if first < len(self._s) else 0.0
        if left <= 1e-9:  # longer than any: about half as much again of the mean
            return min(most, generated + max(1, round(self.mean / 2)))
        u = (number * _GOLDEN) % 1.0
        place = int(np.searchsorted(-self._above[1:], -left * (1.0 - u), side="left"))
        return min(most, max(generated + 1, int(self._s[min(place, len(self._s) - 1)])))


class Admission:
    """Decides for one engine. `outputs` are the sequences that it has, in order of arrival."""

    def __init__(
        self,
        opened: Opened,
        outputs: Callable[[], Sequence[Output]],
        max_waiting: int,
        now: Callable[[], float] = time.monotonic,
    ):
        schedule = opened.schedule
        self.bound_s = schedule.latency_bound_s
        self.scale = 1.0
        """Measured over predicted service, lately."""
        self._schedule, self._outputs, self._max_waiting, self._now = schedule, outputs, max_waiting, now
        self._cost = ReplicaCost.of(schedule, opened.profile)
        self._lengths = Lengths(schedule.workload.output)
        self._inputs, self._outputs_p99 = schedule.workload.input, schedule.workload.output.quantile(QUANTILE)
        self._input_p99 = self._inputs.quantile(QUANTILE)
        self._profile = opened.profile
        self._points: dict[int, tuple[float, float, int | None]] = {}
        self._operate()
        self._table = Table(now(), (), None, 0)
        self._accepted = 0
        self._computing = False
        self._next_s = 0.0

    def _operate(self) -> None:
        """Set the load up to which answers are in time, as measured lately. A schedule for a rate may allow more
        residents than it ever has at that rate, and with all of them none would be in time.
        """
        step = max(1, math.ceil(20 * self.scale))
        if step not in self._points:
            self._points[step] = self._point(step / 20)
        self._first_s, self._token_s, self._most = self._points[step]

    def _point(self, scale: float) -> tuple[float, float, int | None]:
        """Seconds from the start to the first token and per further token at the highest load at which the 99th
        percentile of the output length is in time, and how many sequences the engine then has; None: as many as it may.
        """
        low, high = 1, self._schedule.max_num_seqs or self._schedule.encode_batch or 1
        most = high
        while low < high:
            middle = (low + high + 1) // 2
            first, token, _ = self._steady(self._filled(middle))
            late = self.bound_s is not None and scale * (first + (self._outputs_p99 - 1) * token) > self._within_s
            low, high = (low, middle - 1) if late else (middle, high)
        first, token, residents = self._steady(self._filled(low))
        return first, token, None if low == most else max(1, round(residents))

    def _filled(self, batch: int) -> Schedule:
        """The schedule with so many residents at most, or prompts at a time where that is what it has."""
        if self._schedule.max_num_seqs:
            return replace(self._schedule, max_num_seqs=batch)
        return replace(self._schedule, encode_batch=batch)

    def _steady(self, schedule: Schedule) -> tuple[float, float, float]:
        """Seconds from the start to the first token, and per further token, of an engine that a schedule fills; and how
        many sequences that are (Little's law).
        """
        mean = self._lengths.mean
        if xsimulator.has_steady_state(schedule):
            estimate = xsimulator.estimate(schedule, self._profile)
            if estimate.tpot_s is not None and estimate.ttft_s is not None:
                residents = estimate.throughput_seq_s * (estimate.ttft_s + (mean - 1) * estimate.tpot_s)
                return estimate.ttft_s, estimate.tpot_s, residents
        tokens = max(2, round(mean))
        standing = [Standing(round(self._inputs.mean), tokens, tokens)] * 64
        ran = continue_from(schedule, self._cost, standing, math.inf)
        served_s = [(c.finish_s or 0.0) - (c.start_s or 0.0) for c in ran]
        per_token = median(served_s) / tokens
        return per_token, per_token, sum(served_s) / max(c.finish_s or 0.0 for c in ran)

    @property
    def _within_s(self) -> float:
        """Seconds in which an answer should be there."""
        return (1 - MARGIN) * (self.bound_s or math.inf)

    @property
    def cycle_s(self) -> float:
        """The predicted time between two messages of a loaded engine, at most: a prefill, or an iteration."""
        return self._first_s + self._token_s

    # ---- deciding ----

    def admit(self, prompts: Sequence[tuple[int, int]], arrived_s: float) -> Promise:
        """Accept sequences of one request, (input tokens, most output tokens) each, that arrived at `arrived_s`;
        ApiError where their answer would come too late, or too many wait.
        """
        running = self._outputs()
        waiting = sum(1 for output in running if not output.tokens)
        if waiting + len(prompts) > self._max_waiting:
            raise _rejected("concurrency_limit", f"{waiting} requests wait already.", 1.0)
        long = any(tokens > self._input_p99 for tokens, _ in prompts)
        if self._most is not None and running and len(running) + len(prompts) > self._most:
            why = f"With {len(running)} others, the answers would not be there within {self.bound_s:g} s."
            raise _rejected("latency_bound", why, self._service_s(round(self._lengths.mean)) / self._most)
        start = self._start_s(len(prompts)) if running else self._now()
        finish = math.inf if start is None else start + max(self._service_s(most) for _, most in prompts)
        if self.bound_s is not None and running and not long and finish > arrived_s + self._within_s:
            late = self.bound_s if math.isinf(finish) else finish - arrived_s - self._within_s
            why = f"The answer would not be there within the latency bound of {self.bound_s:g} s."
            raise _rejected("latency_bound", why, late)
        if self.bound_s is not None and long:
            self._check_share(running)
        self._accepted += len(prompts)
        return Promise(arrived_s, start if start is not None else math.inf, finish, long)

    def _check_share(self, running: Sequence[Output]) -> None:
        """ApiError where too many requests run already that the schedule wasn't found for."""
        long = sum(1 for output in running if len(output.request.prompt_ids) > self._input_p99)
        residents = traits_of(self._schedule).value(self._schedule, "residents") or len(running)
        if long + 1 > max(1, LONG_SHARE * residents):
            why = f"Requests of more than {self._input_p99:,} input tokens are limited, and {long} run already."
            raise _rejected("latency_bound", why, 2 * self._service_s(10**9))

    def _start_s(self, count: int) -> float | None:
        """When the last of `count` more sequences starts; None where that is beyond the table."""
        table, place = self._table, self._accepted + count - 1 - self._table.first
        if not table.starts_s:
            return self._now()
        beyond = place - len(table.starts_s) + 1
        if beyond > 0 and table.gap_s is None:
            return None
        start = table.starts_s[min(place, len(table.starts_s) - 1)] + max(0, beyond) * (table.gap_s or 0.0)
        return max(self._now(), table.made_s + self.scale * start)

    def _service_s(self, most: int) -> float:
        tokens = min(most, self._outputs_p99)
        return self.scale * (self._first_s + (tokens - 1) * self._token_s)

    # ---- learning ----

    def ended(self, input_tokens: int, output_tokens: int, service_s: float) -> None:
        """A sequence took so long from its start to its end. What is quick because little ran says nothing of what the
        next ones will take: it counts only while sequences wait.
        """
        if input_tokens > self._input_p99 or output_tokens < 2:
            return
        ratio, running = service_s / (self._first_s + (output_tokens - 1) * self._token_s), self._outputs()
        full = any(not output.tokens for output in running) or (self._most and len(running) > _FULL * self._most)
        if ratio < self.scale and not full:
            return
        low, high = _SCALES
        self.scale = min(high, max(low, self.scale + _MEMORY * (ratio - self.scale)))
        self._operate()

    async def update(self) -> None:
        """Make the table anew, if it is time: after each message of the engine."""
        now = self._now()
        if self._computing or now < self._next_s or self.bound_s is None:
            return
        self._computing = True
        standing, accepted = self._standing(), self._accepted
        try:
            starts, gap = await asyncio.to_thread(self._starts, standing)
        finally:
            self._computing = False
        waiting = sum(1 for row in standing if not row.generated)
        self._table = Table(now, starts, gap, accepted - waiting)
        took = self._now() - now
        self._next_s = self._now() + max(_LEAST_S, took / _CPU_SHARE)

    def _standing(self) -> list[Standing]:
        """The engine's sequences, in order of arrival."""
        rows = []
        for output in self._outputs():
            request, generated = output.request, len(output.tokens)
            ends = self._lengths.supposed(int(request.id), generated, request.max_tokens)
            rows.append(Standing(len(request.prompt_ids), request.max_tokens, ends, generated))
        return rows

    def _starts(self, standing: list[Standing]) -> tuple[tuple[float, ...], float | None]:
        """Seconds from now to the start of each place of the queue, as far as one could still be in time, and the gap
        between those beyond. Replicas take turns: one is followed.
        """
        assert self.bound_s is not None
        replicas = self._schedule.replicas
        running = [row for row in standing if row.generated][::replicas]
        waiting = [row for row in standing if not row.generated][::replicas]
        residents = traits_of(self._schedule).value(self._schedule, "residents") or 64
        typical, capacity = round(self._inputs.mean), self._schedule.kv_blocks * self._schedule.block_size
        most = max(1, min(self._outputs_p99, capacity - typical))
        count = max(16, len(running), residents)
        beyond = [Standing(typical, most, self._lengths.supposed(n, 0, most)) for n in range(count)]
        after = continue_from(self._schedule, self._cost, [*running, *waiting, *beyond], self.bound_s)
        starts = [c.start_s for c in after[len(running) :] if c.start_s is not None]
        ordered = np.maximum.accumulate(starts) if starts else np.zeros(0)
        whole = len(starts) == len(waiting) + len(beyond)
        gap = (ordered[-1] - ordered[len(waiting)]) / (len(beyond) - 1) / replicas if whole else None
        return tuple(np.repeat(ordered, replicas).tolist()), gap


def _rejected(code: str, why: str, after_s: float) -> ApiError:
    """429 with the time after which such a request would be accepted, spread so that clients don't return together."""
    after_s = max(0.05, after_s) * random.uniform(1.0, 1.4)
    headers = {"Retry-After": str(math.ceil(after_s)), "retry-after-ms": str(math.ceil(1000 * after_s))}
    return ApiError(429, why, code, None, RATE_LIMIT, headers)
