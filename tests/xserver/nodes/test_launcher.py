"""A launcher and a server's link to it in one process; its engines are stand-ins that echo what they get."""

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.xserver.nodes.test_launched_engine import alone, folder  # noqa: F401
from xcore.errors import InputError
from xcore.requests.proof import NONCE, PROOF
from xcore.requests.starting import say_starting
from xserver.nodes import launched_engine, launcher, node_link
from xserver.nodes.launch_protocol import (
    FROM_LAUNCHER,
    MAX_MESSAGE,
    Denied,
    EndEngine,
    EngineEnded,
    Hello,
    Ping,
    Pong,
    StartEngine,
    encoded,
    introduce,
    receive,
)
from xserver.nodes.launcher import Launcher, LauncherOptions
from xserver.nodes.node_link import NodeAddress, NodeLink

TOKEN = "0123456789abcdef"


class Process:
    """An engine that connects to its socket, and echoes all it gets until its frontend has closed; then it ends."""

    running: list["Process"] = []  # noqa: RUF012

    def __init__(self, arguments, ranks, environment, documents):
        self.arguments, self.code = arguments, asyncio.get_running_loop().create_future()

    async def start(self, documents):
        path = Path(self.arguments[self.arguments.index("--socket") + 1])
        say_starting(path, "loading")
        reader, self.writer = await asyncio.open_unix_connection(path)
        self.running.append(self)
        self.echoing = asyncio.ensure_future(self._echo(reader))

    async def _echo(self, reader):
        while data := await reader.read(2**16):
            self.writer.write(data)
        self.writer.close()
        self.end(0)

    def end(self, code):
        if not self.code.done():
            self.code.set_result(code)

    async def wait(self):
        return await self.code

    async def stop(self, limit_s):
        self.writer.close()
        self.end(-15)


class Engine:
    """A server's engine that records what its launcher reports."""

    def __init__(self):
        self.reports, self.connections = [], asyncio.Queue()

    def connected(self, place, connection):
        self.connections.put_nowait((place, connection))

    def starts(self, place, text):
        self.reports.append((place, text))

    def ended(self, code, reason):
        self.reports.append((code, reason))

    def gone(self):
        self.reports.append("gone")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(launched_engine, "EngineProcess", Process)
    monkeypatch.setattr(Process, "running", [])
    monkeypatch.setattr(node_link, "_AGAIN_S", 0.05)


async def until(condition, seconds=10.0):
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def launching(work, port=0):
    """Yield a launcher's port; at the end assert that all its engines have ended and its folder is empty."""
    server, end = asyncio.start_server, asyncio.Event()
    bound = []

    async def start(*arguments, **options):
        bound.append(await server(*arguments, **options))
        return bound[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher.asyncio, "start_server", start)
        running = asyncio.ensure_future(Launcher(LauncherOptions("127.0.0.1", port, TOKEN, {}), work).run(end))
        await until(lambda: bound or running.done())
    try:
        yield bound[0].sockets[0].getsockname()[1]
    finally:
        end.set()
        await running
        assert all(process.code.done() for process in Process.running)
        assert not list(work.iterdir())


@contextlib.asynccontextmanager
async def linked(port, token=TOKEN):
    link = NodeLink(NodeAddress(1, "127.0.0.1", port), token)
    running = asyncio.ensure_future(link.run())
    try:
        await asyncio.wait_for(link.reachable(), 10.0)
        yield link
    finally:
        running.cancel()
        await asyncio.wait({running})


async def begun(link, alone):  # noqa: F811
    engine = Engine()
    link.send(replace(alone, engine=link.add(engine)))
    place, connection = await asyncio.wait_for(engine.connections.get(), 10.0)
    assert place == alone.models[0].place
    return engine, connection


