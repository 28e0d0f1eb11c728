"""GLM-4.5 and 4.6: leading dense layers, then experts and a shared one."""

from dataclasses import replace

from xcore.architectures.config_sizes import Config
from xcore.architectures.llama_family import grouped_query
from xcore.specs.experts import Experts
from xcore.specs.model import ModelSpec

RECENT_SKEW = 1.01
"""Exponent of the experts' loads that aiconfigurator 0.12.0 takes for DeepSeek-V3 and later models."""


def leading_dense(config: Config, layers: int) -> Experts:
    """Read the experts of a model whose first layers are dense, by the keys of DeepSeek-V3."""
    width = config.size("moe_intermediate_size")
    return Experts(
        count=config.size("n_routed_experts"),
        per_token=config.size("num_experts_per_tok"),
        ffn=width,
        layers=layers - (config.size("first_k_dense_replace") if config.values.get("first_k_dense_replace") else 0),
        shared_ffn=width * (config.size("n_shared_experts") if config.values.get("n_shared_experts") else 0),
        skew=RECENT_SKEW,
    )


def glm4_moe(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a GLM-4.5."""
    spec = grouped_query(config, name)
    return replace(spec, experts=leading_dense(config, spec.layers))
