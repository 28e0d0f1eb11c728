"""The compiled kernels use as many threads as torch, and give the same with any number."""

import os
import subprocess
import sys

import numba
import pytest
import torch

from exegpt.kernels.norm import rms_norm
from exegpt.kernels.numba_threads import compiled


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
    compiled(torch.zeros(1))


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_threads_follow_torch(threads, count):
    threads(count)
    x, w = torch.randn(33, 64), torch.rand(64)
    y = rms_norm(x, w, 1e-5)
    assert numba.get_num_threads() == min(count, numba.config.NUMBA_NUM_THREADS)
    threads(1)
    assert torch.equal(rms_norm(x, w, 1e-5), y)


@pytest.mark.parametrize("count", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_openmp_settings_of_the_environment_hold(count):
    """Two threads on one CPU would wait for each other, milliseconds in every kernel."""
    code = (
        "import torch, exegpt.kernels.norm as norm, exegpt.kernels.sampling, numba;"
        "norm.rms_norm(torch.ones(4, 64), torch.ones(64), 1e-5);"
        "print(torch.get_num_threads(), numba.get_num_threads())"
    )
    environment = os.environ | {"OMP_NUM_THREADS": count}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    least = min(int(count), numba.config.NUMBA_NUM_THREADS)
    assert done.stdout.split() == [count, str(least)]


def test_other_dtypes_are_not_compiled():
    assert compiled(torch.zeros(2)) and compiled(torch.zeros(2, dtype=torch.bfloat16))
    assert not compiled(torch.zeros(2, dtype=torch.float16)) and not compiled(torch.zeros(2, dtype=torch.int64))
    assert not compiled(torch.zeros(2, device="meta"))
