"""The leader's connection to the server's frontend, whose Unix socket is on rank 0's machine.

    leader ───────────── Unix socket ────────────► frontend    on the same machine
    leader ── TCP ──► rank 0 ── Unix socket ─────► frontend    on another one

Rank 0 passes bytes on unchanged, in both directions. Its threads block in the kernel: they neither poll nor call MPI.
Each end of a TCP connection proves to the other that it has a secret that the ranks share.
Bytes aren't encrypted, as MPI's aren't.
"""

import contextlib
import fcntl
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from xcore.errors import InputError
from xcore.requests.proof import NONCE, PROOF, proof, proves
from xrunner.comm.ranks import Ranks

Connect = Callable[[], socket.socket]

_CHUNK = 2**18
_FRONTEND_S, _LOOK_S = 60.0, 0.1
"""How long a leader waits for a frontend that is starting, and the time between two attempts."""
_PROOF_S, _PATIENCE_S, _CLOSE_S = 2.0, 10.0, 10.0
"""Limits in seconds.

How long a leader may take to connect and to prove itself. How long it waits for the relay's proof: the relay admits
one peer after the other. How long a connection may take to end.
"""
_SIOCGIFADDR = 0x8915
"""ioctl of Linux: the IPv4 address of an interface."""


@dataclass(frozen=True)
class RelayOffer:
    """The addresses at which rank 0 relays; all ranks have them."""

    addresses: tuple[tuple[str, int], ...]
    """IPv4 addresses and ports: one for each of its interfaces by which it sends to other machines."""
    secret: str


@contextlib.contextmanager
def way_to_frontend(ranks: Ranks, path: str) -> Iterator[Connect]:
    """Yield a function that connects the leading rank to the frontend at `path`; all ranks call it.

    Any rank may become the leader. Close the connections before the context ends: rank 0 then passes on all remaining
    bytes.

    Raises:
        InputError: The frontend can't be reached; raised by the yielded function.
    """
    near = next(node for node in ranks.nodes if 0 in node)
    if len(ranks.nodes) == 1:
        yield partial(_connected, partial(_open_unix, path), f"at '{path}'")
        return
    relays: list[Relay] = []

    def offer() -> RelayOffer:
        relays.append(Relay(path, [address for rank, own in enumerate(hosts) if rank not in near for address in own]))
        return relays[0].offer

    hosts = ranks.all(_addresses())
    offered = ranks.share(offer, RelayOffer)
    if ranks.rank in near:
        yield partial(_connected, partial(_open_unix, path), f"at '{path}'")
    else:
        where = ", ".join(f"{host}:{port}" for host, port in offered.addresses) or "no IPv4 address"
        yield partial(_connected, partial(_open_tcp, offered), f"behind rank 0, which relays at {where}")
    for relay in relays:
        relay.close()


class Relay:
    """Rank 0's end: connects peers to the frontend's Unix socket at `path`.

    A peer must have the secret. `peers` are other machines' addresses; the relay listens on the interfaces with routes
    to them.
    """

    def __init__(self, path: str, peers: Iterable[str]):
        self._path, self._secret = path, secrets.token_hex(NONCE)
        self._listening: list[socket.socket] = []
        for source in sorted(set(filter(None, map(_source, peers)))):
            with contextlib.suppress(OSError):  # another address may work, and a leader on this machine needs none
                self._listening.append(socket.create_server((source, 0)))
        self.offer = RelayOffer(tuple(listening.getsockname() for listening in self._listening), self._secret)
        self._tunnels: list[threading.Thread] = []
        for listening in self._listening:
            _thread(partial(self._accept, listening))

    def close(self) -> None:
        """Accept no more connections, and wait for the open ones to end."""
        for listening in self._listening:
            listening.shutdown(socket.SHUT_RDWR)  # close alone doesn't wake the accepting thread
            listening.close()
        until = time.monotonic() + _CLOSE_S
        for tunnel in self._tunnels:
            tunnel.join(max(0.0, until - time.monotonic()))

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                peer, _ = listening.accept()
            except ConnectionError:  # the peer has closed the connection meanwhile
                continue
            except OSError:
                return
            try:
                frontend = self._admit(peer)
            except OSError:  # a peer without the secret, or no frontend yet: the leader tries again
                peer.close()
                continue
            self._tunnels.append(_thread(partial(_relay, peer, frontend)))

    def _admit(self, peer: socket.socket) -> socket.socket:
        """Return a connection to the frontend for a peer that has the secret.

        Raises:
            OSError: The peer has not proved itself, or the frontend can't be reached.
        """
        until, mine = time.monotonic() + _PROOF_S, secrets.token_bytes(NONCE)
        peer.settimeout(_PROOF_S)
        peer.sendall(mine)
        theirs = _read(peer, NONCE, until)
        if not proves(_read(peer, PROOF, until), self._secret, b"leader", mine, theirs):
            raise ConnectionRefusedError("a stranger")
        frontend = _open_unix(self._path)
        try:
            peer.sendall(proof(self._secret, b"relay", theirs, mine))
            _prepare(peer)
        except OSError:
            frontend.close()
            raise
        return frontend


def _connected(connect: Connect, where: str) -> socket.socket:
    """Return a connection to the frontend, which may still be starting.

    Raises:
        InputError: No connection was made in time.
    """
    until = time.monotonic() + _FRONTEND_S
    while True:
        try:
            return connect()
        except OSError as error:
            if time.monotonic() > until:
                why = error.strerror or str(error)
                raise InputError(f"The engine can't connect to the server's frontend {where} ({why}).") from None
            time.sleep(_LOOK_S)


def _open_unix(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _open_tcp(offer: RelayOffer) -> socket.socket:
    """Return a connection to the first of a relay's addresses at which a program with the secret answers."""
    failure = OSError("no address")
    for address in offer.addresses:
        try:
            connection = socket.create_connection(address, _PROOF_S)
        except OSError as error:
            failure = error
            continue
        try:
            until, mine = time.monotonic() + _PATIENCE_S, secrets.token_bytes(NONCE)
            theirs = _read(connection, NONCE, until)
            connection.sendall(mine + proof(offer.secret, b"leader", theirs, mine))
            if proves(_read(connection, PROOF, until), offer.secret, b"relay", mine, theirs):
                _prepare(connection)
                return connection
            failure = ConnectionRefusedError("another program answers")
        except OSError as error:
            failure = error
        connection.close()
    raise failure


def _read(connection: socket.socket, size: int, until: float) -> bytes:
    """Read `size` bytes.

    Raises:
        TimeoutError: The bytes haven't come by `until`.
        ConnectionError: The stream has ended.
    """
    data = b""
    while len(data) < size:
        connection.settimeout(max(1e-3, until - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionAbortedError("closed by the other end")
        data += more
    return data


def _prepare(connection: socket.socket) -> None:
    """Send small messages at once, and detect a machine that is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _relay(peer: socket.socket, frontend: socket.socket) -> None:
    """Pass bytes on in both directions until one end is closed."""
    back = _thread(partial(_pump, frontend, peer))
    _pump(peer, frontend)
    back.join()
    peer.close()
    frontend.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    for end in (sink, source):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)  # what was sent still arrives; the other direction ends, too


def _thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def _addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this machine's interfaces, without loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without one
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return tuple(address for address in found if not address.startswith("127."))


def _source(address: str) -> str | None:
    """Return this machine's address from which packets go to `address`; None if there is no route.

    Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))
        except OSError:
            return None
        host: str = asking.getsockname()[0]
        return host
