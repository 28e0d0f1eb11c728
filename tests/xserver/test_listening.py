"""The listening socket."""

import socket
from types import SimpleNamespace

from tests.xserver.conftest import free_port


def test_accepted_connections_send_tokens_without_delay_and_close_though_nobody_reads():
    """Nagle's algorithm would hold a token back until the client has acknowledged the one before: up to 40 ms. And a
    connection is closed once what it has sent is read, unless there is a limit.
    """
    from xserver.engines.supervisor import bind

    options = SimpleNamespace(host="127.0.0.1", port=free_port(), stall_timeout_s=2.5)
    with bind(options) as listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2500
