"""An LLM that applications share, followed request by request: an oracle of the event simulator, and what preemption
would bring.

With preemption whose request comes first has a place, and others wait with the tokens that they have, at no cost: the
most that swapping can bring.
"""

import heapq
import math
from dataclasses import dataclass, field, replace

from xmulti.applications.application_progress import Account, SubmissionProgress

EVERY = 10
"""Iterations after which places are given anew, if nothing else happens: 0.6 s at Hermes' rates."""


class _Counter:
    done = 0


@dataclass(eq=False)
class _Job:
    """What orders look at."""

    progress: SubmissionProgress
    arrival_s: float
    index: int


@dataclass(eq=False)
class _Request:
    left: int
    """Tokens to generate."""
    since: int = 0
    """The iteration at which it began, or went on."""
    fresh: bool = True
    """Not prefilled yet."""


@dataclass(eq=False)
class _Call:
    waiting: _Job
    tokens: int
    """That each request has in the cache."""
    idle: list[_Request]
    running: list[_Request] = field(default_factory=list)


class _StepByStep:
    def __init__(self, applications, order, limits, estimates, preempts):
        self.order, self.limits, self.estimates, self.preempts = order, limits, estimates, preempts
        self.counter = _Counter()
        self.calls = []
        self.progresses = [
            SubmissionProgress(each, limits.rates, self.counter, Account(self.counter)) for each in applications
        ]
        self._events = []
        self._number = self._calls = 0
        self.waited_s = {}
        """By application and position of the call: until its first request began."""
        for progress in self.progresses:
            self._at(progress.arrival_s, lambda now, progress=progress: self._call(progress, now))

    def run(self):
        """Seconds from arrival to end of each application."""
        now = 0.0
        while self._events or self.calls:
            self._happen(now)
            now += self._give_places(now)
            if any(call.running for call in self.calls):
                now += self._decode(now)
                self._happen(now)
                self._end(now)
            elif self._events:
                now = max(now, self._events[0][0])
        return tuple((progress.finish_s or 0.0) - progress.arrival_s for progress in self.progresses)

    def _happen(self, now):
        while self._events and self._events[0][0] <= now:
            time, _, happen = heapq.heappop(self._events)
            happen(time)

    def _at(self, time, happen):
        self._number += 1
        heapq.heappush(self._events, (time, self._number, happen))

    def _call(self, progress, now):
        """The application's current call waits for the LLM, or runs on a backend of its own."""
        call = progress.call
        if self.estimates:
            self.estimates.update(progress)
        if not call.on_llm:
            self._at(now + call.seconds, lambda end_s: self._next_call(progress, end_s))
            return
        self._calls += 1
        waiting = _Job(progress, now, self._calls)
        tokens = max(1, call.input_tokens + call.output_tokens)
        self.calls.append(_Call(waiting, tokens, [_Request(call.output_tokens) for _ in range(call.parallel)]))

    def _next_call(self, progress, now):
        progress.leave()
        if progress.position < len(progress.application.calls):
            self._call(progress, now)
        else:
            progress.finish_s = now

    def _give_places(self, now):
        """Give places in order, until a call doesn't fit as a whole; seconds of prefill."""
        ordered = sorted(self.calls, key=lambda call: self.order.key(call.waiting, now))
        places, tokens = self.limits.batch, self.limits.kv_tokens
        if not self.preempts:
            places -= sum(len(call.running) for call in ordered)
            tokens -= sum(len(call.running) * call.tokens for call in ordered)
        full, prompt_tokens, begin = False, 0, []
        for call in ordered:
            wanted = call.idle if not self.preempts else [*call.running, *call.idle]
            count = 0 if full else min(len(wanted), places, tokens // call.tokens)
            full = full or count < len(wanted)
            places, tokens = places - count, tokens - count * call.tokens
            if self.preempts:
                self._pause(call, len(call.running) - count)
                count -= len(call.running)
            begin.append((call, count))
            if count > 0 and call.waiting.progress.call.parallel == len(call.idle):
                key = call.waiting.index, call.waiting.progress.position
                self.waited_s.setdefault(key, now - call.waiting.arrival_s)
        for call, count in begin:
            prompt_tokens += self._begin(call, count)
        return prompt_tokens * self.limits.rates.prefill_s

    def _pause(self, call, count):
        for _ in range(count):
            request = call.running.pop()
            generated = self.counter.done - request.since
            request.left -= generated
            _stop(call.waiting.progress, generated)
            call.idle.insert(0, request)

    def _begin(self, call, count):
        """Prompt tokens of the first so many that wait; those that were prefilled go on."""
        prompt_tokens = 0
        for _ in range(count):
            request = call.idle.pop(0)
            progress = call.waiting.progress
            if request.fresh:
                progress.begin(1)
                prompt_tokens += progress.call.input_tokens
            else:
                for account in (progress._account, progress.client):
                    account.begin(1, replace(progress.call, input_tokens=0))
            request.fresh, request.since = False, self.counter.done
            call.running.append(request)
        return prompt_tokens

    def _decode(self, now):
        """Decode until a request ends, something happens, or places are given anew; the seconds that it takes."""
        ends = min(r.since + r.left for call in self.calls for r in call.running)
        iterations = ends - self.counter.done
        pace = self.limits.rates.decode_s
        most_s = self._events[0][0] - now if self._events else math.inf
        if iterations > 0 and most_s < iterations * pace:
            iterations = max(1, math.ceil(most_s / pace))
        if self.preempts:
            iterations = min(iterations, EVERY)
        self.counter.done += iterations
        return iterations * pace

    def _end(self, now):
        """Book the requests that have ended, and what follows their calls."""
        over = []
        for call in self.calls:
            for request in [r for r in call.running if r.since + r.left <= self.counter.done]:
                call.running.remove(request)
                _stop(call.waiting.progress, request.left)
            if not call.running and not call.idle:
                over.append(call)
        self.calls = [call for call in self.calls if call.running or call.idle]
        for call in over:
            self._next_call(call.waiting.progress, now)


def _stop(progress, generated):
    """Book a request that stops, or ends, so many tokens after it began or went on."""
    for account in (progress._account, progress.client):
        account.end(1, replace(progress.call, output_tokens=generated))


def completion_s(applications, order, limits, estimates=None, preempts=True):
    """Seconds from arrival to end of each application, in the workload's order; clients are the applications."""
    return _StepByStep(applications, order, limits, estimates, preempts).run()


def waited_s(applications, order, limits, estimates=None):
    """Seconds for which all first calls waited together, and all later ones, without preemption."""
    simulation = _StepByStep(applications, order, limits, estimates, preempts=False)
    simulation.run()
    first = sum(seconds for (_, position), seconds in simulation.waited_s.items() if position == 0)
    return first, sum(simulation.waited_s.values()) - first
