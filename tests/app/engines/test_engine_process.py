"""Engines that can't be started."""

import asyncio
import sys

import pytest

from exegpt.app.engines.engine_process import EngineProcess
from exegpt.errors import InputError


def test_several_ranks_without_mpirun_are_bad_input(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="no 'mpirun'"):
        asyncio.run(EngineProcess((), 2).start())
