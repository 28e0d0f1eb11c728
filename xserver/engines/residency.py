"""Residency: which of a plan's engines are loaded, if fewer may run at once than the plan has."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from xcore.applications.demand import ApplicationDemand, ServiceRates
from xcore.applications.demand_graph import read_demand_graphs
from xcore.applications.warming import Recent, WarmCall, make_warming
from xserver.engines.server_unit import ServerUnit

_LOADS_S = 10.0
"""Assumed seconds of an engine's first load."""
_LOOK_S = 0.02


@dataclass(frozen=True)
class ResidencyOptions:
    """How many engines are loaded at once, and by which policy."""

    most: int
    policy: str = "lru"
    """One of `WARMING`."""
    knob: float = 0.5
    graphs: Path | None = None
    """Demand graphs of applications, for prewarming."""

    def models(self) -> dict[str, ApplicationDemand]:
        """Return the demands of the applications; durations of LLM calls are at the usual rates."""
        graphs = read_demand_graphs(self.graphs) if self.graphs else ()
        return {graph.application: ApplicationDemand(graph, ServiceRates()) for graph in graphs}


@dataclass(eq=False)
class _Place:
    """The state of one unit's engine."""

    unit: ServerUnit
    loaded: bool = False
    """Whether its engine runs, or starts."""
    running: int = 0
    """Requests that are being answered."""
    holds: set[WarmCall] = field(default_factory=set)
    """Waiting or expected calls for which the policy keeps it."""
    used_s: float = 0.0
    began_s: float = 0.0
    load_s: float = _LOADS_S

    @property
    def idle(self) -> bool:
        """Whether its engine answers nothing: it has opened, or its node is lost."""
        return self.loaded and not self.running and (self.unit.opened or self.lost)

    @property
    def lost(self) -> bool:
        """Whether its engine can't be loaded, because the launcher of its node can't be reached."""
        return self.unit.node is not None and not self.unit.node.up


class Residency:
    """Loads and ends the engines of units, so that at most `most` are loaded. A `Warmth` of models.

    A request to a model that isn't loaded waits. Its engine takes the place of an idle one: of one that no waiting or
    expected call needs, if there is any, and of the one used least recently among these.
    """

    def __init__(
        self,
        options: ResidencyOptions,
        units: Sequence[ServerUnit],
        start: Callable[[ServerUnit], None],
        stop: Callable[[ServerUnit], Coroutine[None, None, None]],
    ):
        self._most, self._start, self._stop = options.most, start, stop
        self._places = [_Place(unit) for unit in units]
        self._by_model = {model: place for place in self._places for model in place.unit.links}
        self._policy = make_warming(options.policy, self, options.models(), options.knob)
        self._model_of = Recent[tuple[str, str], str]()
        """The model that the latest call of each application's unit used."""
        self._numbers = count()
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._timings: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Load the engines of the first units."""
        for place in self._places[: self._most]:
            self._load(place)

    async def run(self) -> None:
        """Follow the policy until the task is cancelled."""
        while True:
            self._policy.act(time.monotonic())
            await self._load_held()
            wait_s = self._policy.next_s() - time.monotonic()
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if wait_s == float("inf") else max(0.0, wait_s))
            self._changed.clear()

    async def enter(self, model: str, client: str, labels: Mapping[str, object]) -> Callable[[], None]:
        """Wait until a request's model is loaded; return the function to call when the request has been answered.

        Raises ApiError if the model's node is lost.
        """
        call, place = self._call(client, labels), self._by_model[model]
        self._model_of.remember((call.application, call.unit), model)
        self._policy.wait(call, time.monotonic())
        self._changed.set()
        try:
            while not place.unit.opened and not any(frontend.draining for frontend in place.unit.frontends):
                if place.lost:
                    for frontend in place.unit.frontends:
                        frontend.check_ready()
                elif not place.loaded:
                    await self._turn(place)
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            self._policy.end(call, time.monotonic())
            raise
        place.running += 1
        self._policy.start(call, time.monotonic())

        def leave() -> None:
            place.running -= 1
            place.used_s = time.monotonic()
            self._policy.end(call, time.monotonic())
            self._changed.set()

        return leave

    def _call(self, client: str, labels: Mapping[str, object]) -> WarmCall:
        application, run, unit = (str(labels.get(key) or "") for key in ("application", "run", "unit"))
        number = next(self._numbers)
        name: Hashable = (client, application, run) if run else number
        return WarmCall(name, application, unit, number)

    def warm_up_s(self, call: WarmCall) -> float:
        """Return how long the latest load of a call's model took; nothing for an unknown model."""
        model = self._model_of.get((call.application, call.unit))
        return self._by_model[model].load_s if model else 0.0

    def warm(self, call: WarmCall, now: float) -> None:
        """Keep the model of a call, or load it as soon as there is room."""
        if model := self._model_of.get((call.application, call.unit)):
            self._by_model[model].holds.add(call)
            self._changed.set()

    def release(self, call: WarmCall, now: float) -> None:
        """Let a model go that a call has kept."""
        for place in self._places:
            place.holds.discard(call)

    async def _load_held(self) -> None:
        """Load kept models that aren't loaded, as far as others are idle and not kept."""
        for place in self._places:
            if place.holds and not place.loaded and not place.lost:
                async with self._changing:
                    if not place.loaded and await self._make_room([p for p in self._places if not p.holds]):
                        self._load(place)

    async def _turn(self, place: _Place) -> None:
        """Load a model whose request waits, in place of any idle one."""
        async with self._changing:
            if place.loaded:
                return
            if await self._make_room(self._places):
                self._load(place)

    async def _make_room(self, others: Sequence[_Place]) -> bool:
        """End an idle engine of these, if too many are loaded; return whether there is room.

        It is one of a lost node, or else one that no call needs, if possible, and of these the one used least recently.
        """
        if sum(place.loaded for place in self._places) < self._most:
            return True
        idle = [place for place in others if place.idle]
        if not idle:
            return False
        victim = min(idle, key=lambda place: (not place.lost, bool(place.holds), place.used_s))
        victim.loaded = False
        await self._stop(victim.unit)
        return True

    def _load(self, place: _Place) -> None:
        place.loaded, place.began_s = True, time.monotonic()
        self._start(place.unit)
        timing = asyncio.ensure_future(self._time(place))
        self._timings.add(timing)
        timing.add_done_callback(self._timings.discard)

    async def _time(self, place: _Place) -> None:
        """Measure how long a load takes."""
        while place.loaded and not place.unit.opened:
            await asyncio.sleep(_LOOK_S)
        if place.loaded:
            place.load_s, place.used_s = time.monotonic() - place.began_s, time.monotonic()
            self._changed.set()
