"""The engines of nodes that start and stop with the stages of a plan, behind links that stay open."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from xcore.errors import InputError
from xcore.requests.engine_protocol import Opened
from xmulti.serving.started import StartedUnit
from xserver.engines.engine_link import EngineLink
from xserver.engines.unit_options import EngineUnitOptions


class StageEngines:
    """One engine for each running node.

    Requests to a node wait in its link until an engine has opened. Requests that a stopped engine had begun continue in
    the next one: their prompts are prefilled together with the generated tokens. `starts` engines may start at once.
    `on_opened` is called with a node whenever one of its engines has opened.
    """

    def __init__(self, nodes: Sequence[str], directory: Path, starts: int, on_opened: Callable[[str, Opened], object]):
        self.links = {name: EngineLink() for name in nodes}
        for name, link in self.links.items():
            link.on_opened = partial(on_opened, name)
        self._directory, self._turns = directory, asyncio.Semaphore(starts)
        self._units: dict[str, tuple[StartedUnit, asyncio.Task[int]]] = {}

    async def listen(self) -> None:
        """Let engines connect."""
        for place, link in enumerate(self.links.values()):
            await link.listen(self._directory / f"engine-{place}")

    @property
    def tasks(self) -> "set[asyncio.Task[int]]":
        """One task for each engine; it ends if the engine can't be started or restarted."""
        return {task for _, task in self._units.values()}

    def check(self) -> None:
        """Check that the engines run.

        Raises:
            InputError: An engine can't be started or restarted.
        """
        for name, (_, task) in self._units.items():
            if task.done():
                raise InputError(
                    f"The engine of {name} could not be started (exit code {task.result()}): see the messages above."
                )

    def start(self, name: str, options: EngineUnitOptions) -> None:
        """Start the engine of a node that has none."""
        unit = StartedUnit(options, self.links, self._directory, self._turns)
        self._units[name] = unit, asyncio.ensure_future(unit.run())

    async def stop(self, names: Collection[str]) -> None:
        """Stop the engines of these nodes; their devices are free then."""
        stopped = [self._units.pop(name) for name in names if name in self._units]
        for _, task in stopped:
            task.cancel()
        await asyncio.gather(*(task for _, task in stopped), return_exceptions=True)
        await asyncio.gather(*(unit.give_up() for unit, _ in stopped))

    async def close(self) -> None:
        """Stop all engines, and close the sockets."""
        await self.stop(list(self._units))
        await asyncio.gather(*(link.close() for link in self.links.values()))
