"""Engine units: what an engine is started with that goes on where another one has ended."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.xcore import small_specs
from tests.xmulti.serving.test_replanning import planned
from xcore.batching.shared_pool import merged_pools
from xcore.requests.engine_protocol import TokenEvent
from xcore.requests.request import Request
from xcore.specs.cluster_plan import Plan, Share
from xcore.specs.schedule import Schedule
from xmulti.serving.started import StartedUnit
from xserver.engines import engine_unit
from xserver.engines.engine_link import EngineLink
from xserver.engines.engine_unit import EngineUnit
from xserver.engines.unit_options import EngineUnitOptions, UnitModel


class Engine:
    """Ends as soon as it was started; `read` is called then with its documents."""

    restarts, lost = True, False

    def __init__(self, read, code=9):
        self.read, self.code = read, code

    async def start(self, documents):
        self.read(documents)

    async def wait(self):
        return self.code

    async def kill(self):
        pass


def read_by_the_engine(kind, spec, names, requests, tmp_path):
    """The document that an engine is started with, whose models have these requests."""
    links, documents = {name: EngineLink() for name in names}, []
    for name, request in requests:
        links[name].add(request)
    models = tuple(UnitModel(tmp_path, name, place=place) for place, name in enumerate(names))
    option = f"--{kind.__name__.lower()}"
    options = EngineUnitOptions(models, ("--model", "a"), {option: spec})

    async def run():
        unit = EngineUnit(options, links, tmp_path, asyncio.Semaphore(1))
        unit._engine = Engine(lambda passed: documents.append(passed[option]))
        assert await unit.run() == 9

    asyncio.run(run())
    (found,) = documents
    return found


def request(tokens):
    return Request("", (1,) * 4, tokens - 3)


def test_an_engine_has_room_for_the_requests_that_it_goes_on_with(tmp_path):
    """They were accepted under another schedule, with a larger cache."""
    schedule = replace(small_specs.schedule("orca"), kv_blocks=3, block_size=16)
    asked = [("a", request(16)), ("a", request(16 * 7 + 1)), ("a", request(5))]
    assert read_by_the_engine(Schedule, schedule, ["a"], asked, tmp_path) == replace(schedule, kv_blocks=8)
    assert read_by_the_engine(Schedule, schedule, ["a"], asked[:1], tmp_path) == schedule


@pytest.mark.parametrize("pool", ["quotas", "merged"])
def test_models_that_share_have_room_too(tmp_path, pool):
    """Where they take blocks of one memory, one may have all of them; models of other engines stay as they are."""
    plan = planned({"a": 1.0, "b": 1.0, "c": 1.0})
    schedule = replace(small_specs.schedule("orca"), kv_blocks=4, block_size=16)
    models = [replace(model, schedule=schedule) for model in plan.models]
    together = [replace(model, devices=(0,), share=Share("time", pool=pool)) for model in models[:2]]
    plan = replace(plan, models=(*together, models[2]))

    def blocks(*asked):
        read = read_by_the_engine(Plan, plan, ["a", "b"], asked, tmp_path)
        assert [model.name for model in read.models] == ["a", "b", "c"]
        return [model.schedule.kv_blocks for model in read.models], read

    assert blocks(("a", request(16 * 4)))[0] == [4, 4, 4]
    assert blocks(("a", request(16 * 6)))[0] == ([6, 4, 4] if pool == "quotas" else [4, 4, 4])
    found, read = blocks(("a", request(16 * 9)), ("b", request(16 * 5)))
    assert found == ([9, 5, 4] if pool == "quotas" else [9, 4, 4])
    if pool == "merged":
        _, pools = merged_pools([model.schedule for model in read.models[:2]])
        assert min(pool.total for pool in pools) >= 9


@pytest.mark.parametrize("error", [None, OSError("no more processes")], ids=["it ends at once", "no process"])
def test_requests_of_a_run_fail_where_no_engine_can_follow(tmp_path, error):
    """Whatever keeps it from being started: nobody waits for an engine that never comes."""
    link, starts = EngineLink(), []

    def start(_):
        starts.append(link.opened)
        link.opened = object() if len(starts) == 1 else None
        if len(starts) > 1 and error:
            raise error

    async def run():
        options = EngineUnitOptions((UnitModel(tmp_path, "a"),), ())
        unit = StartedUnit(options, {"a": link, "another": EngineLink()}, tmp_path, asyncio.Semaphore(1))
        unit._engine = Engine(start)
        asked = link.add(request(9))
        running = asyncio.ensure_future(unit.run())
        await asyncio.wait({running}, timeout=5.0)
        raised = running.exception()
        return asked.ended.reason, raised, None if raised else running.result()

    assert asyncio.run(run()) == ("error", error, None if error else 9)
    assert len(starts) == 2


def test_an_engine_that_can_not_be_killed_is_not_waited_for(tmp_path, monkeypatch):
    """It may wait for a device for good, with its socket open."""
    monkeypatch.setattr(engine_unit, "_LEAVES_S", 0.1)

    async def run():
        link, starts = EngineLink(), []
        unit = EngineUnit(
            EngineUnitOptions((UnitModel(tmp_path, "a"),), ()), {"a": link}, tmp_path, asyncio.Semaphore(1)
        )
        unit._engine = Engine(lambda _: starts.append(link.connected))
        await unit.listen()
        _, writer = await asyncio.open_unix_connection(tmp_path / "engine-0")
        while not link.connected:
            await asyncio.sleep(0.01)
        code = await asyncio.wait_for(unit.run(), 5.0)
        connected = link.connected
        writer.close()
        await unit.close()
        return code, starts, connected

    assert asyncio.run(run()) == (9, [True], False)


@pytest.mark.parametrize("code", [2, 3])
def test_an_engine_that_refuses_what_it_was_given_is_not_started_again(tmp_path, code):
    """It has said why in one sentence; one that has opened before may be short of something for a while."""
    starts = []

    async def run(has_opened):
        starts.clear()
        options = EngineUnitOptions((UnitModel(tmp_path, "a"),), ("--schedule", "s.json"))
        unit = Unit(options, {"a": EngineLink()}, tmp_path, asyncio.Semaphore(1))
        unit._engine, unit.has_opened = Engine(lambda _: starts.append(1), code), has_opened
        return await unit.run()

    class Unit(EngineUnit):
        def _may_follow(self, opened):
            return True

    assert asyncio.run(run(False)) == code and len(starts) == 1
    assert asyncio.run(run(True)) == code and len(starts) == engine_unit._MOST_RESTARTS


def test_a_request_that_ends_every_engine_fails_alone(tmp_path):
    """The others are answered by an engine after it, whether they came before or after."""
    link, starts = EngineLink(), []

    class Unit(EngineUnit):
        def _may_follow(self, opened):
            return True

        @property
        def _over(self):
            return not link.outputs

    async def run():
        unit = Unit(EngineUnitOptions((UnitModel(tmp_path, "a"),), ()), {"a": link}, tmp_path, asyncio.Semaphore(1))
        unit._stepped(SimpleNamespace(ended=("an earlier request",)))
        deadly = link.add(request(9))
        later = []

        def start(_):
            starts.append(list(link.outputs.values()))
            if len(starts) == 2:
                later.append(link.add(request(9)))
            if deadly.request.id not in link.outputs:  # this engine answers all
                link.outputs.clear()

        unit._engine = Engine(start)
        return deadly, later, await asyncio.wait_for(unit.run(), 10.0)

    deadly, (other,), code = asyncio.run(run())
    assert code == 0 and deadly.ended.reason == "error" and other.ended is None
    assert len(starts) == engine_unit._MOST_LOST + 1 and starts[-1] == [other]


def test_a_token_shows_that_a_request_does_not_end_engines():
    link = EngineLink()
    waits, goes_on = link.add(request(9)), link.add(request(9))
    for _ in range(5):
        link.lost_engine(5)
        goes_on.take(TokenEvent("1", 0, 7, 0.5), 1.0, 0.0)
    assert waits.ended.reason == "error" and goes_on.ended is None and [*link.outputs.values()] == [goes_on]
