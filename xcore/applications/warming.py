"""Warming: which resources of expected calls are loaded or kept, by policies that any kind of resource can follow.

A resource is, for example, the cached prefix of a prompt, or the model of a plan that a call needs.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import NamedTuple, Protocol, TypeVar

from xcore.applications.demand import ApplicationDemand
from xcore.applications.prewarming import prewarm_at

KNOB = 0.5
"""Hermes' K: the least probability that what is warmed up is used."""
LATE = 2.0
"""An expected call is given up this many times its longest sampled delay after its announcement."""


MOST_RECENT = 2_000
"""Entries of a `Recent` mapping: clients choose the names of applications, runs and units."""
Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(OrderedDict[Key, Value]):
    """The values that were remembered last, by key."""

    def remember(self, key: Key, value: Value) -> None:
        """Set a value, and forget the oldest one if there are too many."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > MOST_RECENT:
            self.popitem(last=False)


class WarmCall(NamedTuple):
    """A call that waits or is expected."""

    run: Hashable
    application: str
    unit: str
    request: int | None = None
    """The index of its request; None: it is only expected."""


class Warmth(Protocol):
    """Resources that calls need."""

    def warm_up_s(self, call: WarmCall) -> float:
        """Return the seconds from `warm` until a call's resource can be used."""

    def warm(self, call: WarmCall, now: float) -> None:
        """Load a call's resource, or keep it if it is loaded, until `release`."""

    def release(self, call: WarmCall, now: float) -> None:
        """Let a resource go that a call has kept, if there is one; other calls may keep it still."""


class ReactiveWarming:
    """LRU: a call's resource is loaded when the call begins, in place of the one that was used least recently."""

    def __init__(self, warmth: Warmth):
        self.warmth = warmth

    def wait(self, call: WarmCall, now: float) -> None:
        """Process the arrival of a call's request."""

    def start(self, call: WarmCall, now: float) -> None:
        """Process the beginning of a request, which holds its resource itself from now on."""

    def end(self, call: WarmCall, now: float) -> None:
        """Process the end of a request."""

    def act(self, now: float) -> None:
        """Begin and end what is due."""

    def next_s(self) -> float:
        """Return when something is due next; infinite: nothing is."""
        return inf


class QueueWarming(ReactiveWarming):
    """EPWQ: also loads or keeps the resources of waiting requests (evict and prefetch by the waiting queue)."""

    def wait(self, call: WarmCall, now: float) -> None:
        """Keep the resource of a waiting request."""
        self.warmth.warm(call, now)

    def start(self, call: WarmCall, now: float) -> None:
        """Let go of a request's resource, which it uses now."""
        self.warmth.release(call, now)

    def end(self, call: WarmCall, now: float) -> None:
        """Let go of a request that ends without having begun."""
        self.warmth.release(call, now)


@dataclass(eq=False)
class _Expected:
    """The calls that are expected next of one run."""

    calls: set[WarmCall] = field(default_factory=set)
    """Expected calls whose resources are kept."""
    plan: int = -1
    """The number of its present plan: events of other plans are void."""
    open_requests: int = 0
    """Requests of the run that haven't ended."""


class DemandWarming(QueueWarming):
    """Hermes: also warms up what a run's next call is expected to need, by the knob K.

    A unit that follows with the probability p is warmed up if p is at least `knob`; it should be warm at the quantile
    knob / p of the time until its call. Plans are made when a call begins, and again when it ends.
    """

    def __init__(self, warmth: Warmth, models: Mapping[str, ApplicationDemand], knob: float = KNOB):
        super().__init__(warmth)
        self._models, self._knob = models, knob
        self._runs: dict[Hashable, _Expected] = {}
        self._events: list[tuple[float, int, int, Hashable, Callable[[float], None]]] = []
        self._numbers = count()

    def wait(self, call: WarmCall, now: float) -> None:
        """Keep the resource of a waiting request; its run expects nothing else until it begins."""
        super().wait(call, now)
        run = self._runs.setdefault(call.run, _Expected())
        run.open_requests += 1
        self._forget(run, now)

    def start(self, call: WarmCall, now: float) -> None:
        """Plan the warm-ups of the calls that may follow while this one runs."""
        super().start(call, now)
        self._plan(call, now, begun=True)

    def end(self, call: WarmCall, now: float) -> None:
        """Plan again after the last request of a call: only calls to other backends are between it and the next."""
        super().end(call, now)
        run = self._runs.get(call.run)
        if run is None:
            return
        run.open_requests -= 1
        if run.open_requests > 0:
            return
        self._plan(call, now, begun=False)
        if not run.calls and run.plan < 0:
            del self._runs[call.run]

    def act(self, now: float) -> None:
        """Begin warm-ups that are due, and give up calls that are late."""
        while self.next_s() <= now:
            *_, happen = heapq.heappop(self._events)
            happen(now)

    def next_s(self) -> float:
        """Return when a warm-up or the end of one is due; events of earlier plans are dropped."""
        while self._events and not self._valid(*self._events[0][2:4]):
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else inf

    def _valid(self, plan: int, name: Hashable) -> bool:
        return name in self._runs and self._runs[name].plan == plan

    def _plan(self, call: WarmCall, now: float, begun: bool) -> None:
        """Schedule the warm-ups of what may follow a call that begins, or ends, now."""
        model, run = self._models.get(call.application), self._runs.setdefault(call.run, _Expected())
        kept, run.calls, run.plan = run.calls, set(), -1
        if model and model.has(call.unit):
            run.plan = next(self._numbers)
            longest_s, plan = 0.0, run.plan
            for unit, (probability, seconds) in model.next_calls(call.unit, begun).items():
                following = WarmCall(call.run, call.application, unit)
                at_s = prewarm_at(seconds, -1.0, probability, self._knob, self.warmth.warm_up_s(following))
                if at_s is None:
                    continue
                longest_s = max(longest_s, float(seconds.max()))
                if at_s <= 0 or following in kept:
                    self._warm(run, following, now)
                else:
                    self._at(now + at_s, plan, call.run, partial(self._warm, run, following))
            if longest_s or run.calls:
                late_s = LATE * longest_s + max((self.warmth.warm_up_s(c) for c in run.calls), default=0.0) + 1.0
                self._at(now + late_s, plan, call.run, partial(self._give_up, call.run))
            else:
                run.plan = -1
        for other in kept - run.calls:
            self.warmth.release(other, now)

    def _at(self, at_s: float, plan: int, name: Hashable, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), plan, name, happen))

    def _warm(self, run: _Expected, call: WarmCall, now: float) -> None:
        run.calls.add(call)
        self.warmth.warm(call, now)

    def _forget(self, run: _Expected, now: float) -> None:
        run.plan = -1
        for call in run.calls:
            self.warmth.release(call, now)
        run.calls = set()

    def _give_up(self, name: Hashable, now: float) -> None:
        self._forget(self._runs[name], now)
        if not self._runs[name].open_requests:
            del self._runs[name]


WARMING = ("lru", "epwq", "prewarm")
"""Names of the policies: LRU, EPWQ, and Hermes' prewarming by demand graphs."""


def make_warming(
    name: str, warmth: Warmth, models: Mapping[str, ApplicationDemand], knob: float = KNOB
) -> ReactiveWarming:
    """Make a policy by its name; only `prewarm` reads the demand of applications."""
    if name == "prewarm":
        return DemandWarming(warmth, models, knob)
    return QueueWarming(warmth) if name == "epwq" else ReactiveWarming(warmth)
