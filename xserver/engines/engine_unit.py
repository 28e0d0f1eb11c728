"""Engine units: the models of one engine process, with starts and restarts of that process."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from xcore.batching.kv_capacity import grow_to_fit
from xcore.batching.shared_pool import merged_pools
from xcore.console import output
from xcore.requests.engine_protocol import Stepped
from xcore.spec import Spec
from xcore.specs.cluster_plan import Plan
from xcore.specs.schedule import Schedule
from xserver.engines.engine_link import EngineLink
from xserver.engines.engine_process import DRAIN_LIMIT_S, EngineProcess, JoinedEngine
from xserver.engines.unit_options import EngineUnitOptions
from xserver.nodes.node_engine import NodeEngine
from xserver.nodes.node_link import NodeLink

_MOST_RESTARTS = 5
"""Number of engine ends in a row, without a completed request between them, after which the unit stops."""
_MOST_LOST = 3
"""Number of engine ends in a row, without a token between them, after which a request ends with an error.

It may be the cause: then the others are answered by the next engine.
"""
_REFUSED = (2, 3)
"""Exit codes of an engine that can't run its input, or keep a bound, and has printed the reason.

If the engine never opened, the next one would fail in the same way.
"""
_LOOK_S = 0.02
_LEAVES_S = 10.0
"""Time limit for the connections of a killed process to close."""


class EngineUnit:
    """The engine of the models of `links`, by name, in the order of `options`; its files are in `directory`.

    The engine starts in one of `turns`, which it holds until its models have opened. If it ends unexpectedly, another
    engine continues its sequences. With a `node`, its launcher starts the engine; without, this process does.
    """

    def __init__(
        self,
        options: EngineUnitOptions,
        links: Mapping[str, EngineLink],
        directory: Path,
        turns: asyncio.Semaphore,
        node: NodeLink | None = None,
    ):
        self.options, self.links, self.node = options, links, node
        self.name = ", ".join(links)
        """The names of its models."""
        self.has_opened = False
        """Whether an engine has opened all its models."""
        self._directory, self._turns = directory, turns
        self._sockets = [options.engine_socket or directory / f"engine-{model.place}" for model in options.models]
        alone = len(options.models) == 1
        self._arguments = [*options.arguments, "--socket", str(self._sockets[0] if alone else directory)]
        self._documents = dict(options.documents)
        """The documents for the next engine, by option."""
        self._engine: EngineProcess | JoinedEngine | NodeEngine
        if node:
            self._engine = NodeEngine(node, options, links, self._sockets)
        elif options.engine_socket:
            self._engine = JoinedEngine(next(iter(links.values())))
        else:
            files = directory / str(options.models[0].place)
            self._engine = EngineProcess(self._arguments, options.ranks, options.environment, files)
        self._started_s = 0.0
        """When the engine was started, by the monotonic clock."""
        self._failures = 0
        self._has_answered = False
        """Whether a sequence has ended on one of its engines."""
        for link in links.values():
            link.on_stepped = self._stepped

    @property
    def opened(self) -> bool:
        """Whether every model has an engine."""
        return all(link.opened for link in self.links.values())

    async def listen(self) -> None:
        """Let the engine connect."""
        for link, path in zip(self.links.values(), self._sockets, strict=True):
            await link.listen(path)

    async def run(self) -> int:
        """Run engines, one after the other, until one can't be replaced or there is no more work.

        Returns the exit code of the engine that can't be replaced, or 0.
        """
        while True:
            if self.node and not self.node.up:
                await self._reach(self.node)
            async with self._turns:
                self._started_s = time.monotonic()
                await self._engine.start(self._next_documents)
                ending = asyncio.ensure_future(self._engine.wait())
                while not ending.done() and not self.opened:
                    await asyncio.sleep(_LOOK_S)
            opened = self.opened
            self.has_opened = self.has_opened or opened
            code = await self._until(ending)
            lost = self._engine.lost
            await self._engine.kill()
            await self._disconnected()
            if self._over:
                return 0
            if lost:  # the engine itself has not failed
                self._follows()
                continue
            self._failures += 1
            refused = code in _REFUSED and not self.has_opened
            if refused or not self._may_follow(opened) or self._failures >= _MOST_RESTARTS:
                return code or 1  # the engine has printed the reason
            self._follows()
            self._fail_suspects()
            text = f"the engine of {self.name} has ended (exit code {code}) and is restarted"
            output.note(text, event="engine_restart", code=code)

    def fail(self) -> None:
        """End all present and future requests to the unit's models with an error: there will be no further engine."""
        for link in self.links.values():
            link.fail()

    async def give_up(self) -> None:
        """Kill the engine after `run` was cancelled; the engine of another unit continues its models' requests."""
        await self._engine.kill()
        await self._disconnected()

    async def stop(self, limit_s: float = DRAIN_LIMIT_S) -> None:
        """End the engine; if it is connected, it drains and ends on its own within `limit_s`."""
        told = [link.drain() for link in self.links.values()]
        self._engine.told = all(told)
        await self._engine.stop(limit_s)

    async def close(self) -> None:
        """Close the sockets."""
        for link in self.links.values():
            await link.close()

    @property
    def _over(self) -> bool:
        """Whether an engine that has ended had no work left."""
        return False

    def _may_follow(self, opened: bool) -> bool:
        """Return whether another engine may replace an ended one; `opened`: whether the ended one had opened."""
        return opened

    def _follows(self) -> None:
        """Prepare for another engine after one has ended."""

    def _fail_suspects(self) -> None:
        """End the requests with an error that waited at the ends of several engines, if others were answered before.

        Otherwise the engines may fail whatever they run, and those of an earlier plan may answer the requests.
        """
        failed = sum(link.lost_engine(_MOST_LOST) for link in self.links.values()) if self._has_answered else 0
        if failed:
            text = f"{failed} sequences end with an error: {_MOST_LOST} engines ended while they waited for a token"
            output.note(text, event="requests_failed", sequences=failed)

    async def _reach(self, node: NodeLink) -> None:
        """Wait until the node's launcher can start engines."""
        await node.reachable()

    async def _until(self, ending: "asyncio.Future[int]") -> int:
        """Wait for the engine's end."""
        return await ending

    def _lost(self) -> None:
        """Record that the unit's models have no engine now."""
        for link in self.links.values():
            link.ended()

    def _stepped(self, stepped: Stepped) -> None:
        if stepped.ended:
            self._failures, self._has_answered = 0, True

    async def _disconnected(self) -> None:
        """Wait for the messages and the end of the connections of a process that has ended.

        These messages count, and the next engine can't connect before they end. A process that is blocked on a disk or
        a device is not waited for.
        """
        self._lost()
        until_s = time.monotonic() + _LEAVES_S
        while any(link.connected for link in self.links.values()):
            if time.monotonic() > until_s:
                for link in self.links.values():
                    link.disconnect()
            await asyncio.sleep(_LOOK_S)

    @property
    def _next_documents(self) -> dict[str, Spec]:
        """The documents for the next engine, with KV blocks for the accepted requests.

        Its schedules may be for shorter requests than these.
        """
        links = {model.place: self.links[name] for model, name in zip(self.options.models, self.links, strict=True)}
        return {option: with_room_for(links, spec) for option, spec in self._documents.items()}


