"""Requests of a lost node: replicas elsewhere continue them, or they wait for the node, and fail in the end."""

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.xcore import small_specs
from tests.xserver.engines.test_engine_link import AskedEngine
from tests.xserver.engines.test_server_unit import frontends
from xcore.requests.engine_protocol import Abort, Opened, Stepped, Stop, TokenColumns, TokenEvent
from xcore.requests.request import Request
from xserver.engines import server_unit
from xserver.engines.engine_link import EngineLink
from xserver.engines.residency import Residency, ResidencyOptions
from xserver.engines.server_unit import ServerUnit
from xserver.engines.unit_options import EngineUnitOptions, NodePlace, UnitModel
from xserver.http.api_error import ApiError
from xserver.http.frontend import Frontend
from xserver.http.frontends import Frontends
from xserver.http.pages import _node
from xserver.http.served_model import ServedModel
from xserver.nodes.node_link import NodeAddress

SCHEDULE = replace(small_specs.schedule("orca"), kv_blocks=8, block_size=16)
OPENED = Opened(SCHEDULE, small_specs.profile(), None, (), 0.0)


def request(tokens=20):
    return Request("", (1, 2, 3, 4), tokens)


@pytest.fixture
def replicas(model):
    """Three replicas of model `a`, which accept requests."""
    each = [Frontend(ServedModel.read(model, "a"), EngineLink(), "", None, 1.0, 8) for _ in range(3)]
    for frontend in each:
        frontend.unit, frontend.admission, frontend.link.opened = (frontend,), object(), OPENED
    return each


def test_requests_go_to_the_replicas_with_the_fewest(replicas):
    lost, first, second = replicas
    outputs = [lost.link.add(request()) for _ in range(4)]
    first.link.add(request())
    lost.admission = None
    frontends = Frontends(replicas)
    frontends.take_over(lost)
    assert not lost.link.outputs
    assert [output.link is first.link for output in outputs] == [False, True, False, True]
    assert [len(each.link.outputs) for each in replicas] == [0, 3, 2]
    second.draining = True
    left = second.link.add(request())
    frontends.take_over(second)
    assert left.link is first.link


def test_a_replica_takes_over_in_a_drain_and_ends_after_that(replicas, tmp_path):
    """No replica accepts new requests, but the accepted ones are answered."""
    lost, first, second = replicas
    output = lost.link.add(request())
    Frontends(replicas).refuse_more()
    lost.admission = first.admission = None
    Frontends(replicas).take_over(lost)
    assert output.link is second.link

    async def run():
        unit = unit_of([second], tmp_path, Node(up=True), None, [])
        goes_on = not unit._over
        second.link.abort([output])
        return goes_on, unit._over

    assert asyncio.run(run()) == (True, True)


def test_a_request_stays_where_no_replica_has_room(replicas):
    """It needs more KV blocks, or no replica accepts requests: it waits for its node."""
    lost, first, second = replicas
    long, short = lost.link.add(request(16 * 8)), lost.link.add(request(16 * 7))
    second.admission = lost.admission = None
    frontends = Frontends(replicas)
    frontends.take_over(lost)
    assert list(lost.link.outputs.values()) == [long] and list(first.link.outputs.values()) == [short]
    first.admission = None
    waits = first.link.add(request())
    frontends.take_over(first)
    assert waits.link is first.link and not waits.ended


def test_a_request_continues_under_a_new_number_with_its_tokens(tmp_path):
    """Its reader gets all tokens in order; an abort and a stop reach the engine that has the request."""

    async def run():
        links, engines = [EngineLink(), EngineLink()], [AskedEngine(SCHEDULE), AskedEngine(SCHEDULE)]
        sent = [[], []]
        for number, (link, engine) in enumerate(zip(links, engines, strict=True)):
            link._send = sent[number].append
            link.opened = engine.opened
        other = links[1].add(request())
        moved, ends, stops = (links[0].add(request()) for _ in range(3))
        moved.take(TokenEvent("0", 0, 77, 0.5), 1.0, 0.0)
        announced = []
        moved.listeners.append(lambda: announced.append(list(moved.tokens)))
        for output in (moved, ends, stops):
            links[1].take_over(output)
        assert not links[0].outputs and len(links[1].outputs) == 4
        assert sent[1][1:] == [
            replace(request(), id="1", output_ids=(77,)),
            replace(request(), id="2"),
            replace(request(), id="3"),
        ]
        links[0].abort([ends])
        links[0].stop(stops, 5)
        assert sent[1][4:] == [Abort(("2",)), Stop("3", 5)] and len(sent[0]) == 3
        again = links[0].add(request())  # its number is new, whatever numbers the moved ones had
        assert list(links[0].outputs.values()) == [again] and other.link is links[1]
        columns = TokenColumns.of([TokenEvent("1", 1, 88, 0.5)])
        links[1]._take(Stepped(1.0, columns, (), SimpleNamespace(preemptions=0)))
        links[1]._announce()
        assert announced == [[77, 88]]

    asyncio.run(run())


class Node:
    """A node that is lost until `comes`."""

    address, why = NodeAddress(1, "there", 8100), "connection refused"

    def __init__(self, up=False):
        self.up, self._comes = up, asyncio.Event()

    async def reachable(self):
        await self._comes.wait()

    def comes(self):
        self.up = True
        self._comes.set()

    def goes(self):
        self.up, self._comes = False, asyncio.Event()


