"""The engines of a plan, started and supervised by this process, which has a link to each model's engine."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path

from xcore.console import output
from xcore.errors import InputError
from xserver.engines.engine_link import EngineLink
from xserver.engines.engine_process import DRAIN_LIMIT_S
from xserver.engines.engine_unit import EngineUnit
from xserver.engines.unit_options import EngineUnitOptions

_LOOK_S = 0.02
_SPEED_LIMIT_S = 60.0
"""Most seconds for which finished engines may time their layers."""


class StartedUnit(EngineUnit):
    """An engine of a run; its requests fail if it can't be replaced. `links` are those of all models."""

    def __init__(
        self, options: EngineUnitOptions, links: Mapping[str, EngineLink], directory: Path, turns: asyncio.Semaphore
    ):
        super().__init__(options, {str(m.name): links[str(m.name)] for m in options.models}, directory, turns)

    async def run(self) -> int:
        """Run as `EngineUnit` does; fail the requests when it ends."""
        try:
            code = await super().run()
        except (InputError, OSError) as error:  # its requests would wait for ever
            if self.has_opened:  # else `started` reports it
                output.note(f"the engine of {self.name} could not be restarted: {error}", event="engine_failed")
            self.fail()
            raise
        self.fail()
        return code

    async def stop(self, limit_s: float = DRAIN_LIMIT_S) -> None:
        """Stop as `EngineUnit` does, and receive the engine's last messages."""
        await super().stop(limit_s)
        await self._disconnected()


@contextlib.asynccontextmanager
async def started(
    units: Sequence[EngineUnitOptions], starts: int, end_in_turn: bool = False
) -> AsyncIterator[dict[int, EngineLink]]:
    """Yield links to the engines by their models' places, once all have opened; `starts` engines may start at once.

    The engines stop at the end of the context, all at once or one after the other. This affects the speed that they
    report.

    Raises:
        InputError: An engine doesn't start.
    """
    with tempfile.TemporaryDirectory(prefix="exegpt-run-", ignore_cleanup_errors=True) as name:  # 0700
        of_all = {model.place: EngineLink() for unit in units for model in unit.models}
        turns = asyncio.Semaphore(starts)
        engines = [
            StartedUnit(unit, {str(m.name): of_all[m.place] for m in unit.models}, Path(name), turns) for unit in units
        ]
        for engine in engines:
            await engine.listen()
        running, limit_s = [asyncio.ensure_future(engine.run()) for engine in engines], DRAIN_LIMIT_S
        try:
            await _all_opened(engines, running)
            yield of_all
            limit_s = _SPEED_LIMIT_S
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for ending in [[engine] for engine in engines] if end_in_turn else [engines]:
                await asyncio.gather(*(engine.stop(limit_s) for engine in ending))
            await asyncio.gather(*(engine.close() for engine in engines))


async def _all_opened(engines: Sequence[StartedUnit], running: Iterable["asyncio.Future[int]"]) -> None:
    while not all(engine.opened for engine in engines):
        for engine, task in zip(engines, running, strict=True):
            if task.done():
                raise InputError(
                    f"The engine of {engine.name} could not be started (exit code {task.result()}): see the "
                    "messages above."
                )
        await asyncio.sleep(_LOOK_S)
