"""A cache with more elements than an int32 counts, as large GPUs have: the kernels find its last blocks."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from exegpt.kernels.attention import attention_reference
from exegpt.kernels.attention_gpu import attention_gpu
from exegpt.kernels.kv_blocks_gpu import copy_blocks_gpu
from exegpt.kernels.kv_write_gpu import kv_write_gpu

from .gpu import DEVICE, needs_triton, there

pytestmark = needs_triton

SIZE = 16
"""Of heads and of blocks."""
BLOCKS = 2**31 // SIZE**2 + 3


@pytest.fixture
def cache(tmp_path):
    """Keys and values of one head: where there is no GPU, in files of which only what is written takes room."""
    shape = (BLOCKS, 1, SIZE, SIZE)
    if DEVICE.type == "cuda":
        if torch.cuda.mem_get_info()[0] < 10 * 2**30:
            pytest.skip("the GPU has less than 10 GiB left")
        return [torch.zeros(shape, dtype=torch.float16, device=DEVICE) for _ in "kv"]
    return [torch.from_numpy(np.memmap(tmp_path / name, np.float16, "w+", shape=shape)) for name in "kv"]


@pytest.mark.parametrize("splits", [1, 2])
def test_the_last_blocks_are_written_and_read(cache, splits):
    tokens = 2 * SIZE
    blocks = torch.tensor([BLOCKS - 1, BLOCKS - 3])
    q, k, v = torch.randn(3, tokens, 1, SIZE).half().unbind()
    slots = (blocks.unsqueeze(1) * SIZE + torch.arange(SIZE)).flatten()
    kv_write_gpu(*there(k, v), *cache, there(slots))
    offsets, contexts = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    got = there(torch.zeros(q.shape).half())
    attention_gpu(there(q), *cache, *there(blocks.int().unsqueeze(0), offsets, contexts), got, splits=splits)
    few = [k.view(2, SIZE, 1, SIZE).permute(0, 2, 3, 1), v.view(2, SIZE, 1, SIZE).transpose(1, 2)]
    expected = attention_reference(q, *few, torch.tensor([[0, 1]]), offsets, contexts)
    torch.testing.assert_close(got.cpu(), expected, atol=2e-3, rtol=2e-3)


def test_the_last_blocks_are_copied(cache):
    cache[0][BLOCKS - 1] = 3
    buffer = there(torch.zeros(1, 1, SIZE**2).half())
    for block, gather in ((BLOCKS - 1, True), (BLOCKS - 2, False)):
        copy_blocks_gpu(cache[:1], there(torch.tensor([block])), buffer, gather)
    assert (cache[0][BLOCKS - 2] == 3).all() and not cache[0][BLOCKS - 3].any()
