"""A unit: the models of one engine process, which is started, watched, and started again where it fails."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path

from exegpt import document
from exegpt.app.engines.engine_process import EngineProcess
from exegpt.app.engines.unit_options import UnitOptions
from exegpt.duration import format_duration
from exegpt.engine_protocol import Opened, Stepped
from exegpt.noun import Noun
from exegpt.report import output
from exegpt.report.schedule_text import schedule_text
from exegpt.server.frontend import Frontend
from exegpt.server.joined_engine import JoinedEngine

_MOST_RESTARTS = 5
"""Ends of the engine in a row, without an answer between them, after which the server gives up."""
_LOOK_S = 0.05


class Unit:
    """`directory` is the server's own, `where` its address; `resume` runs what a journal has of a model. An engine is
    started in one of the server's `turns`, which it has until its models are there.
    """

    def __init__(
        self,
        options: UnitOptions,
        frontends: Sequence[Frontend],
        directory: Path,
        where: str,
        resume: Callable[[Frontend], Coroutine[None, None, None]],
        turns: asyncio.Semaphore,
    ):
        self.options, self.frontends, self._directory = options, tuple(frontends), directory
        self._where, self._resume, self._turns = where, resume, turns
        self.name = ", ".join(frontend.model.name for frontend in frontends)
        """Its models'."""
        self._sockets = [options.engine_socket or directory / f"engine-{model.place}" for model in options.models]
        alone = len(frontends) == 1
        self._arguments = [*options.arguments, "--socket", str(self._sockets[0] if alone else directory)]
        for option, noun in options.documents.items():
            self._pass(option, noun)
        self._engine: EngineProcess | JoinedEngine
        if options.engine_socket:
            self._engine = JoinedEngine(frontends[0].link)
        else:
            self._engine = EngineProcess(self._arguments, options.ranks, options.environment)
        self._failures = 0
        self._started_s = 0.0
        """When the engine was started, by the monotonic clock."""
        self._tasks: set[asyncio.Task[None]] = set()
        """What runs beside: the event loop alone doesn't keep it."""
        for frontend in frontends:
            frontend.link.on_opened = partial(self._opened, frontend)
            frontend.link.on_changed = partial(self._changed, frontend)
            frontend.link.on_stepped = partial(self._stepped, frontend)
            frontend.link.on_lost = frontend.lost

    async def listen(self) -> None:
        """Let the engine connect."""
        for frontend, path in zip(self.frontends, self._sockets, strict=True):
            await frontend.link.listen(path)

    async def run(self) -> int:
        """Run engines, one after the other: until one can't be started again, whose exit code this is, or 0 once the
        server drains and all is answered.
        """
        while True:
            async with self._turns:
                self._started_s = time.monotonic()
                await self._engine.start()
                ending = asyncio.ensure_future(self._engine.wait())
                while not ending.done() and not all(frontend.link.opened for frontend in self.frontends):
                    await asyncio.sleep(_LOOK_S)
            watching = asyncio.ensure_future(self._watch())
            try:
                code = await ending
            finally:  # when this is cancelled, too: another unit watches these models then
                watching.cancel()
            await self._engine.kill()
            self._lost()
            if all(frontend.draining and not frontend.active for frontend in self.frontends):
                return 0
            self._failures += 1
            known = self._engine.restarts and not {"--schedule", "--plan"}.isdisjoint(self._arguments)
            if not known or self._failures >= _MOST_RESTARTS:
                return code or 1  # it has said why
            for frontend in self.frontends:
                frontend.monitor.restarting()
            text = f"the engine of {self.name} has ended (exit code {code}): it is started again"
            output.note(text, event="engine_restart", code=code)

    def fail(self) -> None:
        """End its models' requests with an error, and those that come: there will be no engine any more."""
        for frontend in self.frontends:
            frontend.link.fail()

    async def give_up(self) -> None:
        """End the engine at once, after `run` was cancelled; another unit's goes on with its requests."""
        for frontend in self.frontends:
            frontend.lost()
        await self._engine.kill()
        self._lost()
        while any(frontend.link.connected for frontend in self.frontends):
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """End the engine; one that can still be told ends by itself."""
        told = [frontend.link.drain() for frontend in self.frontends]
        self._engine.told = all(told)
        await self._engine.stop()

    async def close(self) -> None:
        """Close the sockets."""
        for frontend in self.frontends:
            await frontend.link.close()

    def _opened(self, frontend: Frontend, opened: Opened) -> None:
        self._take(frontend, opened)
        self._beside(self._resume(frontend))
        bound = opened.schedule.latency_bound_s
        under = f" under {format_duration(bound)}" if bound and not frontend.shares else ""
        served = f"serving {frontend.model.name} on {self._where}{under}: {schedule_text(opened.schedule)}"
        if frontend.shares:
            served += f"; it shares its devices with {', '.join(frontend.shares)}, and promises no bound"
        seconds = time.monotonic() - self._started_s
        output.note(served, event="ready", model=frontend.model.name, seconds=round(seconds, 3))

    def _changed(self, frontend: Frontend, opened: Opened) -> None:
        self._take(frontend, opened)
        text = f"the schedule of {frontend.model.name} has changed: {schedule_text(opened.schedule)}"
        output.note(text, event="schedule_changed", model=frontend.model.name)

    def _take(self, frontend: Frontend, opened: Opened) -> None:
        """Take requests for this schedule, which another engine would follow too; models that share follow a plan."""
        if not frontend.shares:
            self._pass("--schedule", opened.schedule)
        frontend.opened(opened)

    def _pass(self, option: str, noun: Noun) -> None:
        """Let engines that are started from now on read this."""
        path = self._directory / f"{option.strip('-')}-{self.options.models[0].place}.json"
        document.write(path, noun)
        if option not in self._arguments:
            self._arguments += [option, ""]
        self._arguments[self._arguments.index(option) + 1] = str(path)

    def _stepped(self, frontend: Frontend, stepped: Stepped) -> None:
        frontend.monitor.stepped(stepped)
        if stepped.ended:
            self._failures = 0
        if frontend.admission:
            self._beside(frontend.admission.update())

    def _beside(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lost(self) -> None:
        for frontend in self.frontends:
            frontend.link.ended()
            frontend.lost()

    async def _watch(self) -> None:
        """Kill an engine that has stalled: `run` starts another. Models may wait for each other: all have to."""
        while not (waiting := [frontend for frontend in self.frontends if frontend.link.silent_s]) or not all(
            frontend.link.silent_s >= frontend.stall_limit_s for frontend in waiting
        ):
            await asyncio.sleep(_LOOK_S)
        silent_s = max(frontend.link.silent_s for frontend in waiting)
        text = f"the engine of {self.name} has done nothing for {silent_s:.1f} s: it is killed"
        output.note(text, event="engine_stalled")
        for frontend in self.frontends:
            frontend.lost()
        await self._engine.kill()
