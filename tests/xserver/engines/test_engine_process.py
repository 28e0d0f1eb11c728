"""Engines under mpirun, and those that can't be started."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mpi import MPIRUN
from xcore.errors import InputError
from xserver.engines.engine_process import EngineProcess


def test_several_ranks_without_mpirun_are_bad_input(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="'mpirun', which starts the engine, was not found"):
        asyncio.run(EngineProcess((), 2).start({}))


@dataclass(eq=False)
class Job(EngineProcess):
    """Two ranks that do nothing, by a launcher whose process ID a killed one had before."""

    script: str = ""

    @property
    def command(self):
        return ["sh", "-c", self.script]


def test_files_of_a_killed_launcher_with_the_same_process_id_are_not_in_the_way(tmp_path, monkeypatch):
    if not MPIRUN:
        pytest.skip("there is no mpirun: pip install -e '.[mpi]'")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    left = 'mkdir "$TMPDIR/ompi.$$"; echo left > "$TMPDIR/ompi.$$/pmix.$(uname -n).tool"'
    run = f"exec '{MPIRUN}' -n 2 --bind-to none --map-by :oversubscribe true"

    async def ended():
        engine = Job((), 2, script=f"{left}; {run}")
        await engine.start({})
        code = await engine.wait()
        await engine.stop(0)
        return code

    assert asyncio.run(ended()) == 0
    assert [path.name.partition(".")[0] for path in tmp_path.iterdir()] == ["ompi"]


def test_the_frontend_does_not_load_torch(server):
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
