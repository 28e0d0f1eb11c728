"""The messages between a server and launchers: other data are refused, and so are ends without the token."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xcore.errors import InputError
from xcore.requests.proof import NONCE, PROOF, proof, proves
from xserver.nodes import launch_protocol
from xserver.nodes.launch_protocol import (
    FROM_LAUNCHER,
    FROM_SERVER,
    MAX_MESSAGE,
    EndEngine,
    EngineConnected,
    EngineEnded,
    LaunchedModel,
    Ping,
    Pong,
    StartEngine,
    Stranger,
    admit,
    encoded,
    introduce,
    receive,
)

TOKEN = "0123456789abcdef"
START = StartEngine(3, (LaunchedModel("a", 1, "/models/a"),), (0, 2), 4, ("--pinned",), None, {"models": [1]}, 5)


def read(data, kinds=FROM_SERVER):
    async def run():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await receive(reader, kinds)

    return asyncio.run(run())


@pytest.mark.parametrize("message", [START, EndEngine(3), Ping(7)], ids=lambda each: type(each).__name__)
def test_a_message_arrives_as_it_was_sent(message):
    assert read(encoded(message)) == message


@pytest.mark.parametrize("message", [Pong(1, 2.5), EngineConnected(1, 2, 3), EngineEnded(1, -9, "why")], ids=str)
def test_a_launchers_message_is_none_of_a_server(message):
    assert read(encoded(message), FROM_LAUNCHER) == message
    with pytest.raises(InputError, match="is none of StartEngine, EndEngine, Ping"):
        read(encoded(message))


@pytest.mark.parametrize("number", [-1, 2**63, 10**400], ids=["negative", "large", "huge"])
@pytest.mark.parametrize("message", [START, EndEngine(3), Ping(7)], ids=lambda each: type(each).__name__)
def test_numbers_are_limited(message, number):
    """They become parts of file names."""
    name = "number" if isinstance(message, Ping) else "engine"
    with pytest.raises(InputError, match=f"A message {type(message).__name__}.*{name}"):
        read(encoded(replace(message, **{name: number})))


@settings(max_examples=200)
@given(st.binary(max_size=64))
def test_garbage_is_no_message(data):
    with pytest.raises((InputError, asyncio.IncompleteReadError)):
        read(data)
    with pytest.raises(InputError):
        read(len(data).to_bytes(8, "little") + data)


@pytest.mark.parametrize(
    "content, why",
    [
        (["EndEngine", {"engine": "three"}], "engine must be a whole number"),
        (["EndEngine", {"engine": True}], "engine must be a whole number"),
        (["EndEngine", {"engine": 3, "also": 4}], "also is not known"),
        (["EndEngine", {}], "engine is missing"),
        (["EndEngine", [3]], "must be a group of keys"),
        (["EndEngine"], "is none of"),
        ([["EndEngine"], {}], "is none of"),
        ("EndEngine", "is none of"),
        (["os.system", {"command": "true"}], "is none of"),
    ],
    ids=str,
)
def test_a_refusal_says_what_is_wrong_with_a_message(content, why):
    data = json.dumps(content).encode()
    with pytest.raises(InputError, match=why):
        read(len(data).to_bytes(8, "little") + data)


def test_a_long_message_is_refused_before_it_is_read():
    """Only its length has arrived: no memory is taken for the rest."""
    with pytest.raises(InputError, match=f"has {MAX_MESSAGE + 1:,} bytes, but at most {MAX_MESSAGE:,}"):
        read((MAX_MESSAGE + 1).to_bytes(8, "little"))
    with pytest.raises(InputError, match=f"at most {MAX_MESSAGE:,}"):
        encoded(EngineEnded(1, 1, "x" * MAX_MESSAGE))


def test_a_deep_message_is_refused():
    data = b"[" * 100_000
    with pytest.raises(InputError, match="nested too deeply"):
        read(len(data).to_bytes(8, "little") + data)


async def between(launchers, servers):
    """Return the types of the errors that both ends raise.

    Args:
        launchers: The token of the launcher, which calls `admit`.
        servers: The server's end, a function of its streams.
    """
    raised = []

    async def accept(reader, writer):
        try:
            await admit(reader, writer, launchers)
            raised.append(None)
        except (Stranger, asyncio.IncompleteReadError) as error:
            raised.append(type(error))
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        await servers(reader, writer)
        error_of_server = None
    except (Stranger, asyncio.IncompleteReadError) as error:
        error_of_server = type(error)
    writer.close()
    while not raised:
        await asyncio.sleep(0.01)
    server.close()
    return raised[0], error_of_server


@pytest.mark.parametrize("token, want", [(TOKEN, (None, None)), (TOKEN[:-1] + "F", (Stranger, Stranger))])
def test_both_ends_must_have_the_token(token, want):
    assert asyncio.run(between(TOKEN, lambda reader, writer: introduce(reader, writer, token))) == want


def test_the_token_is_never_sent_and_no_proof_serves_twice():
    seen = []

    async def recorded(reader, writer):
        nonce, mine = await reader.readexactly(NONCE), bytes(NONCE)
        sent = mine + proof(TOKEN, b"server", nonce, mine)
        seen.append(nonce + sent)
        writer.write(sent)
        seen.append(await reader.readexactly(PROOF))

    async def replayed(reader, writer):
        await reader.readexactly(NONCE)
        writer.write(seen[0][NONCE:])
        await reader.readexactly(PROOF)

    async def reflected(reader, writer):
        """The launcher's own nonce and proof don't serve as a server's."""
        nonce = await reader.readexactly(NONCE)
        writer.write(nonce + proof(TOKEN, b"launcher", nonce, nonce))
        await reader.readexactly(PROOF)

    assert asyncio.run(between(TOKEN, recorded)) == (None, None)
    assert proves(seen[1], TOKEN, b"launcher", bytes(NONCE), seen[0][:NONCE])
    assert TOKEN.encode() not in b"".join(seen)
    for attack in (replayed, reflected):
        assert asyncio.run(between(TOKEN, attack))[0] is Stranger


def test_a_program_that_is_no_launcher_is_a_stranger():
    async def run():
        async def other(reader, writer):
            writer.write(bytes(NONCE))
            await reader.readexactly(NONCE + PROOF)
            writer.write(bytes(PROOF))

        server = await asyncio.start_server(other, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        launch_protocol.prepare(writer)
        with pytest.raises(Stranger):
            await introduce(reader, writer, TOKEN)
        writer.close()
        server.close()

    asyncio.run(run())