def test_an_engines_bytes_pass_in_both_directions(alone, tmp_path):  # noqa: F811
    """More bytes than the buffers hold arrive, and so do the last ones after the engine has ended."""
    data = bytes(range(256)) * 2**13

    async def run():
        async with launching(tmp_path) as port, linked(port) as link:
            engine, connection = await begun(link, alone)
            reader, writer = await link.attach(connection)
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
            writer.write(b"last")
            assert await reader.readexactly(4) == b"last"
            writer.close()
            await until(lambda: (0, "") in engine.reports)
            assert (alone.models[0].place, "loading") in engine.reports
            with pytest.raises((InputError, OSError, EOFError)):  # a connection serves once
                again, _ = await link.attach(connection)
                await again.readexactly(1)

    asyncio.run(run())


def test_an_engine_ends_where_the_server_says_so_and_where_the_server_is_lost(alone, tmp_path):  # noqa: F811
    async def run():
        async with launching(tmp_path) as port:
            async with linked(port) as link:
                engine, _ = await begun(link, alone)
                other, _ = await begun(link, alone)
                link.send(EndEngine(0))
                await until(lambda: (-15, "") in engine.reports)
                assert (-15, "") not in other.reports and len(Process.running) == 2
            await until(lambda: Process.running[1].code.done())
            async with linked(port) as link:  # the launcher serves the next one
                await begun(link, alone)

    asyncio.run(run())


def test_engines_of_a_lost_launcher_are_gone_and_the_link_comes_back(alone, tmp_path):  # noqa: F811
    async def run():
        async with launching(tmp_path) as port:
            pass
        async with launching(tmp_path, port):
            link = NodeLink(NodeAddress(1, "127.0.0.1", port), TOKEN)
            running = asyncio.ensure_future(link.run())
            await asyncio.wait_for(link.reachable(), 10.0)
            engine, _ = await begun(link, alone)
        await until(lambda: "gone" in engine.reports)
        assert not link.up
        await until(lambda: "refused" in link.why)
        async with launching(tmp_path, port):
            await asyncio.wait_for(link.reachable(), 10.0)
            await begun(link, alone)
        running.cancel()

    asyncio.run(run())


def test_a_refused_engine_does_not_end_the_others(alone, tmp_path):  # noqa: F811
    async def run():
        async with launching(tmp_path) as port, linked(port) as link:
            await begun(link, alone)
            refused = Engine()
            link.send(replace(alone, engine=link.add(refused), flags=("--plugin", "x")))
            await until(lambda: refused.reports)
            assert refused.reports == [(2, "A launcher starts no engine with the argument '--plugin'.")]
            await begun(link, alone)
            assert link.up and not any(process.code.done() for process in Process.running)

    asyncio.run(run())


@pytest.mark.parametrize("error", [OSError("No space left on device"), ZeroDivisionError()], ids=repr)
@pytest.mark.parametrize("step", ["mkdir", "starting_text"])
def test_an_engine_at_which_the_launcher_fails_has_ended(alone, tmp_path, monkeypatch, step, error):  # noqa: F811
    """The server gets a report, the engine's process has ended, and the other engines stay."""
    fails = []

    def failing(*arguments, **options):
        if fails:
            raise error
        return real(*arguments, **options)

    where = Path if step == "mkdir" else launched_engine
    real = getattr(where, step)

    async def run():
        async with launching(tmp_path) as port, linked(port) as link:
            monkeypatch.setattr(where, step, failing)
            fails.append(step)
            engine = Engine()
            link.send(replace(alone, engine=link.add(engine)))
            await until(lambda: engine.reports)
            fails.clear()
            why = "the launcher has failed at it" if isinstance(error, ZeroDivisionError) else str(error)
            assert engine.reports == [(1 if isinstance(error, ZeroDivisionError) else 2, why)]
            assert all(process.code.done() for process in Process.running)
            await begun(link, alone)
            assert link.up and not list(tmp_path.glob("0-*"))

    asyncio.run(run())


