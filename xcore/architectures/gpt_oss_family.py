"""gpt-oss: experts in every layer, a window in every other layer, and one logit a head as an attention sink."""

from dataclasses import replace

from xcore.architectures.config_sizes import Config
from xcore.architectures.llama_family import grouped_query, windows_by_type
from xcore.specs.experts import Experts
from xcore.specs.model import ModelSpec


def gpt_oss(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a gpt-oss; its published checkpoints have the experts alone in mxfp4."""
    spec = grouped_query(config, name)
    experts = Experts(
        count=config.size("num_local_experts"),
        per_token=config.size("num_experts_per_tok"),
        ffn=spec.ffn,
        layers=spec.layers,
        alone=True,
        biased=True,
    )
    alternating = ["sliding_attention", "full_attention"] * spec.layers
    return replace(spec, experts=experts, windows=windows_by_type(config, spec.layers, alternating, 128))
