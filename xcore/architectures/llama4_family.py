"""Llama 4 (the text part): chunked attention in three of four layers, one of many experts and a shared one."""

from dataclasses import replace

from xcore.architectures.config_sizes import Config
from xcore.architectures.llama_family import grouped_query
from xcore.specs.experts import Experts
from xcore.specs.model import ModelSpec
from xcore.specs.windows import Windows

_WHOLE = 4
"""Every fourth layer sees all tokens (transformers' default for `no_rope_layers`)."""


def llama4(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a Llama 4; its dense layers have `intermediate_size_mlp`."""
    spec = grouped_query(config, name)
    width = spec.ffn
    experts = Experts(
        count=config.size("num_local_experts"),
        per_token=config.size("num_experts_per_tok"),
        ffn=width,
        layers=spec.layers // config.size("interleave_moe_layer_step", 1),
        shared_ffn=width,
    )
    chunk = config.size("attention_chunk_size", 8192)
    windows = Windows(chunk, spec.layers - spec.layers // _WHOLE, "chunks")
    return replace(spec, ffn=config.size("intermediate_size_mlp", 2 * width), experts=experts, windows=windows)
