"""Qwen3-MoE: experts in every layer but those that the config leaves out."""

from dataclasses import replace

from xcore.architectures.config_sizes import Config
from xcore.architectures.llama_family import grouped_query
from xcore.errors import InputError
from xcore.specs.experts import Experts
from xcore.specs.model import ModelSpec


def qwen3_moe(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a Qwen3-MoE."""
    spec = grouped_query(config, name)
    step, dense = config.size("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise InputError(f"The config of model '{name}' has mlp_only_layers = {dense!r}: it must be a list of layers.")
    sparse = sum((layer + 1) % step == 0 and layer not in dense for layer in range(spec.layers))
    experts = Experts(
        count=config.size("num_experts"),
        per_token=config.size("num_experts_per_tok"),
        ffn=config.size("moe_intermediate_size"),
        layers=sparse,
    )
    return replace(spec, experts=experts)
