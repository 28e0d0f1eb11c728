"""A unit: the models of one engine process in a server, with supervision and HTTP frontends."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path

from xcore.console import output
from xcore.console.schedule_text import schedule_text
from xcore.duration import format_duration
from xcore.requests.engine_protocol import Opened, Stepped
from xserver.engines.engine_unit import EngineUnit
from xserver.engines.unit_options import EngineUnitOptions
from xserver.http.frontend import Frontend
from xserver.nodes.node_link import NodeLink
from xserver.telemetry.reporting import reporting

NODE_WAIT_S = 30.0
"""Seconds for which accepted requests wait for a lost node."""
_LOOK_S = 0.05
_TURNS_ONLY = ": only models that take turns on shared devices keep their bounds (`exegpt plan --method temporal`)"


class ServerUnit(EngineUnit):
    """A server's unit; `where` is the server's address, and `resume` runs a model's journalled requests.

    `leave` lets replicas of a model take over its requests, because its node is lost. If the server abandons the unit,
    its models' requests wait for another plan's unit.
    """

    def __init__(
        self,
        options: EngineUnitOptions,
        frontends: Sequence[Frontend],
        directory: Path,
        where: str,
        resume: Callable[[Frontend], Coroutine[None, None, None]],
        turns: asyncio.Semaphore,
        node: NodeLink | None = None,
        leave: Callable[[Frontend], None] = lambda frontend: None,
    ):
        super().__init__(options, {f.model.name: f.link for f in frontends}, directory, turns, node)
        self.frontends, self._where, self._resume, self._leave = tuple(frontends), where, resume, leave
        self._tasks: set[asyncio.Task[None]] = set()
        """Background tasks: the event loop itself keeps no strong reference to them."""
        together = options.admissions() if options.admissions else None
        for frontend in frontends:
            frontend.unit, frontend.node, frontend.together = self.frontends, node, together
            frontend.link.on_opened = partial(self._opened, frontend)
            frontend.link.on_changed = partial(self._changed, frontend)
            frontend.link.on_stepped = partial(self._heard, frontend)
            # One process has all models: none accepts requests that would wait for its restart.
            frontend.link.on_lost = self._refuse

    async def give_up(self) -> None:
        """End the engine at once, after `run` was cancelled; another unit continues its requests."""
        self._refuse()
        await super().give_up()

    @property
    def _over(self) -> bool:
        return all(
            frontend.draining and not frontend.active and not frontend.link.outputs  # of a lost node
            for frontend in self.frontends
        )

    def _may_follow(self, opened: bool) -> bool:
        """Return whether the unit can be restarted.

        A restart needs a known schedule: the next engine couldn't find one either.
        """
        known = not {"--schedule", "--plan"}.isdisjoint([*self._arguments, *self._documents])
        return self._engine.restarts and known

    def _follows(self) -> None:
        for frontend in self.frontends:
            frontend.monitor.restarting()

    async def _reach(self, node: NodeLink) -> None:
        """Wait for a lost node; replicas on other nodes take over its requests, the others fail after a while."""
        for frontend in self.frontends:
            self._leave(frontend)
        try:
            await asyncio.wait_for(node.reachable(), NODE_WAIT_S)
        except (asyncio.TimeoutError, TimeoutError):
            for frontend in self.frontends:
                frontend.link.end_all(f"{node.address} can't be reached")
            await node.reachable()

    async def _until(self, ending: "asyncio.Future[int]") -> int:
        watching = asyncio.ensure_future(self._watch())
        try:
            return await ending
        finally:  # also after cancellation: then another unit watches these models
            watching.cancel()

    def _lost(self) -> None:
        super()._lost()
        self._refuse()

    def _refuse(self) -> None:
        """Stop accepting requests to all models until there is another engine."""
        for frontend in self.frontends:
            frontend.lost()

    def _opened(self, frontend: Frontend, opened: Opened) -> None:
        self._take(frontend, opened)
        accepting = self.frontends if frontend.together else (frontend,)
        if all(each.admission for each in accepting):  # models with one admission accept requests together
            for each in accepting:
                self._beside(self._resume(each))
        self._announce(frontend, opened)

    @reporting("log")
    def _announce(self, frontend: Frontend, opened: Opened) -> None:
        bound, promises = opened.schedule.latency_bound_s, frontend.together or not frontend.shares
        under = f" under {format_duration(bound)}" if bound and promises else ""
        served = f"serving {frontend.model.name} on {self._where}{under}: {schedule_text(opened.schedule)}"
        if frontend.shares:
            served += f"; it shares its devices with {', '.join(frontend.shares)}"
            served += "" if promises else " and promises no latency bound"
            served += _TURNS_ONLY if bound and not promises else ""
        seconds = time.monotonic() - self._started_s
        output.note(served, event="ready", model=frontend.model.name, seconds=round(seconds, 3))

    def _changed(self, frontend: Frontend, opened: Opened) -> None:
        self._take(frontend, opened)
        with reporting("log"):
            text = f"the schedule of {frontend.model.name} has changed: {schedule_text(opened.schedule)}"
            output.note(text, event="schedule_changed", model=frontend.model.name)

    def _take(self, frontend: Frontend, opened: Opened) -> None:
        """Accept requests under this schedule, which a new engine would follow too.

        Models that share devices follow the plan instead.
        """
        if not frontend.shares:
            self._documents["--schedule"] = opened.schedule
        frontend.opened(opened)
        for each in self.frontends if frontend.together else (frontend,):
            if each.admission:
                self._beside(each.admission.prepare())

    def _heard(self, frontend: Frontend, stepped: Stepped) -> None:
        frontend.monitor.stepped(stepped)
        self._stepped(stepped)
        if frontend.admission and frontend.admission.stepped():
            self._beside(frontend.admission.update())

    def _beside(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Kill an engine that has stalled; `run` then starts another one.

        Models may wait for each other, so all of them must have stalled.
        """
        while not (waiting := [frontend for frontend in self.frontends if frontend.link.silent_s]) or not all(
            frontend.link.silent_s >= frontend.stall_limit_s for frontend in waiting
        ):
            await asyncio.sleep(_LOOK_S)
        silent_s = max(frontend.link.silent_s for frontend in waiting)
        text = f"the engine of {self.name} has made no progress for {silent_s:.1f} s and is killed"
        output.note(text, event="engine_stalled")
        self._refuse()
        await self._engine.kill()
