"""Which kernels take a tensor."""

import torch


def on_gpu(x: torch.Tensor) -> bool:
    """Whether the Triton kernels take this tensor. Called as `device.on_gpu`, so that there is one place to ask."""
    return x.device.type == "cuda"
