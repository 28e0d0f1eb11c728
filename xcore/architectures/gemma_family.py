"""Gemma 2 and 3 (the text part): windows in most layers, four norms in each."""

from dataclasses import replace

from xcore.architectures.config_sizes import Config
from xcore.architectures.llama_family import grouped_query, windows_by_type
from xcore.specs.model import ModelSpec


def gemma2(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a Gemma 2: every other layer has a window, the first one too."""
    return _windowed(config, name, 1, 4096)


def gemma3(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a Gemma 3: of six layers, five have a window."""
    pattern = config.size("sliding_window_pattern", 6)
    return _windowed(config, name, pattern - 1, 1024)


def _windowed(config: Config, name: str, sliding: int, window: int) -> ModelSpec:
    spec = grouped_query(config, name)
    types = (["sliding_attention"] * sliding + ["full_attention"]) * spec.layers
    tied = config.flag("tie_word_embeddings", True)
    return replace(spec, tied_embeddings=tied, windows=windows_by_type(config, spec.layers, types, window))
