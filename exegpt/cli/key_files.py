"""Files of keys and tokens, one per line, or the environment's."""

import os
from pathlib import Path

from xcore.console import output
from xcore.errors import InputError

API_KEY, ADMIN_TOKEN, NODE_TOKEN = "EXEGPT_API_KEY", "EXEGPT_ADMIN_TOKEN", "EXEGPT_NODE_TOKEN"
_SIGNS = "use letters, digits and signs, without spaces"
_SHORTEST_TOKEN = 16
"""Characters of a node's token: a listener could find a shorter one by trying all."""


def keys(path: Path | None, variable: str) -> tuple[str, ...]:
    """Return a file's keys, one per line, or without a file the key in the environment variable.

    Raises:
        InputError: There is no such file, or what it or the variable has is no key.
    """
    if path is None:
        key = os.environ.get(variable, "")
        if key and not _is_key(key):
            raise InputError(f"The environment's {variable} is no {_name(variable)}: {_SIGNS}.")
        return (key,) if key else ()
    from xcore.document import read_text

    if not path.is_file():
        raise InputError(f"There is no key file '{path}': write one key per line.")
    lines = [(number, line.strip()) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError(f"'{path}' has no key: write one key per line.")
    for number, key in lines:
        if not _is_key(key):
            raise InputError(f"Line {number} of '{path}' is no {_name(variable)}: {_SIGNS}.")
    if path.stat().st_mode & 0o044:
        output.note(f"other users of this machine can read '{path}': run chmod 600 {path}")
    return tuple(key for _, key in lines)


def _is_key(text: str) -> bool:
    return " " not in text and text.isascii() and text.isprintable()


def _name(variable: str) -> str:
    return "API key" if variable == API_KEY else "token"


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
