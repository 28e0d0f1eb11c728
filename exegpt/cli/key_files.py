"""Files of keys and tokens, one per line, or the environment's."""

import os
from pathlib import Path

from xcore.console import output
from xcore.errors import InputError

NODE_TOKEN = "EXEGPT_NODE_TOKEN"
_SHORTEST_TOKEN = 16
"""Characters of a node's token: a listener could find a shorter one by trying all."""


def keys(path: Path | None, variable: str) -> tuple[str, ...]:
    """Return a file's keys, one per line, or the key in the environment variable."""
    if path is None:
        return tuple(filter(None, [os.environ.get(variable)]))
    from xcore.document import read_text

    if not path.is_file():
        raise InputError(f"There is no key file '{path}': write one key per line.")
    lines = [(number, line.strip()) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError(f"'{path}' has no key: write one key per line.")
    for number, key in lines:
        if " " in key or not (key.isascii() and key.isprintable()):
            raise InputError(f"Line {number} of '{path}' is no API key: use letters, digits and signs, without spaces.")
    if path.stat().st_mode & 0o044:
        output.note(f"other users of this machine can read '{path}': run chmod 600 {path}")
    return tuple(key for _, key in lines)


def node_token(path: Path | None, option: str) -> str:
    """Return the token that a server and the launchers of its nodes share.

    Raises:
        InputError: There is none, or it is too short.
    """
    token = next(iter(keys(path, NODE_TOKEN)), None)
    way = f"`openssl rand -hex 32 > token` makes one for {option} token, on all nodes"
    if token is None:
        raise InputError(f"A launcher needs a token: {way}.")
    if len(token) < _SHORTEST_TOKEN:
        raise InputError(f"The token has {len(token)} characters, but needs at least {_SHORTEST_TOKEN}: {way}.")
    return token
