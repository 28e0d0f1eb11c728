"""Child processes end with their parent, even if it is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mpi import MPIRUN, launcher_environment

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc and prctl are Linux's")

POOL = """
import os, time
from xcore.processes import Processes

def work(number):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    with Processes() as processes:
        processes.each(work, [(number,) for number in range(4)])
"""
IDLE_POOL = POOL.replace("time.sleep(600)", "time.sleep(0)").replace(
    "range(4)])", "range(4)])\n        time.sleep(600)"
)
RANK = """
import os, time
from xrunner.comm.ranks import job

with job():
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(600)
"""
CHILD = """
import subprocess, sys, time
from xcore.child import child_command
import xcore.child

xcore.child._MAIN = xcore.child._MAIN.replace("from exegpt.cli import main", "import os, time").replace(
    "sys.exit(main())", "print(os.getpid(), flush=True); time.sleep(600)"
)
subprocess.run(child_command([]))
"""
PROGRAM = """
import subprocess, sys
from xcore.child import ending_with_parent

subprocess.run(ending_with_parent("/bin/sh", ["-c", "echo $$; exec sleep 600"]))
"""


def is_running(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def children_after_a_kill(command, number, tmp_path):
    """The children still running some time after their parent was killed; they print their process IDs."""
    # Elsewhere than in the checkout, an editable installation's modules are found by a hook, and not by `sys.path`.
    # A session of its own: what a failed test leaves can be ended.
    environment = os.environ | launcher_environment(tmp_path)
    how = {"stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": tmp_path, "start_new_session": True}
    parent = subprocess.Popen(command, **how)
    pids = {int(parent.stdout.readline()) for _ in range(number)}
    try:
        assert all(map(is_running, pids))
        parent.kill()
        parent.wait()
        for _ in range(200):
            if not any(map(is_running, pids)):
                break
            time.sleep(0.05)
        return {pid for pid in pids if is_running(pid)}
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.parametrize("text", [POOL, IDLE_POOL, CHILD, PROGRAM], ids=["pool", "idle pool", "child", "program"])
def test_children_end_with_their_parent(text, tmp_path):
    (tmp_path / "parent.py").write_text(text)
    assert children_after_a_kill([sys.executable, str(tmp_path / "parent.py")], 1, tmp_path) == set()


def test_ranks_end_with_their_launcher(tmp_path):
    if not MPIRUN:
        pytest.skip("there is no mpirun: pip install -e '.[mpi]'")
    (tmp_path / "rank.py").write_text(RANK)
    command = [MPIRUN, "-n", "2", "--bind-to", "none", sys.executable, str(tmp_path / "rank.py")]
    assert children_after_a_kill(command, 2, tmp_path) == set()
