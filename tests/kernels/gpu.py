"""Where the Triton kernels run in tests: on a GPU, or in Triton's interpreter on the CPU."""

import pytest
import torch

from exegpt.kernels.kv_layout import keys_like_values

try:
    from exegpt.kernels.attention_gpu import INTERPRETED
except ModuleNotFoundError:
    INTERPRETED = False

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

needs_triton = pytest.mark.skipif(
    DEVICE.type == "cpu" and not INTERPRETED, reason="no GPU, and no Triton or TRITON_INTERPRET=1 not set in time"
)
"""Marks tests of Triton kernels."""


def there(*tensors):
    """Tensors, lists of them and None, on the device of the tests."""
    moved = [[x.to(DEVICE) for x in t] if isinstance(t, list) else t if t is None else t.to(DEVICE) for t in tensors]
    return moved[0] if len(moved) == 1 else moved


def cache_there(keys, values, *others):
    """A cache, and what else is given, on the device of the tests, its keys laid out as a GPU's."""
    return [keys_like_values(keys).contiguous().to(DEVICE), *(t.to(DEVICE) for t in (values, *others))]
