"""Turnstile: only a few requests begin in one iteration of the event loop.

An iteration runs everything that is ready. With hundreds of requests to refuse it would take a fraction of a second,
and an answer passes several iterations from the engine to its client.
"""

import asyncio
from collections import deque

_MOST = 8
"""Requests that begin in an iteration."""


class Turnstile:
    """The turns of one event loop's requests, in order of arrival."""

    def __init__(self) -> None:
        self._left = _MOST
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._refills = False

    async def take(self) -> None:
        """Return when it is the caller's turn."""
        self._refill_soon()
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _refill_soon(self) -> None:
        if not self._refills:
            self._refills = True
            asyncio.get_running_loop().call_soon(self._refill)

    def _refill(self) -> None:
        self._left, self._refills = _MOST, False
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                self._left -= 1
        if self._waiting:
            self._refill_soon()
