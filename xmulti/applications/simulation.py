"""Event simulation of applications whose calls go to a shared LLM, or to separate containers."""

import heapq
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from xcore.applications.demand_graph import END, LLM
from xcore.applications.prewarming import effect, prewarm_at
from xcore.arrays import Array
from xcore.errors import InputError
from xmulti.applications.application_progress import Account, DemandEstimates, SubmissionProgress
from xmulti.applications.llm_backend import LLMBackend, LLMLimits
from xmulti.applications.orders import ApplicationOrder, WaitingCall
from xmulti.applications.submission import Submission
from xmulti.applications.warm_cache import WarmCache
from xsimulator.replay.event_queue import run


@dataclass(frozen=True)
class Prewarming:
    """How early the resources of a possible successor are warmed up."""

    knob: float = 0.5
    """K: lower is earlier."""
    literal_eq3: bool = False


@dataclass(frozen=True)
class ApplicationRun:
    """The result of simulating a workload."""

    completion_s: tuple[float, ...]
    """Seconds from arrival to end of each application, in the workload's order."""
    in_time: tuple[bool, ...]
    """Whether each application with a deadline was in time."""
    makespan_s: float
    hits: int
    """Calls whose adapter or context was loaded when their turn came."""
    misses: int
    saved_s: float
    """Saved seconds of containers' start-ups."""
    wasted_s: float
    """Seconds in which containers were warm before their use, or without use."""


def simulate(
    applications: Sequence[Submission],
    order: ApplicationOrder,
    limits: LLMLimits | None = None,
    estimates: DemandEstimates | None = None,
    cache: WarmCache | None = None,
    start_up_s: Mapping[str, float] | None = None,
    prewarming: Prewarming | None = None,
) -> ApplicationRun:
    """Run applications to completion.

    `estimates` are needed by orders that use demand, and by prewarming. `start_up_s` is the start-up time of
    containers, by backend: each call has its own container.

    Raises:
        InputError: An application has no calls, or a request doesn't fit into the LLM's cache.
    """
    limits = limits or LLMLimits()
    for application in applications:
        tokens = max((call.input_tokens + call.output_tokens for call in application.calls), default=0)
        if tokens > limits.kv_tokens or not application.calls:
            raise InputError(
                f"Application {application.index} ('{application.name}') has no calls, or a call of {tokens:,} "
                f"tokens, but the LLM's cache has only {limits.kv_tokens:,}: leave the application out, or shorten "
                "the call."
            )
    return _Simulation(applications, order, limits, estimates, cache, start_up_s or {}, prewarming).run()


@dataclass(eq=False)
class _Running:
    """An application with its simulation state."""

    progress: SubmissionProgress
    containers: dict[str, float] = field(default_factory=dict)
    """By unit: when a container for the next call began to warm up."""


