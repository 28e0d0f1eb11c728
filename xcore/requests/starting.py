"""Starting: a text that says what an engine does before it opens, in a file beside the frontend's socket."""

import contextlib
import os
from pathlib import Path

_MOST = 200


def say_starting(socket: Path | None, text: str) -> None:
    """Replace the text that describes the engine's start; do nothing without a socket."""
    if socket is None:
        return
    with contextlib.suppress(OSError):  # a full disk, say: the text is a convenience
        new = socket.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, socket.with_suffix(".starting"))


def starting_text(socket: Path | None) -> str:
    """Return the text that describes the engine's start; empty if there is none."""
    if socket is None:
        return ""
    try:
        return socket.with_suffix(".starting").read_text(encoding="utf-8", errors="replace")[:_MOST]
    except OSError:
        return ""
