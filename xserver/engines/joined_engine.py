"""An engine whose ranks a launcher has started (`mpirun -n 4 exegpt serve`): it starts and ends with the job."""

import asyncio
import os

from xserver.engines.engine_link import EngineLink

_LOOK_S = 0.1
_DRAIN_S = 30.0


class JoinedEngine:
    """Like `EngineProcess`, for ranks that this process neither starts nor ends; rank 0 is its parent."""

    restarts = False
    told = False

    def __init__(self, link: EngineLink):
        self._link, self._parent = link, os.getppid()
        self._joined = False

    async def start(self) -> None:
        """Wait until the engine has connected, or rank 0 has ended."""
        while self._link.opened is None and os.getppid() == self._parent:
            await asyncio.sleep(_LOOK_S)

    async def wait(self) -> int:
        """Return when the engine has ended."""
        while self._link.opened is not None and os.getppid() == self._parent:
            await asyncio.sleep(_LOOK_S)
        return 1

    async def stop(self, limit_s: float) -> None:
        """Wait until the draining engine has ended: longer than `limit_s`, because no other process ends it."""
        until = asyncio.get_running_loop().time() + max(limit_s, _DRAIN_S)
        while self._link.opened is not None and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_LOOK_S)

    async def kill(self) -> None:
        """Disconnect the engine: its launcher ends it when the socket is closed."""
        self._link.disconnect()
