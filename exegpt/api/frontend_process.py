"""The frontend process of a server whose ranks a launcher has started.

It is a child of rank 0 in its own session, so that it can still answer after the launcher has ended the ranks.
"""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from xcore.child import child_command
from xrunner.comm.ranks import RANK_VARIABLES

_LAUNCHERS = "OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_STEP", "SLURM_PROCID"
"""Prefixes of the variables by which a process recognizes itself as a rank."""
_RANK = re.compile(rf"(?:^|\0)(?:{'|'.join(RANK_VARIABLES)})=".encode())
"""Matches the environment of a rank, and of a script that runs it, but not of its launcher."""
_ENDS_S = 60.0


class FrontendProcess:
    """A process of `exegpt serve` with these arguments, for an engine that connects to `socket`.

    SIGUSR1 drains it.
    """

    def __init__(self, arguments: Sequence[str]):
        self._directory = tempfile.TemporaryDirectory(prefix="exegpt-serve-")  # mode 0700: only this user has access
        self.socket = Path(self._directory.name) / "engine"
        command = child_command([*arguments, "--engine-socket", str(self.socket)], outlives=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)
        with contextlib.suppress(OSError, AttributeError):  # a launcher may have bound the rank to fewer CPUs
            os.sched_setaffinity(self._process.pid, os.sched_getaffinity(_launcher()))
        signal.signal(signal.SIGUSR1, self._drain)

    def _drain(self, _: int, frame: FrameType | None) -> None:
        self._process.terminate()

    def wait(self) -> int:
        """Return the exit code when the process has ended."""
        try:
            return self._process.wait(_ENDS_S)
        finally:
            self._process.kill()
            self._directory.cleanup()


def _launcher() -> int:
    """Return the process that has started this rank: its nearest ancestor without a rank's variables."""
    process = os.getppid()
    with contextlib.suppress(OSError):
        while _RANK.search(Path(f"/proc/{process}/environ").read_bytes()):
            status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
            process = int(status.partition("\nPPid:")[2].split()[0])
    return process