def with_room_for(links: Mapping[int, EngineLink], spec: Spec) -> Spec:
    """Return a schedule or a plan with at least the KV blocks that each unanswered request needs.

    A schedule is for the only link of `links`; a plan has the models of `links` at these places. Requests have been
    accepted, but the schedule may be for shorter ones.
    """
    if isinstance(spec, Schedule):
        (link,) = links.values()
        return _with_room(spec, link)
    return _plan_with_room(spec, links) if isinstance(spec, Plan) else spec


def _plan_with_room(plan: Plan, links: Mapping[int, EngineLink]) -> Plan:
    ours = [plan.models[place] for place in links]
    have = [model.schedule.kv_blocks for model in ours]
    if ours[0].share and ours[0].share.pool == "merged":  # one request may use the blocks of all models
        have = [pool.total for pool in merged_pools([model.schedule for model in ours])[1]]
    models = list(plan.models)
    for (place, link), model, blocks in zip(links.items(), ours, have, strict=True):
        schedule = _with_room(model.schedule, link)
        if schedule.kv_blocks > blocks:
            models[place] = replace(model, schedule=schedule)
    return replace(plan, models=tuple(models))


def _with_room(schedule: Schedule, link: EngineLink) -> Schedule:
    return grow_to_fit(schedule, [output.request for output in link.outputs.values()])
