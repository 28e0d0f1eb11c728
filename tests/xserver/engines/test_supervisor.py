"""The supervisor: errors of what runs beside it, and changes of the plan while it ends. Its units are stand-ins."""

import asyncio
import socket
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest

from tests.xmulti.serving.test_replanning import planned
from tests.xserver.engines.test_server_unit import EngineLink, frontends
from xcore import document
from xcore.errors import InputError
from xmulti.serving.replanning import Replanning
from xserver.engines import supervisor
from xserver.engines.supervisor import Supervisor
from xserver.engines.unit_options import EngineUnitOptions, UnitModel
from xserver.http.frontends import Frontends


class Unit:
    """Runs until it is stopped; `error` is what it raises instead, `errors` those of units that follow these, and
    `codes` with what those end soon, one after the other, that follow these; None: the next one runs. Its engine takes
    a while to end.
    """

    error = None
    errors: ClassVar[dict[str, Exception]] = {}
    codes: ClassVar[dict[str, list[int | None]]] = {}
    loading: ClassVar[set[str]] = set()
    """Those whose engines never open."""
    lasts_s = 0.08
    """How long those run that end with a code."""
    made: ClassVar[list["Unit"]] = []

    def __init__(self, options, served, directory, where, resume, turns, node, leave):
        self.options, self.frontends, self.state, self.failed = options, served, "made", False
        self.has_opened = False
        (self.name,) = options.follows
        self.made.append(self)

    async def listen(self):
        pass

    async def run(self):
        if error := self.error or self.errors.get(self.name):
            raise error
        self.state, self.has_opened = "runs", self.name not in self.loading
        if (left := self.codes.get(self.name)) and (code := left.pop(0)):
            await asyncio.sleep(self.lasts_s)
            return code
        await asyncio.Event().wait()

    def fail(self):
        self.failed = True

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
    monkeypatch.setattr(supervisor, "ServerUnit", Unit)
    monkeypatch.setattr(supervisor, "bind", lambda _: socket.socket())
    monkeypatch.setattr(Unit, "made", [])
    return Unit.made


def unit(follows):
    return EngineUnitOptions((UnitModel(None),), (), follows=(follows,))


def supervising(model, tmp_path, plans=None, plan=None):
    """Of a model that follows plan "first"; others by name, whose engines `plans` gives."""
    (frontend,) = frontends(model, EngineLink())
    of_plan = plans
    placed = plans and (lambda plan: (plan, of_plan(plan)))
    plans = {"replan": placed, "plan": plan, "watching": partial(Replanning, options=None)}
    host = {"host": "here", "port": 1, "residency": None}
    nodes = {"nodes": (), "node_token": None}
    options = SimpleNamespace(units=(unit("first"),), starts=1, drain_timeout_s=1.0, **nodes, **plans, **host)
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

        monkeypatch.setattr(supervisor, "ServerUnit", full)
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


FIRST = planned({"chat": 4000.0, "code": 1000.0})


def followed(model, tmp_path, *plans, between_s=0.05, after_s=0.5):
    """A server that follows these plans, one after the other, each of units of these names; its code and what it says
    of its plan. It runs for so long that engines of one plan more have come; then a signal ends it.
    """
    named = {FIRST.method: ("first",)} | {str(plan): plan for plan in plans}
    supervised = supervising(model, tmp_path, lambda plan: tuple(map(unit, named[plan.method])), FIRST)

    async def run():
        running = asyncio.ensure_future(supervised.run(Http()))
        for plan in plans:
            await asyncio.sleep(between_s)
            supervised.follow(replace(FIRST, method=str(plan)))
        await asyncio.sleep(after_s)
        state = supervised._frontends.followed()
        if not running.done():
            supervised.interrupt()
        await asyncio.wait_for(running, 2.0)
        return supervised.code, state

    return asyncio.run(run())


@pytest.mark.parametrize("plan", [("broken",), ("broken", "broken too"), ("beside", "broken")], ids=str)
def test_a_plan_whose_engines_can_not_be_started_is_left_for_the_one_before(
    model, tmp_path, made, monkeypatch, plan, capsys
):
    monkeypatch.setattr(Unit, "codes", {"broken": [3], "broken too": [4]})
    code, state = followed(model, tmp_path, plan)
    assert code == 0 and not any(one.failed for one in made), "its requests are answered by the next"
    left = [(name, "given up") for name in ("first", *plan)]
    assert [(one.name, one.state) for one in made] == [*left, ("first", "stopped")]
    assert state["plan"] == document.to_dict(FIRST) and state["replans"]["failed"] == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert "the server returns to the earlier plan and keeps it: the engine of broken can't be started" in printed


