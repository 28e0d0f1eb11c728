"""Tiny models, made once."""

import pytest

from exegpt.models.create import create_model

SIZES = {"layers": 3, "hidden": 64, "heads": 4, "ffn": 160, "vocab": 300, "context": 128}


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """A model directory of each architecture."""
    root = tmp_path_factory.mktemp("models")
    for arch, kv_heads in (("llama", 2), ("gpt2", 4)):
        create_model(root / arch, arch, kv_heads=kv_heads, seed=3, **SIZES)
    return {arch: root / arch for arch in ("llama", "gpt2")}
