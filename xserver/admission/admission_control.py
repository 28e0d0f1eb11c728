"""Admission control: accept a request if its answer should meet the latency bound and no accepted one becomes late.

    start(k) + shared(s) <= (1 - MARGIN) * bound    and for each running sequence    now + shared(left) <= due

k is the request's place in the queue. start(k) is a table, computed a few times a second by continuing the engine's
present sequences in the event simulator. s is the output length that 99 of 100 requests stay below, limited by the
request's maximum; left is the remainder of such an s, given the tokens that a sequence has generated.

shared(l) is the time for l tokens on an engine that is shared until each sequence has its remaining tokens. The time
per token is t(n) for n sequences (`pace.py`). n counts the running sequences that haven't ended by then, but at least
as many as are accepted meanwhile.

A prefill takes less time if a part of the prompt is cached. This counts for blocks that the engine keeps until the
request starts: it pins the blocks of a request's prompt when it receives the request, and says how many. The frontend
follows the contents of the cache, but these may have changed by then. So a request is first judged without its cached
blocks. If it would be refused, it is judged with them, and accepted once the engine has pinned as many (`Promise`).
"""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xcore.arrays import Array
from xcore.requests.engine_protocol import Opened
from xserver.admission.arrival_rate import ArrivalRate
from xserver.admission.lengths import QUANTILE, Lengths
from xserver.admission.pace import Pace
from xserver.admission.refusals import Demand, RecentRefusals, Refusal
from xserver.admission.retry_after import RetryAfter
from xserver.admission.start_table import StartTable, in_order
from xserver.admission.token_bounds import TokenBounds
from xserver.admission.tokenizer_queue import TokenizerQueue
from xserver.engines.engine_link import Output
from xserver.http.api_error import ApiError
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.continuation import Standing, continue_from

MARGIN = 0.04
"""Margin of predictions, as a share of the bound."""
_PASSING_SHARE = 0.5
"""Share of the time between the predicted and the promised end for which others may pass a request in the queue.

The rest covers an order's effect on the queue: waiting requests have longer answers than admission expects.
"""
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
    slack_s: float | None = None
    """Seconds for which others may pass it in the queue (`xcore/orders/promised.py`); None: there is no bound."""
    cached: tuple[int, ...] = ()
    """Cached tokens of each prompt without which it would have been refused: the engine must keep as many."""

    def end_s(self, tokens: int) -> float:
        """Return the predicted time at which the given number of tokens is generated."""
        return self.finish_s - (self.tokens - tokens) * self.token_s


