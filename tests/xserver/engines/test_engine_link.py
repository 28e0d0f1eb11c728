"""The frontend's end of a socket that no engine is behind any more."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.xcore import small_specs
from tests.xrunner import cells
from xcore.batching.prefix_pool import extend_keys
from xcore.errors import InputError
from xcore.requests.engine_protocol import (
    BEGIN,
    FROM_FRONTEND,
    LOADS,
    Changed,
    Follow,
    Frames,
    Opened,
    framed,
    short_keys,
)
from xcore.requests.request import Request
from xmulti.plans.engine_client import EngineClient
from xrunner.core import inbox
from xrunner.core.driver import Options
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.models.create import create_model
from xrunner.rank.warm_up import Extent
from xserver.engines.engine_link import EngineLink


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_request_of_an_engine_that_has_failed_for_good_fails(before):
    """Whenever it comes: a model's calls may wait for another model's while its own engine fails."""

    async def run():
        link = EngineLink()
        asking = EngineClient({"a": link}, {"a": Path()}, None, lambda done: None)
        if not before:
            link.fail()
        asked = asyncio.ensure_future(asking.ask("a", Request("1", (1,), 5)))
        await asyncio.sleep(0)
        if before:
            link.fail()
        assert link.outputs == {}
        await asyncio.wait_for(asked, 1.0)

    with pytest.raises(InputError, match="its engine has ended"):
        asyncio.run(run())


@pytest.fixture
def engine(tmp_path):
    create_model(tmp_path / "llama", "llama", kv_heads=2, seed=11, **cells.SIZES)
    model = load_model(tmp_path / "llama")
    plan = cells.schedule(model.spec, "orca", kv_blocks=40)
    engine = Engine(model, plan)
    engine.open(Extent.within(plan, 60, 40))
    yield engine
    engine.close()


def test_an_engine_that_loads_other_layers_is_not_silent(engine, tmp_path):
    """A large model takes longer than an engine may be silent: it would be killed while it loads."""
    opened = Opened(engine.schedule, small_specs.profile(), None, (), 0.0)

    def serve():
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(tmp_path / "engine"))
        ours = inbox.Inbox(connection)
        return inbox.serve(engine, ours, opened), ours

    async def run():
        link = EngineLink()
        await link.listen(tmp_path / "engine")
        serving = asyncio.ensure_future(asyncio.to_thread(serve))
        link.add(Request("", (5, 6), 30, True))
        while not link.outputs["0"].tokens:
            await asyncio.sleep(0.001)
        link.follow(replace(engine.schedule, kv_blocks=50))
        _, ours = await serving
        await asyncio.sleep(0.1)
        silent_s = [link.silent_s]
        ours.send(opened)
        await asyncio.sleep(0.1)
        silent_s.append(link.silent_s)
        ours.close()
        await link.close()
        return silent_s

    loading_s, waiting_s = asyncio.run(asyncio.wait_for(run(), 30.0))
    assert loading_s == 0 and waiting_s > 0


def test_the_next_engine_has_room_for_what_was_accepted(engine, tmp_path):
    """Its schedule may be for shorter requests: this one was refused by it in the midst of its answer."""
    opened = Opened(engine.schedule, small_specs.profile(), None, (), 0.0)
    shorter = cells.schedule(engine.schedule.model.spec, "chunked", kv_blocks=1)

    def serve():
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(tmp_path / "engine"))
        return inbox.serve(engine, inbox.Inbox(connection), opened)

    async def run():
        link = EngineLink()
        await link.listen(tmp_path / "engine")
        serving = asyncio.ensure_future(asyncio.to_thread(serve))
        output = link.add(Request("", (5,) * 20, 40, True))
        while not output.tokens:
            await asyncio.sleep(0.001)
        link.follow(shorter)
        moved = await serving
        await link.close()
        return moved, replace(output.request, output_ids=tuple(output.tokens))

    moved, request = asyncio.run(asyncio.wait_for(run(), 30.0))
    assert moved == replace(shorter, kv_blocks=moved.kv_blocks)
    (result,) = Engine(engine.model, moved).run([request]).results
    assert len(result.output_ids) == 40


def test_what_the_engine_refuses_says_whether_it_is_too_long(engine, tmp_path):
    """For its cache or its context; a token that the model doesn't have is another fault."""
    opened = Opened(engine.schedule, small_specs.profile(), None, (), 0.0)

    def serve():
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(tmp_path / "engine"))
        inbox.serve(engine, inbox.Inbox(connection), opened)

    async def run():
        link = EngineLink()
        await link.listen(tmp_path / "engine")
        serving = asyncio.ensure_future(asyncio.to_thread(serve))
        prompts = ((5,) * 90, 40), ((5, 10**6), 4), ((5, 6), 4)
        outputs = [link.add(Request("", prompt, most, True)) for prompt, most in prompts]
        while not all(output.ended for output in outputs):
            await asyncio.sleep(0.001)
        link.drain()
        await serving
        await link.close()
        return [(bool(output.ended.refused), output.ended.too_long) for output in outputs]

    refused = asyncio.run(asyncio.wait_for(run(), 30.0))
    assert refused == [(True, True), (True, False), (False, False)]