class _Simulation:
    """The actor for everything except the LLM, which is a second actor in the event queue."""

    def __init__(
        self,
        applications: Sequence[Submission],
        order: ApplicationOrder,
        limits: LLMLimits,
        estimates: DemandEstimates | None,
        cache: WarmCache | None,
        start_up_s: Mapping[str, float],
        prewarming: Prewarming | None,
    ):
        self.llm = LLMBackend(limits, order, cache, self._llm_call_begun, self._llm_call_ended)
        self.limits, self.estimates, self.cache = limits, estimates, cache
        self.start_up_s, self.prewarming = start_up_s, prewarming
        self.saved_s = self.wasted_s = 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers, self._calls = count(), count()
        self._active: dict[int, _Running] = {}
        self._clients: dict[Hashable, Account] = {}
        self.runs = [
            _Running(SubmissionProgress(each, limits.rates, self.llm, self._client(each))) for each in applications
        ]
        for each in self.runs:
            self._at(each.progress.arrival_s, partial(self._arrive, each))

    def run(self) -> ApplicationRun:
        """Run until the last application ends."""
        run((self, self.llm))
        return self._result(self.llm.now)

    @property
    def idle(self) -> bool:
        """Whether no application runs."""
        return not self._active

    def next_event(self) -> float:
        """Return the time of the next event outside the LLM."""
        ready_s = self.cache.next_ready(self.llm.now) if self.cache else None
        return min(self._events[0][0] if self._events else math.inf, math.inf if ready_s is None else ready_s)

    def act(self, now: float) -> None:
        """Process the events at `now`; the LLM sees them after its current iteration."""
        self.llm.interrupt(now)
        if self._events and self._events[0][0] <= now:
            *_, happen = heapq.heappop(self._events)
            happen(now)

    def _result(self, now: float) -> ApplicationRun:
        finished = [(each.progress.application, each.progress.finish_s) for each in self.runs]
        assert not self._active and all(finish_s is not None for _, finish_s in finished), "all applications end"
        assert self.llm.idle and self.llm.ledger.pool.available == self.limits.kv_tokens
        assert self.cache is None or self.cache.pins == 0, "no slot is held for calls that have ended"
        return ApplicationRun(
            tuple((end or 0.0) - each.arrival_s for each, end in finished),
            tuple((end or 0.0) <= each.deadline_s for each, end in finished if each.deadline_s is not None),
            now,
            self.cache.hits if self.cache else 0,
            self.cache.misses if self.cache else 0,
            self.saved_s,
            self.wasted_s,
        )

    def _client(self, application: Submission) -> Account:
        """Return the account of the application's client."""
        client = ("client", application.client) if application.client is not None else application.index
        return self._clients.setdefault(client, Account(self.llm))

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    def _arrive(self, run: _Running, now: float) -> None:
        client = run.progress.client
        if not client.active:
            least = min((each.virtual_tokens for each in self._clients.values() if each.active), default=0.0)
            client.lifted += max(0.0, least - client.virtual_tokens)
        client.active += 1
        self._active[run.progress.index] = run
        self._call(run, now)

    def _call(self, run: _Running, now: float) -> None:
        """Enqueue the application's current LLM call, or start its container."""
        progress, call = run.progress, run.progress.call
        if self.estimates:
            self.estimates.update(progress)
        if call.on_llm:
            self.llm.enqueue(WaitingCall(progress, now, next(self._calls)))
            if self.cache:
                self.cache.retract(progress.application)
            self._settle(run, None, now)
            return
        began = self._settle(run, call.unit, now)
        start_up_s = self.start_up_s.get(call.backend, 0.0)
        begin = max(now, (now if began is None else began) + start_up_s)
        self._at(begin, partial(self._begun, run))
        self._at(begin + call.seconds, partial(self._ended, run))

    def _settle(self, run: _Running, unit: str | None, now: float) -> float | None:
        """Count the containers that were warmed up for a run's next call, and drop all except that of `unit`.

        Return when the warm-up of `unit`'s container began.
        """
        backends = {name: self._backend(run.progress, name) for name in run.containers}
        for name, began in run.containers.items():
            saved_s, wasted_s = effect(began, self.start_up_s[backends[name]], now, name == unit)
            self.saved_s, self.wasted_s = self.saved_s + saved_s, self.wasted_s + wasted_s
        began_s = run.containers.get(unit) if unit else None
        run.containers = {}
        return began_s

    def _llm_call_begun(self, call: WaitingCall, now: float) -> None:
        self._begun(self._active[call.progress.index], now)

    def _llm_call_ended(self, call: WaitingCall, now: float) -> None:
        each = call.progress.call
        if self.cache:
            tokens = each.input_tokens + each.output_tokens
            self.cache.release(call, now, tokens * self.limits.kv_bytes_per_token)
        self._ended(self._active[call.progress.index], now)

    def _ended(self, run: _Running, now: float) -> None:
        progress = run.progress
        progress.leave()
        if progress.position < len(progress.application.calls):
            return self._call(run, now)
        assert progress.finish_s is None, "an application ends once"
        progress.finish_s = now
        progress.client.active -= 1
        self._settle(run, None, now)
        if self.cache:
            self.cache.forget(progress.application)
        del self._active[progress.index]

    def _begun(self, run: _Running, now: float) -> None:
        """Plan the warm-ups during the current call, which has begun."""
        if self.prewarming is None or self.estimates is None:
            return
        progress = run.progress
        model = self.estimates.models[progress.application.name]
        unit = progress.call.unit
        seconds = model.seconds(unit)
        followers = sorted(set(model.graph.unit(unit).next_units))
        backends = {name: self._backend(progress, name) for name in followers if name != END}
        on_llm = sum(model.next_probability(unit, name) for name, backend in backends.items() if backend == LLM)
        for name, backend in backends.items():
            if backend in self.start_up_s:
                probability = model.next_probability(unit, name)
                self._plan(run, now, seconds, probability, self.start_up_s[backend], partial(self._warm, run, name))
        if self.cache and self.cache.policy == "prewarm" and not progress.call.on_llm:
            cache, application = self.cache, progress.application
            if need := cache.needs(application):
                load_s = cache.load_s(need[1])
                self._plan(run, now, seconds, on_llm, load_s, partial(cache.announce, application))

    def _plan(
        self,
        run: _Running,
        now: float,
        seconds: Sequence[float] | Array,
        probability: float,
        warm_up_s: float,
        warm: Callable[[float], None],
    ) -> None:
        """Start warming up at the time that follows from the knob, if the current call is still running then."""
        assert self.prewarming is not None
        knob, literal = self.prewarming.knob, self.prewarming.literal_eq3
        after_s = prewarm_at(seconds, 0.0, probability, knob, warm_up_s, literal)
        if after_s is None:
            return
        position = run.progress.position

        def happen(at: float) -> None:
            if run.progress.position == position and run.progress.finish_s is None:
                warm(at)

        self._at(now + after_s, happen)

    def _warm(self, run: _Running, unit: str, now: float) -> None:
        """Warm up a container of `unit` for the possible next call."""
        run.containers[unit] = now

    def _backend(self, progress: SubmissionProgress, unit: str) -> str:
        assert self.estimates is not None
        return self.estimates.models[progress.application.name].graph.unit(unit).backend
