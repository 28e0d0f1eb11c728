"""The supervisor: errors of what runs beside it, and changes of the plan while it ends. Its units are stand-ins."""

import asyncio
import socket
from types import SimpleNamespace
from typing import ClassVar

import pytest

from exegpt.app.engines.unit_options import UnitModel, UnitOptions
from exegpt.server import supervisor
from exegpt.server.frontends import Frontends
from exegpt.server.supervisor import Supervisor
from tests.server.test_unit import EngineLink, frontends


class Unit:
    """Runs until it is stopped; `error` is what it raises instead. Its engine takes a while to end."""

    error = None
    made: ClassVar[list["Unit"]] = []

    def __init__(self, options, served, directory, where, resume, turns):
        self.options, self.frontends, self.state = options, served, "made"
        self.made.append(self)

    async def listen(self):
        pass

    async def run(self):
        if self.error:
            raise self.error
        self.state = "runs"
        await asyncio.Event().wait()

    async def give_up(self):
        await asyncio.sleep(0.1)
        self.state = "given up"

    async def stop(self):
        self.state = "stopped"

    async def close(self):
        pass


class Http:
    should_exit = False

    async def serve(self, sockets):
        while not self.should_exit:
            await asyncio.sleep(0.01)
        sockets[0].close()


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(supervisor, "Unit", Unit)
    monkeypatch.setattr(supervisor, "bind", lambda _: socket.socket())
    monkeypatch.setattr(Unit, "made", [])
    return Unit.made


def unit(follows):
    return UnitOptions((UnitModel(None),), (), follows=(follows,))


def supervising(model, tmp_path, plans=None):
    """Of a model that follows plan "first"; others by name."""
    (frontend,) = frontends(model, EngineLink())
    options = SimpleNamespace(
        units=(unit("first"),), starts=1, plan=None, replan=plans, host="here", port=1, drain_timeout_s=1.0
    )
    supervised = Supervisor(Frontends([frontend]), options, tmp_path)
    return supervised


def test_an_error_of_a_unit_ends_the_server(model, tmp_path, made, monkeypatch):
    """Where no process can be started, say: no client is to wait for an engine that never comes."""
    monkeypatch.setattr(Unit, "error", OSError("no more processes"))

    async def run():
        await asyncio.wait_for(supervising(model, tmp_path).run(Http()), 2.0)

    with pytest.raises(OSError, match="no more processes"):
        asyncio.run(run())
    assert [one.state for one in made] == ["stopped"]


def test_an_error_as_the_plan_changes_ends_the_server(model, tmp_path, made, monkeypatch):
    """Its models have no engines any more."""
    supervised = supervising(model, tmp_path, lambda plan: (unit(plan),))

    async def run():
        running = asyncio.ensure_future(supervised.run(Http()))
        await asyncio.sleep(0.05)

        def full(*_):
            raise OSError("no space left on device")

        monkeypatch.setattr(supervisor, "Unit", full)
        supervised.follow("second")
        await asyncio.wait_for(running, 2.0)

    with pytest.raises(OSError, match="no space"):
        asyncio.run(run())


@pytest.mark.parametrize("changes", [1, 2])
def test_engines_of_a_plan_that_is_followed_as_the_server_ends_are_stopped(model, tmp_path, made, changes):
    supervised = supervising(model, tmp_path, lambda plan: (unit(plan),))

    async def run():
        running = asyncio.ensure_future(supervised.run(Http()))
        await asyncio.sleep(0.05)
        for number in range(changes):
            supervised.follow(f"plan {number}")
        await asyncio.sleep(0.02)
        supervised.interrupt()
        supervised.interrupt()
        await asyncio.wait_for(running, 2.0)
        await asyncio.sleep(0.3)

    asyncio.run(run())
    assert [one.state for one in made] == [*["given up"] * changes, "stopped"]
