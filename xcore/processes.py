"""Parallel work: one function for many arguments, in as many processes as there are usable CPUs."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from xcore.policies import plugins
from xcore.usable_cpus import usable_cpus

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Arguments = TypeVarTuple("Arguments")

T = TypeVar("T")

WORTH = 4
"""Least number of calls for which processes are started; a process takes seconds to import what they need."""


class Processes:
    """Processes that start once there is enough work, and end with the context."""

    def __init__(self, worth: int = WORTH) -> None:
        """Start no process yet; `worth` is the number of calls from which processes are started."""
        self._worth = worth
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def each(
        self,
        work: "Callable[[Unpack[Arguments]], T]",
        arguments: "Sequence[tuple[Unpack[Arguments]]]",
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[T]:
        """Call a module's function with each tuple of arguments, in several processes; return the results in order.

        Re-raises what the function raises. `progress` is called with (done, total) after each result.
        """
        if len(arguments) < 2 or (len(arguments) < self._worth and self._pool is None):
            return [work(*of_one) for of_one in arguments]
        if self._pool is None:
            self._pool = process_pool(usable_cpus())
        asked = [self._pool.submit(work, *of_one) for of_one in arguments]
        answers = []
        for answer in asked:
            answers.append(answer.result())
            progress(len(answers), len(asked))
        return answers


def process_pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of this many processes, which end with this process even if it is killed."""
    return ProcessPoolExecutor(workers, get_context("spawn"), _begin)


def _begin() -> None:
    """Prepare a process of a pool."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    plugins.load_inherited()


def _end_with_parent() -> None:
    """Wait for the parent's end. The pool's processes don't notice it themselves: each keeps its queue open."""
    parent = parent_process()
    assert parent, "a process that another has started"
    parent.join()
    os._exit(1)