def test_a_connection_that_closes_during_the_proof_says_nothing_about_the_token(tmp_path):
    """The launcher may end, or need the place for another connection: the server tries again."""

    async def run():
        async def closes(reader, writer):
            writer.write(bytes(NONCE))
            await reader.readexactly(NONCE + PROOF)
            writer.close()

        server = await asyncio.start_server(closes, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        link = NodeLink(NodeAddress(1, "127.0.0.1", port), TOKEN)
        running = asyncio.ensure_future(link.run())
        await until(lambda: link.why == "its launcher has closed the connection" or running.done())
        assert not running.done()
        server.close()
        await server.wait_closed()
        async with launching(tmp_path, port):
            await asyncio.wait_for(link.reachable(), 10.0)
        running.cancel()

    asyncio.run(run())


def test_a_wrong_token_ends_the_server_that_has_it(tmp_path, capsys):
    async def run():
        async with launching(tmp_path) as port:
            with pytest.raises(InputError, match=r"launcher of node 1 \(127.0.0.1:\d+\) does not have this server's"):
                await NodeLink(NodeAddress(1, "127.0.0.1", port), "another token of 24").run()
            async with linked(port):
                pass

    asyncio.run(run())
    assert "127.0.0.1 does not have this launcher's token, and is refused" in capsys.readouterr().err


async def greeted(port, version=None):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await introduce(reader, writer, TOKEN)
    writer.write(encoded(Hello(version or launcher.__version__)))
    return reader, writer


def test_another_version_and_a_second_server_are_refused(tmp_path):
    async def run():
        async with launching(tmp_path) as port:
            reader, writer = await greeted(port, "0.0.1")
            denied = await receive(reader, [Denied])
            assert "but the server 0.0.1: install the same version on both" in denied.reason
            writer.close()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(node_link, "__version__", "0.0.1")
                with pytest.raises(InputError, match=r"starts no engines: it has exegpt .*, but the server 0\.0\.1"):
                    await NodeLink(NodeAddress(1, "127.0.0.1", port), TOKEN).run()
            async with linked(port):
                second = NodeLink(NodeAddress(1, "127.0.0.1", port), TOKEN)
                running = asyncio.ensure_future(second.run())
                await until(lambda: "works for a server at 127.0.0.1" in second.why)
                assert not second.up
            await asyncio.wait_for(second.reachable(), 10.0)  # the first has ended
            running.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        (MAX_MESSAGE + 1).to_bytes(8, "little"),
        b"\x05" + bytes(7) + b"{...}",
        encoded(Hello("again")),
        encoded(StartEngine(-1, (), (), 0, (), None, None, 0)),
    ],
    ids=["garbage", "long", "torn", "hello", "a number again"],
)
def test_what_is_no_message_ends_the_connection_and_its_engines(alone, tmp_path, data):  # noqa: F811
    """The launcher serves the next server."""

    async def run():
        async with launching(tmp_path) as port:
            reader, writer = await greeted(port)
            writer.write(encoded(alone))
            await until(lambda: Process.running)
            writer.write(data)
            await until(lambda: Process.running[0].code.done())
            assert Process.running[0].code.result() == -15
            await asyncio.wait_for(reader.read(), 10.0)
            assert reader.at_eof()
            async with linked(port) as link:
                assert link.up

    asyncio.run(run())


def test_strangers_take_no_place_of_a_server(alone, tmp_path, monkeypatch):  # noqa: F811
    """The number of connections without a proof is limited: the oldest is closed for the next, perhaps a server's."""
    monkeypatch.setattr(launcher, "PROOF_S", 60.0)

    async def run():
        async with launching(tmp_path) as port:
            connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(launcher._MOST_UNPROVEN)]
            for reader, _ in connections:
                await reader.readexactly(32)
            async with linked(port) as link:
                assert await asyncio.wait_for(connections[0][0].read(), 10.0) == b"", "the oldest"
                _, connection = await begun(link, alone)
                reader, writer = await link.attach(connection)
                writer.write(b"data")
                assert await reader.readexactly(4) == b"data"
                assert not any(reader.at_eof() for reader, _ in connections[1:]), "a server needs one place at a time"

    asyncio.run(run())


