"""The compiled kernels use as many threads as torch, and give the same with any number."""

import numba
import pytest
import torch

from exegpt.kernels.norm import rms_norm
from exegpt.kernels.threads import compiled


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


def test_other_dtypes_are_not_compiled():
    assert compiled(torch.zeros(2)) and not compiled(torch.zeros(2, dtype=torch.bfloat16))
    assert not compiled(torch.zeros(2, device="meta"))
