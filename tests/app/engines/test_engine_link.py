"""The frontend's end of a socket that no engine is behind any more."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from exegpt.app.engines.engine_link import EngineLink
from exegpt.app.multimodel.asking import Asking
from exegpt.engine_protocol import Opened
from exegpt.errors import InputError
from exegpt.models import load_model
from exegpt.models.create import create_model
from exegpt.request import Request
from tests.exegpt import nouns
from tests.xrunner import cells
from xrunner.core import inbox
from xrunner.core.engine import Engine
from xrunner.rank.warm_up import Extent


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_request_of_an_engine_that_has_failed_for_good_fails(before):
    """Whenever it comes: a model's calls may wait for another model's while its own engine fails."""

    async def run():
        link = EngineLink()
        asking = Asking({"a": link}, {"a": Path()}, None, lambda done: None)
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
    opened = Opened(engine.schedule, nouns.profile(), None, (), 0.0)

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
    opened = Opened(engine.schedule, nouns.profile(), None, (), 0.0)
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