class Engine:
    """An engine that ends once for each of `lost`, with its node (True) or by itself, and then runs on."""

    restarts = True

    def __init__(self, node, *lost):
        self.node, self.ends, self.starts, self.lost = node, list(lost), 0, False

    async def start(self, documents):
        self.starts += 1

    async def wait(self):
        if not self.ends:
            await asyncio.Event().wait()
        self.lost = self.ends.pop(0)
        if self.lost:
            self.node.goes()
        return 1

    async def kill(self):
        pass


def unit_of(served, tmp_path, node, engine, left):
    at = NodePlace(1, (0,), 1)
    options = EngineUnitOptions((UnitModel(tmp_path, place=0),), ("--plan", "x"), at=at)
    unit = ServerUnit(options, served, tmp_path, "http://here", _nothing, asyncio.Semaphore(1), node, left.append)
    unit._engine = engine
    return unit


async def _nothing(_):
    pass


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError


def test_a_unit_waits_for_a_lost_node_without_a_turn_and_without_failures(model, tmp_path):
    """A node may be lost more often than an engine may fail. Meanwhile errors name the lost node."""

    async def run():
        node, left = Node(), []
        (frontend,) = frontends(model, EngineLink())
        unit = unit_of([frontend], tmp_path, node, engine := Engine(node, *[True] * 9), left)
        running = asyncio.ensure_future(unit.run())
        for starts in range(10):
            await until(lambda starts=starts: len(left) == starts + 1)
            assert left[-1] is frontend and not unit._turns.locked() and engine.starts == starts
            if starts:
                with pytest.raises(ApiError, match=r"node 1 \(there:8100\) can't be reached: connection ref") as raised:
                    frontend.check_ready()
                assert (raised.value.status, raised.value.code) == (503, "node_lost")
            node.comes()
        await until(unit._turns.locked)
        assert engine.starts == 10 and not running.done() and frontend.monitor.restarts == 9
        running.cancel()

    asyncio.run(run())


@contextlib.asynccontextmanager
async def waiting(model, tmp_path):
    """Run the unit of a lost node; yield the node, the unit's link and engine, and an accepted request's output."""
    (frontend,), node = frontends(model, EngineLink()), Node()
    unit = unit_of([frontend], tmp_path, node, engine := Engine(node), [])
    output = frontend.link.add(request())
    running = asyncio.ensure_future(unit.run())
    try:
        yield node, frontend.link, engine, output
    finally:
        running.cancel()


def test_requests_of_a_node_that_stays_away_fail(model, tmp_path, monkeypatch):
    """Their error names the node, for which the unit still waits."""
    monkeypatch.setattr(server_unit, "NODE_WAIT_S", 0.2)

    async def run():
        async with waiting(model, tmp_path) as (node, link, engine, output):
            await until(lambda: output.ended)
            assert (output.ended.reason, output.ended.error) == ("error", "node 1 (there:8100) can't be reached")
            assert not link.failed and engine.starts == 0
            node.comes()
            await until(lambda: engine.starts == 1)

    asyncio.run(run())


def test_requests_stay_where_the_node_comes_back_in_time(model, tmp_path, monkeypatch):
    monkeypatch.setattr(server_unit, "NODE_WAIT_S", 5.0)

    async def run():
        async with waiting(model, tmp_path) as (node, link, engine, output):
            await asyncio.sleep(0.1)
            node.comes()
            await until(lambda: engine.starts == 1)
            assert output.ended is None and output.link is link

    asyncio.run(run())


def test_the_status_page_has_the_address_of_a_node_as_it_is_typed(replicas):
    frontend, *_ = replicas
    frontend.node = Node()
    frontend.node.address = NodeAddress(1, "::1", 8100)
    assert _node(frontend) == {"number": 1, "address": "[::1]:8100", "reachable": False}


def test_a_lost_node_keeps_no_place_of_a_loaded_engine(model, tmp_path):
    """Requests to its model end at once, and others' engines take its place."""

    async def run():
        served, nodes = frontends(model, EngineLink(), EngineLink()), (Node(), Node(up=True))
        units = [unit_of([f], tmp_path, node, None, []) for f, node in zip(served, nodes, strict=True)]
        changes = []

        def start(unit):
            changes.append(f"start {unit.name}")
            if unit.node.up:
                unit.frontends[0].link.opened = OPENED

        async def stop(unit):
            changes.append(f"stop {unit.name}")
            unit.frontends[0].link.opened = None

        residency = Residency(ResidencyOptions(1), units, start, stop)
        residency.begin()
        served[0].admission = None
        with pytest.raises(ApiError, match=r"node 1 \(there:8100\) can't be reached") as raised:
            await asyncio.wait_for(residency.enter("a", "", {}), 5.0)
        assert raised.value.code == "node_lost"
        leave = await asyncio.wait_for(residency.enter("b", "", {}), 5.0)
        with pytest.raises(ApiError):
            await asyncio.wait_for(residency.enter("a", "", {}), 5.0)
        assert changes == ["start a", "stop a", "start b"]
        nodes[0].comes()
        waits = asyncio.ensure_future(residency.enter("a", "", {}))
        await asyncio.sleep(0.1)
        assert not waits.done(), "the other engine is in use"
        leave()
        await asyncio.wait_for(waits, 5.0)
        assert changes[3:] == ["stop b", "start a"]

    asyncio.run(run())


def test_failures_of_an_engine_on_a_reachable_node_count(model, tmp_path):
    """The unit gives up an engine that ends by itself again and again."""

    async def run():
        node = Node(up=True)
        unit = unit_of(frontends(model, EngineLink()), tmp_path, node, Engine(node, *[False] * 9), [])
        return await asyncio.wait_for(unit.run(), 10.0)

    assert asyncio.run(run()) == 1
