"""Tiny models, made once."""

import json

import pytest
import torch

from xrunner.models.create import create_model

SIZES = {"layers": 3, "hidden": 64, "heads": 4, "ffn": 160, "vocab": 300, "context": 128}

ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": 21},
    "qwen2": {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1},
    "qwen3": {},
    "gpt2": {},
    "opt": {},
}
"""Decoder-only architectures → what their configs have besides the sizes: windows shorter than the tests' prompts."""


def vary_vectors(directory, seed=7):
    """Norms away from one and biases away from nought, so that a mistaken one shows."""
    from safetensors.torch import load_file, save_file

    path, g = directory / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(path)
    for name, tensor in sorted(tensors.items()):
        if tensor.ndim == 1:
            tensors[name] = tensor + 0.2 * torch.randn(tensor.shape, generator=g)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """A model directory of each architecture; of Llama's kind with two KV heads for four heads."""
    root = tmp_path_factory.mktemp("models")
    for arch, more in ARCHITECTURES.items():
        create_model(root / arch, arch, kv_heads=4 if arch in ("gpt2", "opt") else 2, seed=3, **SIZES)
        vary_vectors(root / arch)
        config = json.loads((root / arch / "config.json").read_text())
        (root / arch / "config.json").write_text(json.dumps(config | more))
    return {arch: root / arch for arch in ARCHITECTURES}
