"""The KV cache's memory on the CPU: zeros, whatever the system makes of huge pages, and given back."""

import mmap
from pathlib import Path

import pytest
import torch

from xrunner.models.cache import scattered_zeros


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 2, 4, 16), (700, 8, 64, 16), (0, 2, 4, 16)])
def test_it_is_zeros_that_can_be_written(shape, dtype):
    zeros = scattered_zeros(shape, dtype)
    assert zeros.shape == shape and zeros.dtype == dtype and zeros.is_contiguous() and not zeros.any()
    zeros[-1:] = 2
    assert zeros.sum() == 2 * zeros[-1:].numel()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_a_system_built_without_huge_pages_gives_others(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # unknown advice is refused
    assert not scattered_zeros((5, 7), torch.float32).any()


def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not scattered_zeros((5, 7), torch.float32).any()


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="this system has no figure of resident memory")
def test_memory_is_mapped_when_it_is_written_and_given_back_with_the_tensor():
    before, size = resident_bytes(), 2**28
    zeros = scattered_zeros((size // 4,), torch.float32)
    assert resident_bytes() - before < size // 2
    zeros.fill_(1)
    view = zeros[5:9]
    del zeros
    assert resident_bytes() - before > size // 2 and view.tolist() == [1] * 4
    del view
    assert resident_bytes() - before < size // 2
