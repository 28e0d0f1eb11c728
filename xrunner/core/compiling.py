"""Compiling: requests whose grammars a thread compiles while others run. A schema of 200 properties takes 18 ms, of
1,000 some 90 ms, for which all sequences would wait for their next tokens (`python -m benchmarks.grammars`).
"""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Generic, TypeVar

from xcore.requests.grammar import Grammars
from xcore.requests.request import Request

T = TypeVar("T")


class Compiling(Generic[T]):
    """Items of any kind, each with its request, until the request's grammar has been compiled or refused."""

    def __init__(self, grammars: Grammars):
        self._grammars = grammars
        self._waiting: list[tuple[T, str, Future[object]]] = []
        """With the requests' ids."""
        self._aborted: set[str] = set()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammars")  # llguidance computes without Python's lock

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, item: T, request: Request) -> bool:
        """Let an item wait, if its request has a grammar that isn't compiled yet; whether it has to."""
        if request.grammar is None or self._grammars.known(request.grammar):
            return False
        self._waiting.append((item, request.id, self._thread.submit(self._grammars.compile, request.grammar)))
        return True

    def abort(self, request_id: str) -> None:
        """Report a request as aborted when it is taken, if it waits here."""
        if any(request_id == waiting for _, waiting, _ in self._waiting):
            self._aborted.add(request_id)

    def take(self) -> list[tuple[T, bool]]:
        """The items that wait no longer, in the order in which they came, and whether each was aborted meanwhile."""
        taken: list[tuple[T, bool]] = []
        while self._waiting and self._waiting[0][2].done():  # the thread takes them in this order
            item, request_id, compiled = self._waiting.pop(0)
            compiled.result()  # raises what is a bug
            taken.append((item, request_id in self._aborted))
            self._aborted.discard(request_id)
        return taken
