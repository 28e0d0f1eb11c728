"""The engine's process: a child of the frontend, or ranks that a launcher has started."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xcore import document
from xcore.child import child_command, ending_with_parent
from xcore.errors import InputError
from xcore.spec import Spec
from xserver.engines.engine_link import EngineLink

DRAIN_LIMIT_S = 3.0
"""Time limit for a draining engine if no client waits for its requests."""
_KILL_AFTER_S = 3.0
_SESSION_FILES = "PRTE_MCA_prte_tmpdir_base"
"""The variable for the directory of the session files of Open MPI's launcher."""
_KILLS = 100
"""Number of checks whether a process still exists; one that waits for a disk or a device doesn't end before that."""


@dataclass(eq=False)
class EngineProcess:
    """The process of `exegpt engine`, with `ranks` ranks under mpirun if there are several."""

    arguments: Sequence[str]
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""
    documents: Path = Path()
    """The folder and the last part of the names of its documents' files: `folder/2` stands for `folder/plan-2.json`."""
    restarts = True
    """Whether it can be started again."""
    lost = False
    """Whether it has ended because its node was lost."""
    told: bool = False
    """Whether it has received the message to drain."""
    _named: list[str] = field(default_factory=list)
    """The options that name its documents."""
    _process: asyncio.subprocess.Process | None = None
    _session_files: tempfile.TemporaryDirectory[str] | None = None
    """The session files of mpirun.

    mpirun names them after its process ID and leaves them if it is killed. It doesn't start if a process with the same
    ID has left such files.
    """

    @property
    def command(self) -> list[str]:
        """The command line to run."""
        if self.ranks == 1:
            return child_command(["engine", *self.arguments, *self._named])
        own = Path(sys.executable).parent / "mpirun"
        mpirun = str(own) if own.is_file() else shutil.which("mpirun")
        if mpirun is None:
            raise InputError("The program 'mpirun', which starts the engine, was not found: pip install 'exegpt[mpi]'.")
        # A launcher that ends ends its ranks; they themselves end with a launcher that is killed.
        engine = child_command(["engine", *self.arguments, *self._named], outlives=True)
        return ending_with_parent(mpirun, ["-n", str(self.ranks), "--bind-to", "none", *engine])

    async def start(self, documents: Mapping[str, Spec]) -> None:
        """Start the process with documents, by the option that names each.

        Raises:
            InputError: Several ranks need an mpirun that isn't there.
        """
        self._named = []
        for option, spec in documents.items():
            path = self.documents.with_name(f"{option.strip('-')}-{self.documents.name}.json")
            document.write(path, spec)
            self._named += [option, str(path)]
        environment = {**os.environ, **self.environment}
        if self.ranks > 1:
            environment |= self._launcher_environment()
        self._process = await asyncio.create_subprocess_exec(
            *self.command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )

    async def wait(self) -> int:
        """Return the exit code when the process has ended."""
        assert self._process, "a process that was started"
        return await self._process.wait()

    async def stop(self, limit_s: float) -> None:
        """End the process and its ranks; a draining engine gets `limit_s` to end on its own."""
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
        await self.kill()  # kill the ranks that the launcher has left behind

    async def kill(self) -> None:
        """Kill the process and its ranks, including stopped ones."""
        if self._process:
            for _ in range(_KILLS):
                if not signal_session(self._process.pid, signal.SIGKILL):
                    break
                await asyncio.sleep(0.01)  # let other engines' requests continue
        if self._session_files:
            self._session_files.cleanup()

    def _launcher_environment(self) -> dict[str, str]:
        """Return Open MPI's environment variables."""
        base = os.environ.get(_SESSION_FILES)
        self._session_files = tempfile.TemporaryDirectory(prefix="exegpt-mpi-", dir=base, ignore_cleanup_errors=True)
        variables = {_SESSION_FILES: self._session_files.name}
        if os.geteuid() == 0:  # starting the server as root is the decision to allow it
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return variables


def signal_session(session: int, number: int) -> bool:
    """Send a signal to all living processes of a session; return whether there was one."""
    sent = False
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, *_, in_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(in_session) == session and state not in "ZX":
                os.kill(int(entry.name), number)
                sent = True
    return sent


_LOOK_S = 0.1
_DRAIN_S = 30.0


class JoinedEngine:
    """Like `EngineProcess`, for ranks that this process neither starts nor ends; rank 0 is its parent."""

    restarts = lost = told = False

    def __init__(self, link: EngineLink):
        self._link, self._parent = link, os.getppid()
        self._joined = False

    async def start(self, documents: Mapping[str, Spec]) -> None:
        """Wait until the engine has connected, or rank 0 has ended; its ranks have read their own documents."""
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
