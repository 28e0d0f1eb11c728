"""GPT-2 and OPT: learned positions, biases, and a feed-forward layer without a gate."""

from xcore.architectures.config_sizes import LAYERS, Config
from xcore.errors import InputError
from xcore.specs.model import ModelSpec


def gpt2(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a GPT-2."""
    heads, hidden = config.size("n_head"), config.size("n_embd")
    return ModelSpec(
        name=name,
        architecture="gpt2",
        layers=config.layers("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=config.head_size("n_embd", "n_head"),
        ffn=config.size("n_inner", 4 * hidden),
        gated=False,
        vocab=config.size("vocab_size"),
        context=config.size("n_positions"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def opt(config: Config, name: str) -> ModelSpec:
    """Read the sizes of an OPT; InputError for one that projects its embeddings."""
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    if config.values.get("word_embed_proj_dim", hidden) != hidden:
        raise InputError(f"Model '{name}' projects its embeddings (as opt-350m does), which is not supported.")
    return ModelSpec(
        name=name,
        architecture="opt",
        layers=config.layers(LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=config.head_size("hidden_size", "num_attention_heads"),
        ffn=config.size("ffn_dim"),
        gated=False,
        vocab=config.size("vocab_size"),
        context=config.size("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
