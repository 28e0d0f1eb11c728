"""The engines of a plan, started and watched by this process, which has a link to each model's."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path

from exegpt import document
from exegpt.app.engines.engine_link import EngineLink
from exegpt.app.engines.engine_process import EngineProcess
from exegpt.app.engines.unit_options import UnitOptions
from exegpt.errors import InputError
from exegpt.report import output

_MOST_RESTARTS = 5
"""Ends of an engine in a row, without a request's end between them, after which its requests fail."""
_LOOK_S = 0.02
_SPEED_LIMIT_S = 60.0
"""How long engines that have done all may time their layers."""


class StartedUnit:
    """One engine process for the models of `links`; where it ends before it was told to, another one goes on with what
    it had.
    """

    def __init__(self, options: UnitOptions, directory: Path, links: Mapping[str, EngineLink]):
        self.links = {str(model.name): links[str(model.name)] for model in options.models}
        self._sockets = [directory / f"engine-{model.place}" for model in options.models]
        alone = len(options.models) == 1
        arguments = [*options.arguments, "--socket", str(self._sockets[0] if alone else directory)]
        for option, noun in options.documents.items():
            path = directory / f"{option.strip('-')}-{options.models[0].place}.json"
            document.write(path, noun)
            arguments += [option, str(path)]
        self.process = EngineProcess(arguments, options.ranks, options.environment)
        self._failures = 0
        for link in self.links.values():
            link.on_stepped = lambda stepped: self._succeeded() if stepped.ended else None

    def _succeeded(self) -> None:
        self._failures = 0

    @property
    def name(self) -> str:
        """Of its models."""
        return ", ".join(self.links)

    @property
    def opened(self) -> bool:
        """Whether every model can be asked."""
        return all(link.opened for link in self.links.values())

    async def listen(self) -> None:
        """Let the engine connect."""
        for link, path in zip(self.links.values(), self._sockets, strict=True):
            await link.listen(path)

    async def run(self, turns: asyncio.Semaphore) -> int:
        """Run engines, one after the other, until one can't be replaced: its exit code. Each starts in one of `turns`,
        which it has until its models are there.
        """
        while True:
            async with turns:
                await self.process.start()
                ending = asyncio.ensure_future(self.process.wait())
                while not ending.done() and not self.opened:
                    await asyncio.sleep(_LOOK_S)
            opened, code = self.opened, await ending
            await self.process.kill()
            for link in self.links.values():
                link.ended()
            self._failures += 1
            if not opened or self._failures >= _MOST_RESTARTS:
                for link in self.links.values():
                    link.fail()
                return code or 1  # it has said why
            output.note(f"the engine of {self.name} has ended (exit code {code}): it is started again")

    async def give_up(self) -> None:
        """End the engine at once, after `run` was cancelled; another unit's goes on with its models' requests."""
        await self.process.kill()
        for link in self.links.values():
            link.ended()
        while any(link.connected for link in self.links.values()):  # what it had sent counts
            await asyncio.sleep(_LOOK_S)

    async def stop(self) -> None:
        """Let the engine end, and close the sockets."""
        told = [link.drain() for link in self.links.values()]
        self.process.told = all(told)
        await self.process.stop()
        for link in self.links.values():
            await link.close()


@contextlib.asynccontextmanager
async def started(
    units: Sequence[UnitOptions], starts: int, end_in_turn: bool = False
) -> AsyncIterator[dict[str, EngineLink]]:
    """Links to the engines by model, once all have opened; `starts` may start at once. They end with the block, all at
    once or one after the other, which matters to the speed that they report. InputError where one doesn't start.
    """
    with tempfile.TemporaryDirectory(prefix="exegpt-run-", ignore_cleanup_errors=True) as name:  # 0700
        of_all = {str(model.name): EngineLink() for unit in units for model in unit.models}
        engines = [StartedUnit(unit, Path(name), of_all) for unit in units]
        turns = asyncio.Semaphore(starts)
        for engine in engines:
            await engine.listen()
        running = [asyncio.ensure_future(engine.run(turns)) for engine in engines]
        try:
            await _all_opened(engines, running)
            yield of_all
            for engine in engines:
                engine.process.drain_limit_s = _SPEED_LIMIT_S
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for ending in [[engine] for engine in engines] if end_in_turn else [engines]:
                await asyncio.gather(*(engine.stop() for engine in ending))


async def _all_opened(engines: Sequence[StartedUnit], running: Iterable["asyncio.Future[int]"]) -> None:
    while not all(engine.opened for engine in engines):
        for engine, task in zip(engines, running, strict=True):
            if task.done():
                raise InputError(f"The engine of {engine.name} doesn't start (exit code {task.result()}): see above.")
        await asyncio.sleep(_LOOK_S)
