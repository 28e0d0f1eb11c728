"""The engine as a child of the frontend: started in a session of its own, watched, ended with it."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xcore.child import child_command
from xcore.errors import InputError

DRAIN_LIMIT_S = 3.0
"""How long an engine that was told to drain may take, if nobody waits for its requests."""
_KILL_AFTER_S = 3.0
_SESSION_FILES = "PRTE_MCA_prte_tmpdir_base"
"""Where Open MPI's launcher puts its session's files."""
_KILLS = 100
"""Looks for a process that is still there: one that waits for a disk or a device doesn't end before that."""


@dataclass(eq=False)
class EngineProcess:
    """`exegpt engine`, as `ranks` ranks under mpirun where they are several."""

    arguments: Sequence[str]
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it gets beside this process's."""
    restarts = True
    """Whether it can be started again."""
    told: bool = False
    """Whether it was told to drain."""
    _process: asyncio.subprocess.Process | None = None
    _session_files: tempfile.TemporaryDirectory[str] | None = None
    """Of mpirun, which names them after its process ID, leaves them if it is killed, and doesn't start where a process
    with that ID has left some.
    """

    @property
    def command(self) -> list[str]:
        """What is run."""
        engine = child_command(["engine", *self.arguments])
        if self.ranks == 1:
            return engine
        mpirun = Path(sys.executable).parent / "mpirun"
        return [str(mpirun) if mpirun.is_file() else "mpirun", "-n", str(self.ranks), "--bind-to", "none", *engine]

    async def start(self) -> None:
        """Start it; InputError where there is no mpirun for several ranks."""
        environment = {**os.environ, **self.environment}
        if self.ranks > 1:
            environment |= self._launcher_environment()
        command = self.command
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except FileNotFoundError:
            raise InputError(
                f"There is no '{command[0]}' to start the engine with: pip install 'exegpt[mpi]'."
            ) from None

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process, "a process that was started"
        return await self._process.wait()

    async def stop(self, limit_s: float) -> None:
        """End it and its ranks; one that was told to drain ends by itself, within `limit_s`."""
        process = self._process
        if process is None:
            return
        if self.told:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), limit_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not signal_session(process.pid, number):
                break
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_AFTER_S)
        await self.kill()  # ranks that their launcher has left

    async def kill(self) -> None:
        """End it and its ranks at once, stopped ones too."""
        if self._process:
            for _ in range(_KILLS):
                if not signal_session(self._process.pid, signal.SIGKILL):
                    break
                await asyncio.sleep(0.01)  # other engines' requests go on
        if self._session_files:
            self._session_files.cleanup()

    def _launcher_environment(self) -> dict[str, str]:
        """Open MPI's variables."""
        base = os.environ.get(_SESSION_FILES)
        self._session_files = tempfile.TemporaryDirectory(prefix="exegpt-mpi-", dir=base, ignore_cleanup_errors=True)
        variables = {_SESSION_FILES: self._session_files.name}
        if os.geteuid() == 0:  # who has started the server as root has decided so
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return variables


def signal_session(session: int, number: int) -> bool:
    """Send a signal to all living processes of a session; whether there was one."""
    sent = False
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, *_, in_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(in_session) == session and state not in "ZX":
                os.kill(int(entry.name), number)
                sent = True
    return sent
