"""A node's engine in the server: the messages to the launcher, and the effects of the launcher's messages."""

import asyncio
from dataclasses import replace

from tests.xcore import small_specs
from tests.xmulti.serving.test_replanning import planned
from xcore import document
from xcore.specs.cluster_plan import Plan
from xcore.specs.schedule import Schedule
from xserver.engines.engine_link import EngineLink
from xserver.engines.engine_unit import EngineUnit
from xserver.engines.unit_options import EngineUnitOptions, NodePlace, UnitModel
from xserver.nodes.launch_protocol import EndEngine, LaunchedModel, StartEngine
from xserver.nodes.node_engine import NodeEngine
from xserver.nodes.node_link import NodeAddress, NodeLink


class Node(NodeLink):
    """A node without a launcher; `sent` keeps the messages to it."""

    def __init__(self):
        super().__init__(NodeAddress(1, "there", 8100), "")
        self.sent, self.up, self.attaches = [], True, None

    def send(self, message):
        self.sent.append(message)

    async def attach(self, connection):
        if self.attaches:
            await self.attaches.wait()
        raise ConnectionError("its launcher does not answer")


def engine_of(tmp_path, names=("a",)):
    node, links = Node(), {name: EngineLink() for name in names}
    models = tuple(UnitModel(tmp_path / name, name, place=place) for place, name in enumerate(names, 3))
    options = EngineUnitOptions(models, ("--dtype", "fp32"), at=NodePlace(1, (2, 0), 4, 5))
    return NodeEngine(node, options, links, [tmp_path / f"engine-{m.place}" for m in models]), node, links


def test_the_launcher_gets_documents_and_no_paths_but_those_of_models(tmp_path):
    async def run():
        engine, node, _ = engine_of(tmp_path)
        schedule = small_specs.schedule("orca")
        await engine.start({"--schedule": schedule})
        shared, other, _ = engine_of(tmp_path, ("a", "b"))
        plan = planned({"a": 1.0, "b": 1.0})
        await shared.start({"--plan": plan})
        await shared.start({"--plan": replace(plan, method="spatial")})
        return schedule, plan, node.sent, other.sent

    schedule, plan, (alone,), (first, second) = asyncio.run(run())
    model = LaunchedModel("a", 3, str(tmp_path / "a"))
    assert alone == StartEngine(
        0, (model,), (2, 0), 4, ("--dtype", "fp32"), document.to_dict(schedule), None, 5
    ) and schedule == document.from_dict(Schedule, alone.schedule, "it")
    assert first.schedule is None and document.from_dict(Plan, first.plan, "it") == plan
    assert [each.place for each in first.models] == [3, 4] and (first.engine, second.engine) == (0, 1)
    assert second.plan["method"] == "spatial"


def test_an_engine_ends_by_itself_with_its_node_or_on_request(tmp_path, capsys):
    async def run():
        engine, node, _ = engine_of(tmp_path)
        await engine.kill()
        await engine.start({})
        waiting = asyncio.ensure_future(engine.wait())
        engine.ended(2, "no such directory")
        codes = [(await waiting, engine.lost)]
        await engine.start({})
        waiting = asyncio.ensure_future(engine.wait())
        await node._lost("its machine is off")
        codes.append((await waiting, engine.lost))
        await engine.stop(1.0)
        node.up = True
        await engine.start({})
        killing = asyncio.ensure_future(engine.kill())
        await asyncio.sleep(0)
        assert node.sent[-1] == EndEngine(0), "numbers begin again with each connection"
        engine.ended(-15, "")
        await killing
        codes.append((await engine.wait(), engine.lost))
        engine.told = True
        await engine.start({})
        draining = asyncio.ensure_future(engine.stop(5.0))
        await asyncio.sleep(0)
        engine.ended(0, "")
        await draining
        return codes, node.sent

    codes, sent = asyncio.run(run())
    assert codes == [(2, False), (1, True), (-15, False)]
    assert sum(isinstance(message, EndEngine) for message in sent) == 1, "a drained engine has ended by itself"
    assert "node 1 (there:8100) has not started the engine of a: no such directory" in capsys.readouterr().err


def test_a_node_that_is_lost_before_the_start_loses_the_engine(tmp_path):
    async def run():
        engine, node, _ = engine_of(tmp_path)
        node.up = False
        await engine.start({})
        return await engine.wait(), engine.lost

    assert asyncio.run(run()) == (1, True)


def test_an_engine_that_can_not_be_attached_to_is_lost_and_another_follows(tmp_path, capsys):
    """It ends with the code of a refused input, because nobody has attached to it; the server goes on."""

    async def run():
        engine, node, links = engine_of(tmp_path)
        unit = EngineUnit(engine._options, links, tmp_path, asyncio.Semaphore(1), node)
        running = asyncio.ensure_future(unit.run())
        for starts in range(1, 8):  # more than an engine may fail
            while len(node._engines) < starts:
                await asyncio.sleep(0.01)
            node._engines[starts - 1].connected(3, 1)
            while node.sent[-1] != EndEngine(starts - 1):
                await asyncio.sleep(0.01)
            node._engines[starts - 1].ended(2, "")
        await asyncio.sleep(0.1)
        goes_on = not running.done()
        running.cancel()
        return goes_on

    assert asyncio.run(asyncio.wait_for(run(), 20.0))
    assert "an engine of node 1 (there:8100) can't be attached to: its launcher does not answer" in (
        capsys.readouterr().err
    )


def test_nobody_attaches_to_an_engine_of_a_lost_launcher(tmp_path):
    """The next launcher's connections have the same numbers."""

    async def run():
        engine, node, _ = engine_of(tmp_path)
        waits = node.attaches = asyncio.Event()
        await engine.start({})
        engine.connected(3, 1)
        await asyncio.sleep(0)
        (attaching,) = engine._attaching
        engine.gone()
        await asyncio.wait({attaching}, timeout=5.0)
        return attaching.cancelled(), waits.is_set(), await engine.wait()

    assert asyncio.run(run()) == (True, False, 1)


def test_the_work_of_an_engine_before_it_opens_is_shown(tmp_path):
    async def run():
        engine, _, links = engine_of(tmp_path)
        await links["a"].listen(tmp_path / "engine-3")
        engine.starts(3, "loading the model")
        engine.starts(9, "of no model here")
        engine.connected(9, 1)
        text = links["a"].starting
        await links["a"].close()
        return text

    assert asyncio.run(run()) == "loading the model"
