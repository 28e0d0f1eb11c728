"""`exegpt` as a child process, which finds its modules where its parent does, and child processes that end with it."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_MAIN = """
import sys
sys.path[:] = sys.argv.pop(1).split("\\n")
if parent := int(sys.argv.pop(1)):
    from xcore.child import end_with_parent
    end_with_parent(parent)
from exegpt.cli import main
sys.exit(main())
"""
_EXEC = """
import os, sys
sys.path[:] = sys.argv.pop(1).split("\\n")
from xcore.child import end_with_parent
end_with_parent(int(sys.argv[1]), int(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""
_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def child_command(arguments: Sequence[str], outlives: bool = False) -> list[str]:
    """Return the command line of `exegpt` with these arguments, for a child of this process.

    The child ends with this process, unless `outlives` is set or another process starts the child.
    """
    return [sys.executable, "-c", _MAIN, _path(), "0" if outlives else str(os.getpid()), *arguments]


def ending_with_parent(program: str, arguments: Sequence[str], number: int = signal.SIGTERM) -> list[str]:
    """Return the command line of a program that gets the signal when this process ends; `program` is its path."""
    return [sys.executable, "-c", _EXEC, _path(), str(os.getpid()), str(number), program, *arguments]


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends, even if the parent is killed (Linux only).

    `parent`: the process that started this one and may have ended already; None: the present parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def _path() -> str:
    return "\n".join(str(Path(entry).resolve()) for entry in sys.path)