def test_a_model_that_keeps_its_engine_returns_to_the_schedule_of_a_plan_that_is_sent(
    model, tmp_path, made, monkeypatch
):
    """After another one, as of `POST /schedule`; it keeps that one where the server replans by itself."""
    planned = FIRST.models[0].schedule
    now, asked = replace(planned, kv_blocks=planned.kv_blocks + 1), []
    kept = replace(unit("first"), documents={"--schedule": planned})
    supervised = supervising(model, tmp_path, lambda plan: (kept,), FIRST)
    supervised._units[0].options = kept
    (frontend,) = supervised._frontends.each
    monkeypatch.setattr(frontend.link, "follow", asked.append)

    async def run():
        supervised.follow_as_sent(FIRST)  # before its engine has opened, which will follow it
        frontend.link.opened = SimpleNamespace(schedule=now)
        supervised.follow(FIRST)
        assert asked == []
        supervised.follow_as_sent(FIRST)
        frontend.link.opened = SimpleNamespace(schedule=planned)
        supervised.follow_as_sent(FIRST)

    asyncio.run(run())
    assert asked == [planned]
    assert supervised._frontends.follow_plan == supervised.follow_as_sent


@pytest.mark.parametrize("error", [InputError("There is no mpirun."), OSError("no more processes")], ids=str)
def test_a_plan_whose_engines_raise_an_error_is_left_too(model, tmp_path, made, monkeypatch, error, capsys):
    monkeypatch.setattr(Unit, "errors", {"broken": error})
    code, state = followed(model, tmp_path, ("broken",))
    assert code == 0 and [one.name for one in made] == ["first", "broken", "first"]
    assert state["plan"] == document.to_dict(FIRST)
    assert f"the engine of broken can't be started: {error}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("codes", "plans"),
    [
        pytest.param({"first": [3]}, [], id="there was none before"),
        pytest.param({"first": [None, 3], "broken": [4]}, [("broken",)], id="the one before fails too"),
        pytest.param({"both": [3]}, [("both", "one"), ("both", "other")], id="the one before has the same engine"),
    ],
)
def test_a_server_ends_where_no_plan_before_helps(model, tmp_path, made, monkeypatch, codes, plans):
    """Each plan has opened before the next one is followed."""
    monkeypatch.setattr(Unit, "codes", codes)
    monkeypatch.setattr(Unit, "lasts_s", 0.25)
    code, _ = followed(model, tmp_path, *plans, between_s=0.2, after_s=1.0)
    assert code == 3 and [one.failed for one in made if one.failed] == [True]


def test_a_plan_before_that_this_machine_can_follow_no_more_does_not_help(model, tmp_path, made, monkeypatch):
    monkeypatch.setattr(Unit, "codes", {"broken": [3]})

    def units(plan):
        if plan is FIRST:
            raise InputError("The model has gone.")
        return (unit("broken"),)

    supervised = supervising(model, tmp_path, units, FIRST)

    async def run():
        running = asyncio.ensure_future(supervised.run(Http()))
        await asyncio.sleep(0.05)
        supervised.follow(replace(FIRST, method="another"))
        await asyncio.wait_for(running, 2.0)

    asyncio.run(run())
    assert supervised.code == 3


@pytest.mark.parametrize("quick", [False, True], ids=["it loads", "its engines aren't made yet"])
def test_a_plan_whose_engines_have_never_opened_is_none_to_go_back_to(model, tmp_path, made, monkeypatch, quick):
    monkeypatch.setattr(Unit, "codes", {"broken": [3]})
    monkeypatch.setattr(Unit, "loading", {"slow"})
    named = {FIRST.method: ("first",), "slow": ("slow",), "broken": ("broken",)}
    supervised = supervising(model, tmp_path, lambda plan: tuple(map(unit, named[plan.method])), FIRST)

    async def run():
        running = asyncio.ensure_future(supervised.run(Http()))
        await asyncio.sleep(0.05)
        supervised.follow(replace(FIRST, method="slow"))
        await asyncio.sleep(0.0 if quick else 0.2)
        supervised.follow(replace(FIRST, method="broken"))
        await asyncio.sleep(0.8)
        state = supervised._frontends.followed()
        supervised.interrupt()
        await asyncio.wait_for(running, 2.0)
        return state

    assert asyncio.run(run())["plan"] == document.to_dict(FIRST)
    assert supervised.code == 0 and [one.name for one in made] == ["first", "slow", "broken", "first"]


def test_an_error_of_a_unit_that_is_replaced_does_not_end_the_server(model, tmp_path, made, monkeypatch, capsys):
    """Both engines of a plan want an mpirun that isn't there, say: the first error lets the plan before come back."""
    monkeypatch.setattr(Unit, "errors", {name: InputError(f"No mpirun for {name}.") for name in ("broken", "too")})
    code, state = followed(model, tmp_path, ("broken", "too"))
    assert code == 0 and [(one.name, one.state) for one in made if one.name == "first"][-1] == ("first", "stopped")
    assert state["plan"] == document.to_dict(FIRST) and state["replans"]["failed"] == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert "the engine of broken can't be started: No mpirun for broken." in printed
    assert "the replaced engine of too has failed: No mpirun for too." in printed
