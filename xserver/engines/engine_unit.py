"""Engine units: the models of one engine process, which is started, and started again where it ends too early."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from xcore import document
from xcore.console import output
from xcore.requests.engine_protocol import Stepped
from xserver.engines.engine_link import EngineLink
from xserver.engines.engine_process import DRAIN_LIMIT_S, EngineProcess
from xserver.engines.joined_engine import JoinedEngine
from xserver.engines.room import with_room_for
from xserver.engines.unit_options import UnitOptions

_MOST_RESTARTS = 5
"""Ends of an engine in a row, without a request's end between them, after which it is given up."""
_REFUSED = 2
"""Exit code of an engine that can't run what it was given, and has said why: of one that never opened, the next one
would say the same.
"""
_LOOK_S = 0.02
_LEAVES_S = 10.0
"""How long the connections of a process that was killed may take to end."""


class EngineUnit:
    """The engine of the models of `links`, by name, in the order of `options`. Its sockets and documents are in
    `directory`. It is started in one of `turns`, which it has until its models are there. Where it ends before it was
    told to, another one goes on with what it had.
    """

    def __init__(
        self, options: UnitOptions, links: Mapping[str, EngineLink], directory: Path, turns: asyncio.Semaphore
    ):
        self.options, self.links = options, links
        self.name = ", ".join(links)
        """Its models'."""
        self.has_opened = False
        """Whether an engine has had all its models there."""
        self._directory, self._turns = directory, turns
        self._sockets = [options.engine_socket or directory / f"engine-{model.place}" for model in options.models]
        alone = len(options.models) == 1
        self._arguments = [*options.arguments, "--socket", str(self._sockets[0] if alone else directory)]
        self._documents = dict(options.documents)
        """What the next engine reads, by option."""
        self._engine: EngineProcess | JoinedEngine
        if options.engine_socket:
            self._engine = JoinedEngine(next(iter(links.values())))
        else:
            self._engine = EngineProcess(self._arguments, options.ranks, options.environment)
        self._started_s = 0.0
        """When the engine was started, by the monotonic clock."""
        self._failures = 0
        for link in links.values():
            link.on_stepped = self._stepped

    @property
    def opened(self) -> bool:
        """Whether every model can be asked."""
        return all(link.opened for link in self.links.values())

    async def listen(self) -> None:
        """Let the engine connect."""
        for link, path in zip(self.links.values(), self._sockets, strict=True):
            await link.listen(path)

    async def run(self) -> int:
        """Run engines, one after the other: until one can't be replaced, whose exit code this is, or 0 once no more is
        asked of them.
        """
        while True:
            async with self._turns:
                self._pass_documents()
                self._started_s = time.monotonic()
                await self._engine.start()
                ending = asyncio.ensure_future(self._engine.wait())
                while not ending.done() and not self.opened:
                    await asyncio.sleep(_LOOK_S)
            opened = self.opened
            self.has_opened = self.has_opened or opened
            code = await self._until(ending)
            await self._engine.kill()
            await self._disconnected()
            if self._over:
                return 0
            self._failures += 1
            refused = code == _REFUSED and not self.has_opened
            if refused or not self._may_follow(opened) or self._failures >= _MOST_RESTARTS:
                return code or 1  # it has said why
            self._follows()
            text = f"the engine of {self.name} has ended (exit code {code}): it is started again"
            output.note(text, event="engine_restart", code=code)

    def fail(self) -> None:
        """End its models' requests with an error, and those that come: there will be no engine any more."""
        for link in self.links.values():
            link.fail()

    async def give_up(self) -> None:
        """End the engine at once, after `run` was cancelled; another unit's goes on with its models' requests."""
        await self._engine.kill()
        await self._disconnected()

    async def stop(self, limit_s: float = DRAIN_LIMIT_S) -> None:
        """End the engine; one that can still be told ends by itself, within `limit_s`."""
        told = [link.drain() for link in self.links.values()]
        self._engine.told = all(told)
        await self._engine.stop(limit_s)

    async def close(self) -> None:
        """Close the sockets."""
        for link in self.links.values():
            await link.close()

    @property
    def _over(self) -> bool:
        """Whether an engine that has ended had nothing left to do."""
        return False

    def _may_follow(self, opened: bool) -> bool:
        """Whether another engine may follow one that has ended, which had `opened` or not."""
        return opened

    def _follows(self) -> None:
        """Another engine is about to follow one that has ended."""

    async def _until(self, ending: "asyncio.Future[int]") -> int:
        """Wait for the engine's end."""
        return await ending

    def _lost(self) -> None:
        """Its models have no engine now."""
        for link in self.links.values():
            link.ended()

    def _stepped(self, stepped: Stepped) -> None:
        if stepped.ended:
            self._failures = 0

    async def _disconnected(self) -> None:
        """Take what a process that has ended had sent: it counts, and the next one can't connect before. One that waits
        for a disk or a device isn't waited for.
        """
        self._lost()
        until_s = time.monotonic() + _LEAVES_S
        while any(link.connected for link in self.links.values()):
            if time.monotonic() > until_s:
                for link in self.links.values():
                    link.disconnect()
            await asyncio.sleep(_LOOK_S)

    def _pass_documents(self) -> None:
        """Write what the next engine reads. Its schedules may be for shorter requests than were accepted."""
        for option, noun in self._documents.items():
            path = self._directory / f"{option.strip('-')}-{self.options.models[0].place}.json"
            document.write(path, with_room_for(self.links, noun))
            if option not in self._arguments:
                self._arguments += [option, ""]
            self._arguments[self._arguments.index(option) + 1] = str(path)