class AskedEngine:
    """An engine's end of a link's socket: `asked` are the schedules that it was to follow since it opened last."""

    def __init__(self, schedule):
        self.opened, self.asked = Opened(schedule, small_specs.profile(), None, (), 0.0), []

    async def connect(self, path):
        self._reader, self._writer = await asyncio.open_unix_connection(path)
        self._taking = asyncio.ensure_future(self._take())

    async def _take(self):
        frames = Frames(FROM_FRONTEND)
        while data := await self._reader.read(2**16):
            for order in frames.feed(data):
                if order == BEGIN:
                    self.asked = []
                elif isinstance(order, Follow):
                    self.asked.append(order.schedule)

    async def send(self, *messages):
        self._writer.writelines([framed(message) for message in messages])
        await asyncio.sleep(0.05)

    def close(self):
        self._writer.close()


@pytest.mark.parametrize("in_place", [False, True], ids=["as it was loaded", "another in place"])
def test_an_engine_is_asked_no_more_for_what_it_cannot_follow(tmp_path, in_place):
    """Else it would load for ever. What was asked for behind it, which the engine hasn't seen, comes again; else the
    schedule that had taken over in place, where there was one.
    """
    held = small_specs.schedule("orca")
    changed, impossible, later = (small_specs.changed(held, max_num_seqs=n, kv_blocks=n) for n in (7, 6, 5))

    async def run():
        link, engine = EngineLink(), AskedEngine(held)
        await link.listen(tmp_path / "engine")
        await engine.connect(tmp_path / "engine")
        await engine.send(engine.opened)
        if in_place:
            link.follow(changed)
            await engine.send(Changed(changed))
        link.follow(impossible)
        refusal = replace(engine.opened, refused=replace(impossible, kv_blocks=99))
        await engine.send(LOADS, refusal)
        again = list(engine.asked)
        link.follow(impossible)
        await engine.send(LOADS)
        link.follow(later)
        await engine.send(refusal)
        engine.close()
        await link.close()
        return again, engine.asked

    assert asyncio.run(run()) == ([changed] if in_place else [], [later])


def test_a_schedule_that_came_as_the_engine_loaded_another_by_itself_comes_again(tmp_path):
    """Though that one can't be had, and the engine is as it was."""
    held = small_specs.schedule("orca")
    found, asked = small_specs.changed(held, max_num_seqs=7, kv_blocks=10**9), small_specs.changed(held, max_num_seqs=5)

    async def run():
        link, engine = EngineLink(), AskedEngine(held)
        await link.listen(tmp_path / "engine")
        await engine.connect(tmp_path / "engine")
        await engine.send(engine.opened, LOADS)
        link.follow(asked)
        await engine.send(replace(engine.opened, refused=found))
        engine.close()
        await link.close()
        return engine.asked

    assert asyncio.run(run()) == [asked]


def test_the_link_follows_the_cache_of_an_engine(tmp_path):
    """It has the blocks that a later request finds, and loses them with the engine."""
    create_model(tmp_path / "llama", "llama", kv_heads=2, seed=11, **cells.SIZES)
    model = load_model(tmp_path / "llama")
    plan = cells.schedule(model.spec, "orca", kv_blocks=40, prefix_caching=True)
    prompt, keys = tuple(range(5, 45)), list[bytes]()
    extend_keys(keys, prompt, plan.block_size)
    short = short_keys(keys).tolist()
    opened = Opened(plan, small_specs.profile(), None, (), 0.0)

    def serve(count):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / "engine"))
            engine = Engine(model, plan)
            engine.open(Extent.within(plan, 60, 40), Options(pins=True))
            session = inbox.Session(engine, inbox.Inbox(connection), opened)
            while engine._added < count or not engine.idle:
                session.take()
                session.send(engine.step() if engine.busy else [])

    async def ended(output):
        while output.ended is None:
            await asyncio.sleep(0.001)
        return output

    async def run():
        link = EngineLink()
        await link.listen(tmp_path / "engine")
        serving = asyncio.ensure_future(asyncio.to_thread(serve, 2))
        seen = [link.hit(short)]
        first = await ended(link.add(Request("", prompt, 3, True), keys=short))
        seen.append(link.hit(short))
        again = await ended(link.add(Request("", prompt, 3, True), keys=short))
        await serving
        await asyncio.sleep(0.05)
        resumed = link.add(Request("", prompt, 3, True), keys=short)
        resumed.held = 32
        serving = asyncio.ensure_future(asyncio.to_thread(serve, 1))
        await ended(resumed)
        await serving
        await link.close()
        return seen, [(output.held, output.cached_tokens) for output in (first, again, resumed)]

    seen, found = asyncio.run(asyncio.wait_for(run(), 30.0))
    assert seen == [0, 2] and found == [(0, 0), (32, 32), (0, 0)]
