"""DeepSeek-V3 and R1, Kimi-K2, GLM-5: latent attention, leading dense layers, then experts and shared ones."""

from dataclasses import replace

from xcore.architectures.config_sizes import LAYERS, Config
from xcore.architectures.glm_family import leading_dense
from xcore.specs.latent_attention import IndexAttention, LatentAttention
from xcore.specs.model import ModelSpec
from xcore.specs.quantization import checkpoint_format


def deepseek_v3(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a DeepSeek-V3, or of a model with its layers and sparse attention beside (GLM-5)."""
    layers, heads = config.layers(LAYERS), config.size("num_attention_heads")
    nope, rope = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    experts = leading_dense(config, layers)
    if checkpoint_format(config.values, name) == "int4":  # Kimi-K2.5's checkpoint: routed experts alone
        experts = replace(experts, alone=True)
    return ModelSpec(
        name=name,
        architecture=config.kind,
        layers=layers,
        hidden=config.size("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_size=nope + rope,
        ffn=config.size("intermediate_size"),
        gated=True,
        vocab=config.size("vocab_size"),
        context=config.size("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        experts=experts,
        latent=LatentAttention(
            kv_rank=config.size("kv_lora_rank"),
            nope=nope,
            rope=rope,
            value=config.size("v_head_dim"),
            q_rank=config.size("q_lora_rank") if config.has("q_lora_rank") else None,
            index=_index(config) if config.has("index_topk") else None,
        ),
    )


def _index(config: Config) -> IndexAttention:
    return IndexAttention(
        top_k=config.size("index_topk"), heads=config.size("index_n_heads"), head_size=config.size("index_head_dim")
    )
