"""LoopLag: by how much the event loop is late, because it has more to do than it can."""

import asyncio
import time

_BEAT_S = 0.02
"""Seconds between two measurements."""
_WINDOW_S = 2.0
"""The largest lag of the last one to two windows counts."""


class LoopLag:
    """The lag of the loop in which `watch` runs: 0 before that."""

    def __init__(self) -> None:
        self._now_s = self._before_s = 0.0

    @property
    def recent_s(self) -> float:
        """The largest lag of the last seconds."""
        return max(self._now_s, self._before_s)

    async def watch(self) -> None:
        """Measure until the task is cancelled: a sleep that ends late shows how long other tasks wait for a turn."""
        while True:
            self._before_s, self._now_s = self._now_s, 0.0
            until_s = time.monotonic() + _WINDOW_S
            while (began_s := time.monotonic()) < until_s:
                await asyncio.sleep(_BEAT_S)
                self._now_s = max(self._now_s, time.monotonic() - began_s - _BEAT_S)
