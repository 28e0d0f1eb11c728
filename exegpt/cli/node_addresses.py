"""The addresses of nodes on a command line."""

import re

from xcore.errors import InputError
from xmulti.serving.planned_units import NodesInUse
from xserver.nodes.node_link import NodeAddress

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]=]+):([0-9]{1,5})")


def host_and_port(text: str, option: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT; an IPv6 address is in brackets.

    Raises:
        InputError: The text is no address; the message names the option.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= 65535 or not _is_host(match[1]):
        raise InputError(f"{option} '{text}' is no address: write HOST:PORT, like 10.0.0.2:8100 or [::1]:8100.")
    return match[1].strip("[]"), int(match[2])


def _is_host(name: str) -> bool:
    """Return whether a host's name can be looked up: its labels are neither empty nor too long."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def node_addresses(texts: list[str] | None) -> tuple[NodesInUse, tuple[NodeAddress, ...]]:
    """Return the nodes on which a server can run engines, and the addresses of those with a launcher.

    Raises:
        InputError: A text is neither NODE=HOST:PORT nor NODE=local, or a node or this machine is named twice.
    """
    if not texts:
        return NodesInUse(named=False), ()
    local, addresses = None, dict[int, NodeAddress]()
    for text in texts:
        name, _, where = text.partition("=")
        if not re.fullmatch("[0-9]{1,6}", name) or not where:
            raise InputError(f"--node '{text}' names no node: write NODE=HOST:PORT or NODE=local, with nodes from 0.")
        node = int(name)
        if node == local or node in addresses:
            raise InputError(f"--node names node {node} twice: leave one of them out.")
        if where != "local":
            addresses[node] = NodeAddress(node, *host_and_port(where, "--node"))
        elif local is None:
            local = node
        else:
            raise InputError(f"--node has two nodes, {local} and {node}, on this machine: only one can be local.")
    return NodesInUse(local, tuple(addresses)), tuple(addresses.values())
