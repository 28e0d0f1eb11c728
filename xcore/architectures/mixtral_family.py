"""Mixtral and MiniMax-M2: every layer's feed-forward network is a mixture of experts of `intermediate_size`."""

from dataclasses import replace

from xcore.architectures.config_sizes import Config
from xcore.architectures.llama_family import grouped_query
from xcore.specs.experts import Experts
from xcore.specs.model import ModelSpec

_SKEW = {"minimax_m2": 1.01}
"""Exponents of the loads of models since DeepSeek-V3; others have the default (aiconfigurator 0.12.0)."""


def mixtral(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a mixture of experts with the keys of Mixtral."""
    spec = grouped_query(config, name)
    experts = Experts(
        count=config.size("num_local_experts"),
        per_token=config.size("num_experts_per_tok"),
        ffn=spec.ffn,
        layers=spec.layers,
        shared_ffn=config.size("shared_intermediate_size") if config.values.get("shared_intermediate_size") else 0,
        skew=_SKEW.get(config.kind, Experts.skew),
    )
    return replace(spec, experts=experts)
