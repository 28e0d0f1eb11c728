"""gpt-oss: experts in every layer, a window in every other layer, and one logit a head as an attention sink."""

from dataclasses import replace

from xcore.architectures.config_sizes import Config
from xcore.architectures.llama_family import windows_by_type
from xcore.architectures.mixtral_family import mixtral
from xcore.specs.model import ModelSpec


def gpt_oss(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a gpt-oss; its published checkpoints have the experts alone in mxfp4."""
    spec = mixtral(config, name)
    assert spec.experts
    experts = replace(spec.experts, alone=True, biased=True)
    alternating = ["sliding_attention", "full_attention"] * spec.layers
    return replace(spec, experts=experts, windows=windows_by_type(config, spec.layers, alternating, 128))