def test_an_attempt_to_attach_is_made_again(alone, tmp_path, monkeypatch):  # noqa: F811
    """The launcher may have dropped the connection for another one; in the end the error says why."""

    class Link(NodeLink):
        fails = 0

        async def _open(self):
            if self.fails:
                self.fails -= 1
                raise [EOFError(), TimeoutError(), InputError("no token.")][self.fails % 3]
            return await super()._open()

    async def run():
        async with launching(tmp_path) as port:
            link = Link(NodeAddress(1, "127.0.0.1", port), TOKEN)
            running = asyncio.ensure_future(link.run())
            await asyncio.wait_for(link.reachable(), 10.0)
            _, connection = await begun(link, alone)
            link.fails = 3
            reader, writer = await link.attach(connection)
            writer.write(b"data")
            assert await reader.readexactly(4) == b"data" and not link.fails
            monkeypatch.setattr(node_link, "ATTACH_S", 0.0)
            link.fails = 3
            with pytest.raises(ConnectionError, match=r"^no token$"):
                await link.attach(connection)
            assert link.fails == 2
            running.cancel()

    asyncio.run(run())


def test_a_stranger_has_some_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "PROOF_S", 0.5)

    async def run():
        async with launching(tmp_path) as port:
            connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(launcher._MOST_UNPROVEN)]
            for reader, _ in connections:
                await reader.readexactly(32)
            for reader, _ in connections:
                assert await asyncio.wait_for(reader.read(), 10.0) == b""
            async with linked(port):
                pass

    asyncio.run(run())


def test_a_silent_server_counts_as_lost(alone, tmp_path, monkeypatch):  # noqa: F811
    """Its machine may be off. Pings keep the connections of other servers."""
    monkeypatch.setattr(launcher, "SILENT_S", 0.5)
    monkeypatch.setattr(node_link, "PING_S", 0.1)

    async def run():
        async with launching(tmp_path) as port:
            _, writer = await greeted(port)
            writer.write(encoded(alone))
            await until(lambda: Process.running and Process.running[0].code.done())
            async with linked(port) as link:
                engine, _ = await begun(link, alone)
                await asyncio.sleep(1.0)
                assert link.up and (-15, "") not in engine.reports

    asyncio.run(run())


def test_a_launcher_runs_a_limited_number_of_engines(alone, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A further one ends the connection, and the engines with it."""
    monkeypatch.setattr(launcher, "MOST_ENGINES", 2)

    async def run():
        async with launching(tmp_path) as port, linked(port) as link:
            engines = [(await begun(link, alone))[0] for _ in range(2)]
            link.send(replace(alone, engine=link.add(Engine())))
            await until(lambda: not link.up)
            assert all(engine.reports[-1] == "gone" for engine in engines) and len(Process.running) == 2

    asyncio.run(run())
    assert "A launcher runs at most 2 engines." in capsys.readouterr().err


@pytest.mark.parametrize("ahead_s", [-7200.0, 0.0, 1e6])
def test_the_clocks_of_both_machines_are_compared(tmp_path, monkeypatch, ahead_s):
    """The error is at most half of a ping's round trip: the launcher read its clock at some time of it."""
    monkeypatch.setattr(launcher, "monotonic", lambda: time.monotonic() + ahead_s)

    async def run():
        async with launching(tmp_path) as port, linked(port) as link:
            shortest_s = min(link._clocks)[0]
            assert abs(link.ahead_s() - ahead_s) <= shortest_s / 2 + 1e-6
            assert shortest_s < 1.0

    asyncio.run(run())


def test_the_shortest_of_the_latest_round_trips_counts():
    """Earlier ones don't count, because the clocks of two machines drift apart."""
    link = NodeLink(NodeAddress(1, "127.0.0.1", 1), TOKEN)
    link._clocks.extend([(0.5, 10.0), (0.1, 10.2), (0.3, 9.9)])
    assert link.ahead_s() == 10.2
    link._clocks.extend([(0.4, 11.0 + number) for number in range(8)])
    assert link.ahead_s() == 11.0


def test_a_ping_is_answered_while_an_engine_starts(alone, tmp_path):  # noqa: F811
    async def run():
        async with launching(tmp_path) as port:
            reader, writer = await greeted(port)
            writer.write(encoded(alone) + encoded(Ping(5)))
            messages = []
            while not any(isinstance(message, Pong) for message in messages):
                messages.append(await receive(reader, FROM_LAUNCHER))
            assert messages[-1].number == 5 and not any(isinstance(message, EngineEnded) for message in messages)
            writer.close()

    asyncio.run(run())
