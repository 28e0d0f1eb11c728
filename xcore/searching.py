"""A search in its own process, so that other work doesn't wait for it.

The problem and the answer are JSON on its standard input and output. The process ends when its standard input ends.
"""

import os
import signal
import sys
import threading
from typing import TypeVar

from xcore import document
from xcore.policies import plugins

Problem = TypeVar("Problem")


def process_text(module: str) -> str:
    """Return the program of a process that runs the module's `main`, with this process's module path."""
    return f"import sys; sys.path[:] = sys.argv[1:]; from {module} import main; main()"


def read_problem(cls: type[Problem]) -> Problem:
    """Read this process's problem. From now on it ends with its parent, and runs at a lower priority."""
    what = "the search's problem"
    plugins.load_inherited()
    problem = document.from_dict(cls, document.parse_json(sys.stdin.readline(), what), what)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.nice(19)  # other work goes first if no CPUs are idle
    return problem


def write_answer(answer: object) -> None:
    """Write the answer to standard output."""
    print(document.dumps(document.to_dict(answer), indent=None), flush=True)


def _end_with_the_parent() -> None:
    while os.read(0, 1):
        pass
    if os.getpgrp() == os.getpid():  # it has its own group: end the processes that it has started, too
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