class Refused(Exception):
    """A request that is refused now, but may fit after `room_s`, and further ones after `further_s`.

    `for_others`: it would make others late.
    """

    def __init__(self, code: str, why: str, room_s: float, further_s: float = 0.0, for_others: bool = False):
        super().__init__(why)
        self.code, self.room_s, self.further_s, self.for_others = code, room_s, max(room_s, further_s), for_others


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
        """Begin without requests. Prompts of at most `usual_input` tokens are always subject to the bound.

        Requests and answers may each wait for up to `lag_s` until this process handles them.
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
        self._acceptances = ArrivalRate(schedule.latency_bound_s or 1.0)
        self._retry, self._refusals = RetryAfter(schedule.latency_bound_s or 1.0), RecentRefusals()
        self._table = StartTable(now(), (), 1, None, 0)
        self._accepted = 0
        self._computing = False
        self._next_s = self._next_look_s = 0.0
        self._took_s = math.inf
        """The CPU time of the latest table."""

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
        """Upper bound on the predicted time between two messages of a loaded engine: a prefill, or an iteration.

        The prefill may be that of the longest sequence, with the tokens that a previous engine generated.
        """
        longest = max((len(o.request.prompt_ids) + len(o.tokens) for o in self._outputs()), default=0)
        usual_s = self._pace.first_s(self._pace.most) + self._pace.token_s(self._pace.most)
        return usual_s + (self._pace.prefill_s(longest, 0) if longest else 0.0)

    # ---- decisions ----

    def refuse_early(self, bounds: TokenBounds, arrived_s: float, tokenizing: TokenizerQueue | None = None) -> None:
        """Raise ApiError for a request that would be refused with any tokens, before it is tokenized.

        `tokenizing` is the queue in which it will wait; None: it is tokenized at once. A request without a limit counts
        as one of the usual output.
        """
        now, most = self._now(), self._outputs_p99
        tokens = most if bounds.most_output is None else min(most, bounds.most_output)
        demand = Demand(bounds.sequences, tokens, False, math.inf if self._schedule.prefix_caching else 0.0)
        wait_s, length = (tokenizing.wait_s, tokenizing.length) if tokenizing else (0.0, 0)
        if length >= self._max_waiting:
            why = f"{length} requests are already waiting to be tokenized."
            refusal = self._refusal(demand, Refused("concurrency_limit", why, wait_s))
        elif wait_s and now + wait_s + self._pace.first_s(1) > arrived_s + self._within_s:
            why = f"The texts that wait to be tokenized take longer than the latency bound of {self.bound_s:g} s."
            refusal = self._refusal(demand, Refused("latency_bound", why, wait_s))
        else:
            may_be_long = bounds.most_input is None or bounds.most_input > self.usual_input
            kinds = [False] * (bounds.least_input <= self.usual_input) + [True] * may_be_long
            found = (self._refusals.find(replace(demand, long=long), now) for long in kinds)
            known = [each for each in found if each]
            if len(known) < len(kinds) or not self._outputs():
                return
            refusal = known[0]
        raise self._refused(refusal)

    def admit(self, prompts: Sequence[tuple[int, int]], arrived_s: float, cached: Sequence[int] = ()) -> Promise:
        """Accept the sequences of one request that arrived at `arrived_s`, each (input tokens, maximum output tokens).

        `cached` are the tokens of each prompt in the engine's cache. Raises ApiError if the request's answer or an
        accepted one would come too late, or if too many sequences wait.
        """
        now = self._now()
        if self.bound_s is not None and not self._outputs():
            self._table = self._idle_table(now)
        less = [self._pace.less_s(tokens, hit) for (tokens, _), hit in zip(prompts, cached, strict=False)]
        tokens = min(self._outputs_p99, max(most for _, most in prompts))
        demand = Demand(len(prompts), tokens, self._is_long(prompts), max(less, default=0.0))
        if self._outputs() and (known := self._refusals.find(demand, now)):
            raise self._refused(known)
        try:
            promise = self._promise(prompts, arrived_s, cached, less)
        except Refused as refused:
            raise self._refused(self._remember(prompts, arrived_s, demand, min(less, default=0.0), refused)) from None
        self._accepted += len(prompts)
        self._acceptances.come(len(prompts), now)
        self._retry.accepted(now)
        return promise

    def lost_prefix(self) -> ApiError:
        """Return the error 429 for a request whose cached tokens the engine has lost before it could keep them."""
        why = f"The answer would take longer than the latency bound of {self.bound_s:g} s."
        refused = Refused("latency_bound", why, self._pace.first_s(1))
        return self._refused(self._refusal(Demand(1, self._outputs_p99, False), refused))

    def _promise(
        self, prompts: Sequence[tuple[int, int]], arrived_s: float, cached: Sequence[int], less: Sequence[float]
    ) -> Promise:
        """Return the promise to a request, which counts on its cached tokens only if need be; or raise Refused."""
        try:
            return self._judge(prompts, arrived_s, [0.0] * len(prompts))
        except Refused:
            if not any(cached):
                raise
        return replace(self._judge(prompts, arrived_s, less), cached=tuple(cached))

    def _judge(self, prompts: Sequence[tuple[int, int]], arrived_s: float, less: Sequence[float]) -> Promise:
        """Return the promise to a request if each prompt's prefill takes this much less time; or raise Refused."""
        running, now = self._outputs(), self._now()
        waiting = sum(1 for output in running if not output.tokens)
        if waiting + len(prompts) > self._max_waiting:
            raise Refused("concurrency_limit", f"{waiting} requests are already waiting.", 1.0)
        long, load = self._is_long(prompts), len(running) + len(prompts)
        start = self._start_s(len(prompts)) if running else now
        most = min(self._outputs_p99, max(most for _, most in prompts))
        left = self._left(running)
        shared = self._shared_s([*left, *([most - 1] * len(prompts))])
        service_s = max(0.0, self._pace.first_s(load) - self._pace.scale(load) * min(less)) + float(shared[-1])
        finish = math.inf if start is None else start + service_s
        due = math.inf if self.bound_s is None or long else arrived_s + self._within_s - 2 * self._lag_s()
        late_s, ended_s = self._late_s(running, left, shared, less) if self.bound_s else (0.0, 0.0)
        if running and finish > due:
            why = f"The answer would take longer than the latency bound of {self.bound_s:g} s."
            own_s = self._wait_s(most, load) if math.isinf(finish) else finish - due
            raise Refused("latency_bound", why, max(own_s, late_s), ended_s, late_s > 0)
        if late_s:
            why = f"Some of {len(running)} running requests would then miss the bound of {self.bound_s:g} s."
            raise Refused("latency_bound", why, late_s, ended_s, True)
        if self.bound_s is not None and long:
            self._check_share(running)
        start = math.inf if start is None else start
        slack_s = self.bound_s if long else _PASSING_SHARE * max(0.0, due - finish)
        return Promise(start, finish, most, service_s / most, long, due, None if self.bound_s is None else slack_s)

    def _is_long(self, prompts: Sequence[tuple[int, int]]) -> bool:
        return any(tokens > self.usual_input for tokens, _ in prompts)

    def _prefills_s(self, running: Sequence[Output], left: Sequence[int], less: Sequence[float]) -> tuple[Array, Array]:
        """Return the seconds of the prefills before each sequence ends: of the waiting ones, and of new ones too.

        New ones take this much less time. A waiting sequence starts at a free place, or when another one ends.
        """
        joint_s, scale = self._pace.joint_prefill_s(), self._pace.scale(1)
        waiting = [self._pace.less_s(len(o.request.prompt_ids), o.held or 0) for o in running if not o.tokens]
        sums_s = np.cumsum([0.0, *(max(0.0, joint_s - scale * saved) for saved in (*waiting, *less))])
        sums_s /= self._schedule.replicas  # which prefill at the same time
        begun = np.array([bool(output.tokens) for output in running])
        places = (self._schedule.control.of_kind("residents") or math.inf) * self._schedule.replicas
        ended = np.argsort(np.argsort(np.where(begun, left, np.inf), kind="stable"))
        starts = np.where(begun, max(0.0, places - begun.sum()) + ended, math.inf)
        return tuple(sums_s[np.minimum(starts, most).astype(int)] for most in (len(waiting), len(sums_s) - 1))

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

        The load falls as sequences end, but not below the load of new ones. These are accepted at the recent rate and
        stay for the mean service time (Little's law).
        """
        tokens, order = np.array(left, dtype=np.float64), sorted(range(len(left)), key=left.__getitem__)
        load = len(left)
        by_load_s = self._pace.tokens_s(load)
        coming = math.ceil(self._acceptances.rate(self._now()) * self._lengths.mean * by_load_s[-1])
        token_s = by_load_s[np.maximum(np.arange(load, 0, -1), min(load, coming)) - 1]
        seconds = np.empty(len(left))
        seconds[order] = np.cumsum(np.diff(tokens[order], prepend=0.0) * token_s)
        return seconds

    def _late_s(
        self, running: Sequence[Output], left: Sequence[int], shared: Array, less: Sequence[float]
    ) -> tuple[float, float]:
        """Return the seconds until the prompts of `less` would make no sequence late; zeros if they make none late now.

        The second figure is the time until those have ended that they would make late: no more prompts fit earlier.
        `shared` are the seconds with them, without any prefills. Sequences that are late anyway don't count. The later
        the prompts come, the less time they share with another sequence before that ends.
        """
        if not running:
            return 0.0, 0.0
        now, (_, prefills_s) = self._now(), self._prefills_s(running, left, less)
        due_s, ends_s = np.array([output.due_s - now for output in running]), shared[: len(running)] + prefills_s
        return self._room_s(left, due_s, ends_s, self._shared_s(left) + prefills_s)

    def _room_s(self, left: Sequence[int], due_s: Array, ends_s: Array, alone_s: Array) -> tuple[float, float]:
        """Return the figures of `_late_s`. `alone_s` are the ends if the new prompts end after their prefills."""
        late = (ends_s > due_s) & (due_s >= np.array(left) * self._pace.token_s(1))
        if not late.any():
            return 0.0, 0.0
        share = np.clip((due_s - alone_s) / np.maximum(ends_s - alone_s, 1e-9), 0.0, 1.0)
        return max(_LEAST_S, float(np.max(((1 - share) * ends_s)[late]))), float(np.min(ends_s[late]))

    def _remember(
        self, prompts: Sequence[tuple[int, int]], arrived_s: float, demand: Demand, less: float, refused: Refused
    ) -> Refusal:
        """Remember a refusal for all requests with at least this demand, and return it.

        If others would be late, the refusal holds for prompts of any length. `less` is the time that each prefill saves
        at least. If the request would be refused even without its prefill, its cached tokens don't matter.
        """
        with_prefills = replace(demand, less_s=less)
        if self._schedule.prefix_caching:
            try:
                self._judge(prompts, arrived_s, [math.inf] * len(prompts))
            except Refused as without:
                refused, with_prefills = without, replace(demand, less_s=math.inf)
        refusal = self._refusal(with_prefills, refused)
        self._refusals.add(refusal)
        if refused.for_others:
            self._refusals.add(replace(refusal, demand=replace(with_prefills, long=not demand.long)))
        return refusal

    def _refusal(self, demand: Demand, refused: Refused) -> Refusal:
        now, load = self._now(), min(max(1, len(self._outputs())), self._pace.most)
        per_s = load / self._pace.service_s(round(self._lengths.mean), load)
        until_s, further_s = now + refused.room_s, now + refused.further_s
        return Refusal(demand, refused.code, str(refused), until_s, further_s, per_s, now)

    def _refused(self, refusal: Refusal) -> ApiError:
        """Count a refusal and return its error."""
        now = self._now()
        return refusal.error(self._retry.refused(refusal.until_s - now, now, refusal.per_s, refusal.further_s - now))

    def _wait_s(self, most: int, load: int) -> float:
        """Return the seconds until few enough sequences share the engine for such a request to be in time."""
        ending = load - self._pace.load_within(self._within_s, most)
        return max(1, ending) * self._pace.service_s(round(self._lengths.mean), load) / load

    def _check_share(self, running: Sequence[Output]) -> None:
        """Raise Refused if too many requests with longer prompts than the schedule's workload are running."""
        long = sum(1 for output in running if len(output.request.prompt_ids) > self.usual_input)
        residents = (self._schedule.control.of_kind("residents") or 0) * self._schedule.replicas or len(running)
        if long + 1 > max(1, LONG_SHARE * residents):
            why = (
                f"Few requests of more than {self.usual_input:,} input tokens may run at once, and {long} are running."
            )
            raise Refused("latency_bound", why, 2 * self._pace.service_s(self._outputs_p99, len(running)))

    def _start_s(self, count: int) -> float | None:
        """Return when the last of `count` more sequences starts; None if that is beyond the table."""
        table, place = self._table, self._accepted + count - 1 - self._table.first
        if not table.starts_s:
            return self._now()
        start = table.start_s(place)
        return None if start is None else max(self._now(), table.made_s + self.scale * start)

    # ---- measurements ----

    def ended(self, output: Output) -> None:
        """Learn from a sequence that has ended."""
        now = self._now()
        self._refusals.clear(now)
        self._retry.ended(now)
        self._record(now, output)
        if output.first_s is not None:
            self._pace.found(len(output.request.prompt_ids), output.cached_tokens)
        self._learn(output)

    def _record(self, now: float, *ended: Output) -> None:
        """Record the prefills that have ended since the last record, and how many sequences share the engine now."""
        running = [output for output in self._outputs() if output.tokens]
        for output in (*running, *ended):
            if output.tokens and not output.is_recorded:
                output.is_recorded = True
                self._pace.began(len(output.request.prompt_ids), output.cached_tokens)
        self._pace.shared_by(len(running), now)

    def _learn(self, output: Output) -> None:
        """Learn the pace from the tokens that a sequence has so far."""
        if len(output.request.prompt_ids) <= self.usual_input and output.first_s is not None:
            self._pace.served(len(output.tokens), output.first_s, output.last_s)

    def _look(self, now: float) -> None:
        """Learn the pace from some running sequences: it may have changed since the ending ones began."""
        if now < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_S
        begun = [output for output in self._outputs() if len(output.tokens) >= _BEGUN]
        for output in begun[:: -(-len(begun) // _LOOKED_AT) or 1]:
            self._learn(output)

    def stepped(self) -> bool:
        """Record a message of the engine; return whether a new table is due."""
        now = self._now()
        self._refusals.clear(now)
        self._record(now)
        self._look(now)
        return not self._computing and now >= self._next_s and self.bound_s is not None

    async def prepare(self) -> None:
        """Compute the table of an idle engine in a thread, so that the first request needn't wait for it."""
        if self.bound_s is not None:
            await asyncio.to_thread(lambda: self._idle_starts)

    async def update(self) -> None:
        """Compute a new table, unless one is being computed, or no bound needs it."""
        now = self._now()
        if self._computing or self.bound_s is None:
            return
        self._computing = True
        standing, accepted = self._standing(), self._accepted
        try:
            starts, took_s = await asyncio.to_thread(self._timed_starts, standing)
        finally:
            self._computing = False
        waiting = sum(1 for row in standing if not row.generated)
        self._table = StartTable(now, *starts, first=accepted - waiting)
        self._refusals.clear(now)
        usual_s, self._took_s = min(took_s, self._took_s), took_s  # one slow table doesn't stay for many seconds
        self._next_s = self._now() + max(_LEAST_S, usual_s / _CPU_SHARE)

    def _standing(self) -> list[Standing]:
        """Return the engine's sequences, in order of arrival."""
        rows = []
        for output in self._outputs():
            request, generated = output.request, len(output.tokens)
            supposed = self._lengths.supposed(int(request.id), generated, request.max_tokens)
            ends = max(supposed, request.least_tokens)
            lengths = len(request.prompt_ids), request.max_tokens, ends, generated
            rows.append(Standing(*lengths, output.keys, output.held or 0))
        return rows

    def _idle_table(self, now: float) -> StartTable:
        """Return the table for the requests that come to an idle engine: it has sent no message that makes one due."""
        return StartTable(now, *self._idle_starts, first=self._accepted)

    @functools.cached_property
    def _idle_starts(self) -> tuple[tuple[float, ...], int, float | None]:
        """The starts if nothing waits or runs."""
        return self._starts([])

    def _timed_starts(self, standing: list[Standing]) -> tuple[tuple[tuple[float, ...], int, float | None], float]:
        """Return the results of `_starts`, and the CPU time that they took: the thread may also wait for a CPU."""
        begin_s = time.thread_time()
        return self._starts(standing), time.thread_time() - begin_s

    def _starts(self, standing: list[Standing]) -> tuple[tuple[float, ...], int, float | None]:
        """Return the starts, the round and its time of a `StartTable`.

        Only places that could still be in time are listed. Replicas take turns, so only one is simulated.
        """
        assert self.bound_s is not None
        replicas = self._schedule.replicas
        running = [row for row in standing if row.generated][::replicas]
        waiting = [row for row in standing if not row.generated][::replicas]
        residents = self._schedule.control.of_kind("residents") or 64
        typical, capacity = round(self._inputs.mean), self._schedule.kv_blocks * self._schedule.block_size
        most = max(1, min(self._outputs_p99, capacity - typical))
        # Places in the first round may be free at once, or when sequences end that began earlier.
        count = max(16, 2 * residents - len(waiting))
        beyond = [Standing(typical, most, self._lengths.supposed(n, 0, most)) for n in range(count)]
        after = continue_from(self._schedule, self._cost, [*running, *waiting, *beyond], self.bound_s)
        starts, round_s = in_order([c.start_s for c in after[len(running) :]], residents)
        return tuple(np.repeat(starts, replicas).tolist()), residents * replicas, round_s
