"""T5: an encoder and a decoder, with relative positions."""

from xcore.architectures.config_sizes import Config
from xcore.specs.model import ModelSpec


def t5(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a T5."""
    layers, heads = config.layers("num_layers"), config.size("num_heads")
    return ModelSpec(
        name=name,
        architecture="t5",
        layers=config.layers("num_decoder_layers", layers),
        encoder_layers=layers,
        hidden=config.size("d_model"),
        heads=heads,
        kv_heads=heads,
        head_size=config.size("d_kv"),
        ffn=config.size("d_ff"),
        gated=str(config.values.get("feed_forward_proj", "relu")).startswith("gated"),
        vocab=config.size("vocab_size"),
        context=config.size("n_positions", 512),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
