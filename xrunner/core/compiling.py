"""Compiling: a thread compiles the grammars of new requests while other requests run.

A schema of 200 properties takes 18 ms, one of 1,000 properties about 90 ms.
All sequences would wait that long for their next tokens (`python -m benchmarks.grammars`).
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Generic, TypeVar

from xcore.requests.grammar import Grammars
from xcore.requests.request import Request

T = TypeVar("T")


class Compiling(Generic[T]):
    """Items of any kind, each with its request, until the request's grammar is compiled or refused."""

    def __init__(self, grammars: Grammars):
        self._grammars = grammars
        self._waiting: list[tuple[T, str, Future[object]]] = []
        """(item, request id, result of the compilation), in the order in which they came."""
        self._aborted: set[str] = set()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammars")  # llguidance computes without Python's lock

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, item: T, request: Request) -> bool:
        """Queue an item if its request's grammar isn't compiled yet. Return whether it was queued."""
        if request.grammar is None or self._grammars.known(request.grammar):
            return False
        self._waiting.append((item, request.id, self._thread.submit(self._grammars.compile, request.grammar)))
        return True

    def abort(self, request_id: str) -> None:
        """Mark a queued request as aborted; `take` reports it."""
        if any(request_id == waiting for _, waiting, _ in self._waiting):
            self._aborted.add(request_id)

    def take(self) -> list[tuple[T, bool]]:
        """Return the items whose grammars are compiled or refused, and whether each was aborted meanwhile.

        The items are in the order of their arrival.
        """
        taken: list[tuple[T, bool]] = []
        while self._waiting and self._waiting[0][2].done():  # the thread takes them in this order
            item, request_id, compiled = self._waiting.pop(0)
            compiled.result()  # an exception here is a bug
            taken.append((item, request_id in self._aborted))
            self._aborted.discard(request_id)
        return taken
