"""An engine of another node, like `EngineProcess`: the node's launcher starts and ends it."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from xcore import document
from xcore.console import output
from xcore.requests.starting import say_starting
from xcore.spec import Spec
from xserver.engines.engine_link import EngineLink
from xserver.engines.unit_options import EngineUnitOptions
from xserver.nodes.launch_protocol import EndEngine, LaunchedModel, StartEngine
from xserver.nodes.node_link import NodeLink

_ENDS_S = 15.0
"""Most seconds for a launcher to end an engine."""


class NodeEngine:
    """An engine of the launcher of `node`; `links` are those of its models, by name, in the order of `options`.

    `sockets` are the paths of the links' sockets: beside them is what the engine does before it opens.
    """

    restarts = True

    def __init__(
        self, node: NodeLink, options: EngineUnitOptions, links: Mapping[str, EngineLink], sockets: list[Path]
    ):
        self._node, self._options = node, options
        places = [model.place for model in options.models]
        self._links = dict(zip(places, links.values(), strict=True))
        self._sockets = dict(zip(places, sockets, strict=True))
        self._names = list(links)
        self._number: int | None = None
        self._end: asyncio.Future[int] | None = None
        self._attaching: set[asyncio.Task[None]] = set()
        self.lost = False
        self.told = False

    async def start(self, documents: Mapping[str, Spec]) -> None:
        """Let the launcher start the engine; `wait` returns when that is impossible."""
        at, schedule, plan = self._options.at, documents.get("--schedule"), documents.get("--plan")
        assert at, "the options of a node's engine"
        self.lost, self._end = False, asyncio.get_running_loop().create_future()
        self._number = self._node.add(self)
        models = zip(self._names, self._options.models, strict=True)
        self._node.send(
            StartEngine(
                self._number,
                tuple(LaunchedModel(name, model.place, str(model.directory.absolute())) for name, model in models),
                at.devices,
                at.in_use,
                self._options.arguments,
                document.to_dict(schedule) if schedule else None,
                document.to_dict(plan) if plan else None,
                at.unit,
            )
        )
        if not self._node.up:  # it was lost meanwhile
            self.gone()

    async def wait(self) -> int:
        """Return the exit code when the engine has ended, or its node is lost."""
        assert self._end, "an engine that was started"
        return await asyncio.shield(self._end)

    async def stop(self, limit_s: float) -> None:
        """End the engine; a draining engine gets `limit_s` to end on its own."""
        if self.told:
            await self._ended_within(limit_s)
        await self.kill()

    async def kill(self) -> None:
        """Let the launcher end the engine."""
        if self._number is not None and self._end and not self._end.done():
            self._node.send(EndEngine(self._number))
            await self._ended_within(_ENDS_S)

    async def _ended_within(self, limit_s: float) -> None:
        if self._end and not self._end.done():
            await asyncio.wait({self._end}, timeout=limit_s)

    def connected(self, place: int, connection: int) -> None:
        """Let a model's link serve a connection of the engine."""
        task = asyncio.ensure_future(self._serve(place, connection))
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _serve(self, place: int, connection: int) -> None:
        link, number = self._links.get(place), self._number
        if link is None:
            return
        try:
            reader, writer = await self._node.attach(connection)
        except OSError as error:
            output.note(f"an engine of {self._node.address} can't be attached to: {error}", event="node_lost")
            self._lose(number)
            return
        try:
            await link.serve(reader, writer, self._node.ahead_s)
        except (ValueError, LookupError, TypeError) as error:
            output.note(f"an engine of {self._node.address} has sent a message that can't be read: {error}")

    def _lose(self, number: int | None) -> None:
        """Let the launcher end an engine that can't be used, which has not failed itself."""
        if number is not None and number == self._number and self._end and not self._end.done():
            self.lost = True
            self._node.send(EndEngine(number))

    def starts(self, place: int, text: str) -> None:
        """Record what the engine does before it opens."""
        if path := self._sockets.get(place):
            say_starting(path, text)

    def ended(self, code: int, reason: str) -> None:
        """Record that the engine has ended, or could not be started."""
        if reason:
            output.note(f"{self._node.address} has not started the engine of {', '.join(self._names)}: {reason}")
        if self._end and not self._end.done():
            self._end.set_result(code)

    def gone(self) -> None:
        """Record that the launcher was lost, and the engine with it."""
        self.lost = True
        for task in self._attaching:  # another launcher may have a connection with this number
            task.cancel()
        for link in self._links.values():
            link.disconnect()
        self.ended(1, "")
