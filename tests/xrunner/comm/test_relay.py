"""Rank 0 relays bytes as they are, for those alone who have the ranks' secret."""

import socket
import threading
from dataclasses import replace

import pytest

from xcore.errors import InputError
from xrunner.comm import relay
from xrunner.comm.ranks import Ranks
from xrunner.comm.relay import Relay, way_to_frontend

BYTES = bytes(range(256)) * 2**15  # 8 MiB: more than sockets buffer


@pytest.fixture
def frontend(tmp_path):
    """A listening Unix socket and its path."""
    path = str(tmp_path / "engine")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        listening.settimeout(20)
        yield listening, path


@pytest.fixture
def relaying(frontend):
    made = Relay(frontend[1], ["127.0.0.1"])
    yield made
    made.close()


def read_all(connection):
    data = bytearray()
    while more := connection.recv(2**20):
        data += more
    return bytes(data)


def test_bytes_go_both_ways_and_the_end_of_either_ends_both(frontend, relaying):
    for closes in (0, 1):
        leader = relay._open_tcp(relaying.offer)
        other, _ = frontend[0].accept()
        ends = leader, other
        for source, sink in (ends, ends[::-1]):
            sending = threading.Thread(target=source.sendall, args=(BYTES,))
            sending.start()
            got = b""
            while len(got) < len(BYTES):
                got += sink.recv(2**20)
            sending.join()
            assert got == BYTES
        ends[closes].sendall(b"the last words")
        ends[closes].close()
        ends[1 - closes].settimeout(20)
        assert read_all(ends[1 - closes]) == b"the last words"
        ends[1 - closes].close()


def test_who_lacks_the_secret_reaches_nothing(frontend, relaying):
    """Neither a stranger, nor one that is silent, keeps the leader out."""
    wrong = replace(relaying.offer, secret="0" * 64)
    with pytest.raises(OSError, match="closed by the other end"):
        relay._open_tcp(wrong)
    with socket.create_connection(relaying.offer.addresses[0]):  # says nothing
        connection = relay._connected(lambda: relay._open_tcp(relaying.offer), "here")
    frontend[0].accept()[0].close()
    assert read_all(connection) == b""
    connection.close()
    frontend[0].settimeout(0.2)
    with pytest.raises(TimeoutError):  # the others were never connected
        frontend[0].accept()


def test_a_leader_trusts_no_other_program_at_the_address(frontend):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            connection.sendall(bytes(32))
            connection.recv(64)
            connection.sendall(bytes(32))
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConnectionRefusedError, match="another program"):
            relay._open_tcp(relay.RelayOffer((other.getsockname(),), "0" * 64))


def test_without_a_frontend_the_relay_takes_nobody(tmp_path, monkeypatch):
    made = Relay(str(tmp_path / "none"), ["127.0.0.1"])
    monkeypatch.setattr(relay, "_FRONTEND_S", 0.3)
    with pytest.raises(
        InputError, match=r"can't connect to the server's frontend behind rank 0 \(closed by the other end\)"
    ):
        relay._connected(lambda: relay._open_tcp(made.offer), "behind rank 0")
    made.close()


def test_one_machine_needs_no_relay(frontend):
    with way_to_frontend(Ranks(), frontend[1]) as connect:
        connection = connect()
        assert connection.family == socket.AF_UNIX and connection.getpeername() == frontend[1]
        connection.close()


def test_addresses_are_those_of_interfaces():
    for address in relay._addresses():
        assert not address.startswith("127.")
        socket.create_server((address, 0)).close()  # it is this machine's
        assert relay._source(address) == address


def test_without_a_network_to_the_other_machines_the_leader_gives_the_reason(frontend, monkeypatch):
    """Rank 0 does without where the leader is on its own machine."""
    made = Relay(frontend[1], [])
    assert made.offer.addresses == ()
    monkeypatch.setattr(relay, "_FRONTEND_S", 0.0)
    with pytest.raises(InputError, match=r"relays at no IPv4 address \(no address\)"):
        relay._connected(lambda: relay._open_tcp(made.offer), "behind rank 0, which relays at no IPv4 address")
    made.close()
