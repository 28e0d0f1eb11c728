"""The frontend of a server whose ranks a launcher has started: a child of rank 0, in a session of its own, so that it
can still answer when the launcher has ended the ranks.
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
"""Beginnings of the variables by which a process takes itself for a rank."""
_RANK = re.compile(rf"(?:^|\0)(?:{'|'.join(RANK_VARIABLES)})=".encode())
"""In the environment of a rank, and of a script that runs it; not in its launcher's."""
_ENDS_S = 60.0


class FrontendProcess:
    """`exegpt serve` with these arguments, for an engine that connects to `socket`. SIGUSR1 drains it."""

    def __init__(self, arguments: Sequence[str]):
        self._directory = tempfile.TemporaryDirectory(prefix="exegpt-serve-")  # 0700: this user's alone
        self.socket = Path(self._directory.name) / "engine"
        command = child_command([*arguments, "--engine-socket", str(self.socket)])
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)
        with contextlib.suppress(OSError, AttributeError):  # a launcher may have bound the rank to fewer
            os.sched_setaffinity(self._process.pid, os.sched_getaffinity(_launcher()))
        signal.signal(signal.SIGUSR1, self._drain)

    def _drain(self, _: int, frame: FrameType | None) -> None:
        self._process.terminate()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
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
