"""The listening socket."""

import socket
from types import SimpleNamespace

from tests.server.conftest import free_port


def test_accepted_connections_send_tokens_without_delay():
    """Nagle's algorithm would hold a token back until the client has acknowledged the one before: up to 40 ms."""
    from exegpt.server.supervisor import bind

    options = SimpleNamespace(host="127.0.0.1", port=free_port())
    with bind(options) as listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
