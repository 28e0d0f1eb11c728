"""Tiny models, and jobs of several ranks."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.mpi import MPIRUN, launcher_environment
from xrunner.models.create import create_model

from .cells import SIZES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """A model directory of each architecture; the Llama's weights in two files."""
    root = tmp_path_factory.mktemp("models")
    for arch, kv_heads, shards in (("llama", 2, 2), ("gpt2", 4, 1)):
        create_model(root / arch, arch, kv_heads=kv_heads, seed=11, shards=shards, **SIZES)
    return {arch: root / arch for arch in ("llama", "gpt2")}


@pytest.fixture(scope="session")
def mpi():
    """Skips where there is no MPI."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install -e '.[mpi]'")
    if not MPIRUN:
        pytest.skip("there is no mpirun: pip install -e '.[mpi]'")


def launch(programs, root, environment):
    """Starts Python as the ranks of a job: pairs of how many, and their arguments."""
    variables = {"OMP_NUM_THREADS": "1"} | launcher_environment(tempfile.mkdtemp(dir=root))
    line = [MPIRUN]
    for ranks, arguments in programs:
        line += [":"] * (len(line) > 1) + ["-n", str(ranks), sys.executable, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, cwd=ROOT, env=os.environ | variables | environment, **pipes)


def finish(process, timeout):
    """A job's output and exit code."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def start(mpi, tmp_path_factory):
    """Starts Python as the ranks of a job, and gives its process."""
    root = tmp_path_factory.mktemp("jobs")
    return lambda ranks, *arguments, **environment: launch([(ranks, arguments)], root, environment)


@pytest.fixture(scope="session")
def job(start):
    """Runs Python as the ranks of a job to its end."""
    return lambda *arguments, timeout=110, **environment: finish(start(*arguments, **environment), timeout)


@pytest.fixture(scope="session")
def start_each(mpi, tmp_path_factory):
    """Runs a job of two ranks with arguments for each."""
    root = tmp_path_factory.mktemp("jobs")
    return lambda first, second: finish(launch([(1, first), (1, second)], root, {}), 110)
